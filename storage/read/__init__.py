"""Views and the reads through them: documents, scans, changes and streams."""
