"""Paths and values in documents, for requests that read a store or memory."""
