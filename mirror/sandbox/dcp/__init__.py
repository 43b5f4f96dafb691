"""The DCP part of the sandbox: streams, snapshots and filters; no sockets."""
