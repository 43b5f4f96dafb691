"""Publishing at a complete end below what is staged: what comes after it stays invisible, wherever its rows are."""

from __future__ import annotations

from random import Random

import pytest

import storage.history.index
from storage.admin.check import check
from storage.read.view import open_view
from tests.storage.model import keys_of, log, row, span
from tests.storage.test_writer import open_writer


@pytest.mark.parametrize("inline_rows", [2, 1000], ids=["by a job", "in the commit"])
@pytest.mark.parametrize("seed", range(15))
def test_any_complete_end_may_be_published_later(
    path: str, seed: int, inline_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("storage.write.pending.INLINE_INDEX_ROWS", inline_rows)
    monkeypatch.setattr(storage.history.index, "SLICE_ROWS", 3)
    rng = Random(seed)
    names = keys_of(0, 6)
    writer = open_writer(path)
    writer.vbuckets[0].save(failover_log=log())
    events: list[tuple[int, bytes]] = []
    ends: list[int] = []
    published = 0
    with open_view(path) as view:
        for _ in range(60):
            start = writer.vbuckets[0].state.staged_seqno + 1
            end = start + rng.randrange(4)
            batch = [(seqno, rng.choice(names)) for seqno in range(start, end + 1)]
            events += batch
            staged = [row(writer.vbuckets[0].prefix, key, b"%d" % seqno, seqno) for seqno, key in batch]
            writer.vbuckets[0].stage(staged, 9 * len(staged), span(start, end))
            ends.append(end)
            if rng.random() < 0.3:
                writer.commit(flush_open=rng.random() < 0.7)
            if rng.random() < 0.4 and not (writer.vbuckets[0].complete_seqno is not None):
                published = rng.choice([each for each in ends if each >= published])
                writer.vbuckets[0].publish(published, 0)
                writer.commit(flush_open=rng.random() < 0.3)
                while writer.vbuckets[0].complete_seqno is not None:
                    writer.step()
                    writer.commit()
                state = writer.vbuckets[0].state
                assert (state.published_seqno, state.staged_seqno) == (published, end)
                assert (state.open_snapshot is None) == (published == end)
            contents = {key: seqno for seqno, key in events if seqno <= published}
            assert {document.key: int(document.seqno) for document in view.scan(0)} == contents
    writer.commit(flush_open=True)
    if published < ends[-1]:
        assert writer.vbuckets[0].state.open_snapshot is not None  # else the next writer would take it for complete
    writer.close()
    assert check(path).problems == []
    writer = open_writer(path)
    assert not (writer.vbuckets[0].complete_seqno is not None)
    assert writer.vbuckets[0].state.published_seqno == published
    writer.vbuckets[0].publish(ends[-1], 0)
    writer.commit()
    while writer.vbuckets[0].complete_seqno is not None:
        writer.step()
        writer.commit()
    writer.close()
    assert check(path).problems == []
    with open_view(path) as view:
        assert {document.key: int(document.seqno) for document in view.scan(0)} == {key: at for at, key in events}
