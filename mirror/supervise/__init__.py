"""Processes: who runs what, restarts, signals, the control socket, systemd. Knows feed; decides in `plan` alone."""
