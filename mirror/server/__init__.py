"""The common part of the sandbox's and the mirror's servers for the KV and DCP protocols.

Only this package has the rules of the protocols. Subclasses and policy objects in `mirror.sandbox` and `mirror.serve`
have the differences: features and DCP settings, users, documents, faults.
"""
