"""The pipelines `sync`, `export`, `backfill` and `compare`, and the runners of their tasks."""
