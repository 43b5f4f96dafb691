"""The simulation: production code on a fake clock and a fake network, driven by one seed."""
