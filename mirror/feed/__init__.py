"""The side towards a source: login, cluster map, streams, commits. Knows sockets and the store; `ingest` decides."""
