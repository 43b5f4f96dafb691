"""Inspection of a source, and of a mirror's equality with it: doctor, verify, repair, recordings."""
