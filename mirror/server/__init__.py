"""The common part of the servers of the sandbox and the mirror: the KV and DCP protocols, and connections of clients.

Only this package has the rules of the protocols. Subclasses and policy objects in `mirror.sandbox` and `mirror.serve`
have the differences: features and DCP settings, users, documents, faults. A mirror's listeners, HTTP's too, have their
admission, turns and memory budget here.
"""
