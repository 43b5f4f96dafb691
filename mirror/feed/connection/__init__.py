"""One connection to a node: its transport, its login and its DCP session."""
