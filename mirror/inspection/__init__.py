"""Inspection: examine a source, compare a mirror with it, fetch vbuckets again, record a DCP session."""
