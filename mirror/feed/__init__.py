"""The side towards a cluster: login, streams, the map, commits. Knows sockets and the store; `ingest` decides."""
