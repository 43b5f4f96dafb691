"""The brain of a vbucket: events in, instructions out. Pure: no I/O, no clock, no chance, no LMDB, no asyncio.

Import the rooms by name: `machine` (the decisions) with `events` and `instructions` (its two languages), `rollback`
(the rule of producer and consumer), `topology` and `backoff`. The others serve the machine.
"""
