"""Hands towards readers: what other programs speak to, over the network or a Unix socket."""
