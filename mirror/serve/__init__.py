"""Readers' access over the network or a Unix socket: key-value, HTTP and DCP."""
