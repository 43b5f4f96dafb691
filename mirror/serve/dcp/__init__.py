"""The mirror as a DCP producer."""
