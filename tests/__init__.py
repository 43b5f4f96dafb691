"""Tests: one folder per room, one file per module."""
