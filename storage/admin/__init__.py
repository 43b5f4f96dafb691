"""Backup, archive and check of a whole mirror."""
