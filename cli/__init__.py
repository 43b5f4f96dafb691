"""People and scripts: the command `dcp-mirror`, its tables and its JSON. The outermost room, which nothing imports."""
