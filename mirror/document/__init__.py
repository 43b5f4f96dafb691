"""Paths and values in documents of a mirror or of the sandbox."""
