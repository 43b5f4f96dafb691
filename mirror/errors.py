"""The tree of errors outside of the store and the protocol. Some modules derive more errors.

An error has a text (`what`, one sentence without a secret), a remedy (`hint`), an exit code, and `retryable`.

    MirrorError
    ├── ConfigError                  a setting is wrong (exit 2)
    ├── ClusterError                 the source
    │   ├── ConnectFailed            no server answers, or the connection broke (retried; exit 1)
    │   ├── HandshakeFailed          the address answers, but not as a data node (retried; exit 1)
    │   ├── SourceTimeout            a node stopped answering (retried; exit 1)
    │   ├── AuthRejected             wrong user or password (exit 4)
    │   ├── PrivilegeMissing         the user lacks a privilege (exit 4)
    │   ├── BucketMissing            no such bucket, or no access to it (exit 4)
    │   ├── TlsFailed                certificate or protocol version refused (exit 4)
    │   ├── NotSupported             the server lacks something required (exit 4)
    │   ├── OlderMap                 all answering nodes have outdated cluster maps (retried; exit 1)
    │   └── BucketChanged            the source is not the bucket that the data came from (exit 3)
    ├── QueryFailed                  SQL that cannot be answered (exit 2)
    │   └── QueryCancelled           the query was cancelled (exit 130)
    └── SupervisionError             the service's processes, pipes, locks, sockets (exit 1)
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of the command line; scripts rely on them."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    DATA = 3
    REFUSED = 4
    ABSENT = 5
    INTERRUPTED = 130


class MirrorError(Exception):
    """Root of the tree. Its text is `what`, then the hint."""

    exit_code: ExitCode = ExitCode.FAILED
    retryable: bool = False
    default_hint: str = ""

    def __init__(self, what: str, *, hint: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.hint = self.default_hint if hint is None else hint
        if retryable is not None:
            self.retryable = retryable

    def __str__(self) -> str:
        return f"{self.what} ({self.hint})" if self.hint else self.what


class ConfigError(MirrorError):
    exit_code = ExitCode.USAGE


class ClusterError(MirrorError):
    retryable = True


class ConnectFailed(ClusterError):
    default_hint = "check host, port, and that the data service runs there and a firewall lets it through"


class HandshakeFailed(ClusterError):
    default_hint = "check that the port is the KV port (11210, or 11207 with TLS)"


class SourceTimeout(ClusterError):
    default_hint = "check the node's load and the network; the connection is recreated"


class AuthRejected(ClusterError):
    exit_code = ExitCode.REFUSED
    retryable = False
    default_hint = (
        "check the user in the connection string, and the password in DCP_MIRROR_PASSWORD, "
        "DCP_MIRROR_PASSWORD_FILE or the secrets folder"
    )


class PrivilegeMissing(ClusterError):
    exit_code = ExitCode.REFUSED
    retryable = False
    default_hint = "grant the user the role Data DCP Reader on the bucket"


class BucketMissing(ClusterError):
    exit_code = ExitCode.REFUSED
    retryable = False
    default_hint = "check the bucket name in the connection string, and that the user may read it"


class TlsFailed(ClusterError):
    exit_code = ExitCode.REFUSED
    retryable = False
    default_hint = "give the cluster's CA certificate as tls_ca_file and use the name that the certificate carries"


class NotSupported(ClusterError):
    exit_code = ExitCode.REFUSED
    retryable = False


class OlderMap(ClusterError):
    """The cluster maps of all answering nodes are older than a map that the mirror followed before."""

    default_hint = (
        "a node that was failed over may be back with old data, or nodes with newer maps cannot be reached: check the "
        "nodes, which are queried again. If the cluster was restored to an earlier state: stop the service, remove "
        "map.json from the data directory, start it"
    )

    @staticmethod
    def of(found: tuple[int, int], followed: tuple[int, int]) -> OlderMap:
        return OlderMap(
            f"the newest cluster map of all nodes that answer is revision {found[1]} of epoch {found[0]}, but "
            f"the mirror followed revision {followed[1]} of epoch {followed[0]} before"
        )


class BucketChanged(ClusterError):
    """The source's bucket is not the bucket of the data directory. The data stays unchanged."""

    exit_code = ExitCode.DATA
    retryable = False
    default_hint = "mirror it into a new data directory, or move the old one away"


class QueryFailed(MirrorError):
    """SQL that cannot be answered. If DuckDB refuses it, `what` is the first line of DuckDB's message."""

    exit_code = ExitCode.USAGE


class QueryCancelled(QueryFailed):
    exit_code = ExitCode.INTERRUPTED


class SupervisionError(MirrorError):
    pass
