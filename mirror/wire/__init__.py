"""The wire format of the memcached binary protocol and DCP: bytes to events and back, for either role, without I/O."""
