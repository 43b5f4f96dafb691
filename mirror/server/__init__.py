"""Servers of the KV and DCP protocols: the common part of the sandbox and the mirror.

The rules of the protocol are only here. Subclasses and policy objects in `mirror.sandbox` and `mirror.serve` have the
differences: features and controls, users, documents, faults.
"""
