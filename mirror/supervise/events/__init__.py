"""Events of a service: their kinds, the file that keeps them, and the command that runs for each."""
