"""The control socket of the embedded source: faults and changes on request."""
