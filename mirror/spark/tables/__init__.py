"""Delta tables of changes and of current documents, and the folders that they lie in."""
