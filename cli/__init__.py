"""The command `dcp-mirror`, its tables and its JSON. No other package imports this one."""
