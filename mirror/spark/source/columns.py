"""The columns of the data source: Arrow schemas of documents and of changes.

Knows names and types; never a store, a connection or a Spark session. Invariants: the columns of `DOCUMENTS` stand
first in `CHANGES`, in the same order and with the same meaning; 64-bit numbers are signed, as Spark knows no others
(a cas or vbuuid above 2^63-1 comes out negative, all bits kept).

`storage.model.DOCUMENT_FIELDS` explains the numbers of documents. Further:

    key         UTF-8. A key that is not UTF-8 keeps its bytes: cast(key as binary) gives them
    collection  `scope.collection`
    value       the body: decompressed, without xattrs; null in a tombstone

and of changes:

    kind        mutation, deletion, expiration: published events. After a rollback, retraction: a version that
                readers had and that is void (each key's newest), with the fields it came with; restoration: the version
                that is valid again in its place, with the fields it came with. Rows about more than one document have
                a null key: collection_dropped, collection_flushed: all documents of the collection in this
                vbucket up to here are gone; resync: the whole vbucket is void (its history could not be followed), and
                all of it follows, from the beginning
    branch      the line of history of the version; over a connection the number of resyncs of the stream
    vbuuid      the source's name of that history
    snapshot_end_seqno      the boundary that published the version (of those that are kept); of a retraction or
                restoration the boundary that the rollback went back to
    at_branch, at_seqno     the position of the event itself, which an upsert compares. It rises strictly for
                each key, also across rollbacks, where seqno falls; a resync begins again. For published events (branch,
                seqno) of the version. A rollback opens a branch at a boundary: its retractions stand at seqno 0 of that
                branch, its restorations at the boundary, and what is published then above it
    event_time  when the source wrote the version, by the clock of the node that did: the upper 48 bits of the cas,
                which are nanoseconds since 1970. Rises for each key, as the cas does; between keys it is as good as the
                clocks of the nodes, and a cas that was set from elsewhere (XDCR, a restore) has the other cluster's
                clock. Null for rows about more than one document, and where the source gave no cas
"""

from __future__ import annotations

import pyarrow as pa

from mirror.typed.rows import DOCUMENTS as DOCUMENTS

_NUMBERS = ("branch", "vbuuid", "snapshot_end_seqno", "at_branch", "at_seqno")
CHANGES = pa.schema(
    [
        *DOCUMENTS,
        pa.field("kind", pa.string()),
        *(pa.field(name, pa.int64()) for name in _NUMBERS),
        pa.field("event_time", pa.timestamp("us", "UTC")),
    ]
)

TABLES = {"documents": DOCUMENTS, "changes": CHANGES}
