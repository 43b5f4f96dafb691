"""Hands towards a cluster: login, streams, the map, commits. Knows sockets and the store; decides in `ingest` alone."""
