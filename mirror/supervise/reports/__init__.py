"""Reports of the processes: collected, compared over time, and turned into status, events and notices to systemd."""
