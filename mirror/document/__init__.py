"""Paths and values in documents of a store or of the embedded source."""
