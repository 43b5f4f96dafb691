"""The newest seqno of one collection in a vbucket, looked for from the end of its log.

Knows rows and chains; nothing of who asks. Invariants: only what a view of the chain sees counts, system events do not;
the work of one call is bounded, and where it was not enough the caller learns where to go on.
"""

from __future__ import annotations

from storage.env.transaction import Transaction
from storage.format import keys, records
from storage.history import chain


def newest_of_collection(
    txn: Transaction,
    vbid: int,
    links: chain.Chain,
    collection_id: int,
    below: int,
    down_to: int,
    rows_max: int,
) -> tuple[int, int]:
    """Seqno of the collection's newest row with down_to < seqno <= below (0: none was found), and where to go on
    (`below` of the next call; 0: there is nothing more to look at).
    """
    collection_prefix = keys.encode_collection_id(collection_id)
    cursor = txn.cursor(keys.rows_db(vbid))
    left = rows_max
    for link in links:
        prefix, top, bottom = keys.PREFIX.pack(link.branch), min(link.cut, below), max(link.base_seqno, down_to)
        if top <= bottom:
            continue
        beyond = cursor.set_range(records.row_key(prefix, top) + keys.BOUNDARY_SUFFIX)
        more = cursor.prev() if beyond else cursor.last()
        while more:
            key = cursor.key()
            seqno = records.seqno_of(key)
            if not key.startswith(prefix) or seqno <= bottom:
                break
            if len(key) == keys.ROW_KEY_SIZE:
                if not left:
                    return 0, seqno
                left -= 1
                frame = cursor.value()
                if not records.is_system_event(frame) and records.key_of(frame).startswith(collection_prefix):
                    return seqno, 0
            more = cursor.prev()
    return 0, 0
