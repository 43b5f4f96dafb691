"""A transaction reads and writes trees by their names, and says which record of which vbucket is damaged."""

from __future__ import annotations

import pytest

from storage.env.environment import Environment
from storage.env.transaction import Transaction
from storage.errors import CorruptedError
from storage.format import keys, records
from storage.model import BranchReason
from storage.write.writer import GroupWriter


def test_the_newest_branch_is_the_vbuckets_own(writer: GroupWriter) -> None:
    environment = writer.environment
    txn = Transaction(environment, environment.begin(write=True))
    row = records.BranchRow(1, 0, 0, BranchReason.ABANDONED, 1)
    txn.put(keys.DB_BRANCH, keys.BRANCH_KEY.pack(0, 9), records.encode_branch(row))
    assert (txn.newest_branch(0), txn.newest_branch(2)) == (9, 1)
    assert txn.delete(keys.DB_BRANCH, keys.BRANCH_KEY.pack(2, 1))
    assert not txn.delete(keys.DB_BRANCH, keys.BRANCH_KEY.pack(2, 1))
    assert txn.newest_branch(2) == 0
    assert txn.newest_branch(1) == 0
    txn.raw.abort()


@pytest.mark.parametrize("tree", [keys.DB_PUB, keys.DB_STATE])
@pytest.mark.parametrize("data", [None, b"", b"\xc1damaged"], ids=["missing", "empty", "damaged"])
def test_a_damaged_record_is_named_with_its_vbucket_and_folder(
    writer: GroupWriter, tree: bytes, data: bytes | None
) -> None:
    environment: Environment = writer.environment
    txn = Transaction(environment, environment.begin(write=True))
    txn.delete(tree, keys.VBID_KEY.pack(0))
    if data is not None:
        txn.put(tree, keys.VBID_KEY.pack(0), data)
    with pytest.raises(CorruptedError, match=rf"{tree.decode()} record .*(missing|cannot be read|damaged)") as caught:
        txn.pub(0) if tree == keys.DB_PUB else txn.state_row(0)
    txn.raw.abort()
    assert (caught.value.vbid, caught.value.path) == (0, environment.path)
