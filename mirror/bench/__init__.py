"""How fast the program is compared with the limits of what it stands on: a module for each bench, and `limits`."""
