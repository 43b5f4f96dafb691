"""Reports of the processes: collected, compared over time, and passed on as state, events and notices to systemd."""
