"""The pipelines `sync`, which keeps tables current, and `export`."""
