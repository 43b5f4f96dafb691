"""The pipelines `sync`, `export`, `backfill` and `compare`, and how their tasks run."""
