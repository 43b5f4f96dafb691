"""A node of the sandbox: its sockets, and the faults of its connections."""
