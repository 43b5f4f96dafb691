"""The sandbox: a small Couchbase cluster in memory, for tests and demos."""

from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.data.bucket import Bucket, vbucket_of
from mirror.sandbox.data.documents import DocumentError
from mirror.sandbox.data.item import Item
from mirror.sandbox.data.sandbox_vbucket import Vbucket
from mirror.sandbox.node.node import NodeTls
from mirror.sandbox.thread import SandboxThread
from mirror.sandbox.workload import Workload, WorkloadOptions

__all__ = [
    "Bucket",
    "DocumentError",
    "Item",
    "NodeTls",
    "SandboxCluster",
    "SandboxThread",
    "Vbucket",
    "Workload",
    "WorkloadOptions",
    "vbucket_of",
]
