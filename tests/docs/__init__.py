"""The documents: every block that can be run is run, every link leads somewhere, every name is there."""
