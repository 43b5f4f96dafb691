"""The supervisor: processes, restarts, signals, the control socket, systemd."""
