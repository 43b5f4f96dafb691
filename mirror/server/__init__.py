"""What every server of the KV and DCP protocols has in common: the embedded source and the mirror.

The rules of the protocol are here once. What differs between servers (which features and controls they offer, users,
where documents come from, faults) is in the subclasses and policy objects of `mirror.sandbox` and `mirror.serve`.
"""
