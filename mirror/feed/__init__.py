"""The mirror's side towards its source: login, cluster map, streams, commits. `ingest` decides about streams."""
