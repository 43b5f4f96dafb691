"""Speed of the program next to the limits of what it stands on: `python -m tests.bench NAME`.

A module for each bench, whose `measure` yields rows of figures; `__main__` runs one and prints them. Both sides of a
ratio are measured in turn within seconds, because a machine may drift from run to run: compare ratios, not rates.
"""
