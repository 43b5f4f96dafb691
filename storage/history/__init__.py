"""Branches, boundaries, key rows and leases of a vbucket, and the purge of history that nobody may read any more."""
