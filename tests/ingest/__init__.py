"""Tests of the per-vbucket brain."""
