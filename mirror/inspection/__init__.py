"""Inspection: what stands between a mirror and a source, and whether a copy is equal to it."""
