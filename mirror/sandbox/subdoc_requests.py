"""Answers to sub-document requests. Must never know sockets.

Knows nothing yet beyond its table of operations, which is empty: every such request is an unknown command.
"""

from mirror.sandbox.session import Operation

OPERATIONS: dict[int, Operation] = {}
