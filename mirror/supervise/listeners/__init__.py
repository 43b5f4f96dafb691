"""Sockets that the supervisor holds: the readers' addresses for all servers, and the control socket."""
