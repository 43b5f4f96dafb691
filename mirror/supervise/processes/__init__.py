"""Child processes, workers and servers: both ends of their pipe, the plan, and the table of processes."""
