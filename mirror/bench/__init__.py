"""How fast the program is beside the limits of what it stands on: one module for each bench, and `limits`."""
