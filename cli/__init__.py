"""The command `dcp-mirror`, its tables and its JSON. The outermost package, which nothing imports."""
