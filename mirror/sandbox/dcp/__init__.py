"""The DCP side of a connection of the embedded source: its streams, snapshots and filters; no sockets."""
