"""The decisions for a vbucket: events in, instructions out. Pure: no I/O, clock, random numbers, LMDB or asyncio.

Import modules by name: `machine` with `events` and `instructions` (its input and output), `state` (its phases),
`rollback` (the rule of producer and consumer), `topology` and `reactions`. The others serve the machine.
"""
