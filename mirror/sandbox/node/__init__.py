"""A node of the embedded source: its sockets and the faults of its network."""
