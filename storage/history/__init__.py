"""Branches, boundaries, key rows and leases of a vbucket, and the purge of old history."""
