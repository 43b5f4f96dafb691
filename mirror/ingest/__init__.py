"""The decisions for one vbucket. Pure: no I/O, clock, random numbers, LMDB or asyncio.

`machine` is the entry: it takes `events` and returns `instructions`. Other packages also import `state` (the machine's
phases), `collections`, `offset`, `reactions`, `selection` and `topology`.
"""
