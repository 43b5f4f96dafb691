"""Views and all that reads through them: documents, scans, changes and streams."""
