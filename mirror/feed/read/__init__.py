"""Reads vbuckets of a source up to given seqnos, for processes that have no store."""
