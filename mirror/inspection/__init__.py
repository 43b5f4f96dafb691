"""Inspection: examine a source, compare a mirror with it, and fetch vbuckets again."""
