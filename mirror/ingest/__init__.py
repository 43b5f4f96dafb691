"""The decisions for one vbucket. Pure: no I/O, clock, random numbers, LMDB or asyncio.

The entry is `machine`: it takes `events` and returns `instructions`. Other packages also import `state` (the machine's
phases), `rollback` (the rule of producer and consumer), `collections`, `offset`, `reactions`, `selection`, `topology`.
"""
