"""`sync` keeps each version that does not fit its schema, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from mirror.errors import MirrorError
from mirror.spark.tables.documents import Applied, DocumentsTable
from mirror.spark.tables.lake import Lake
from mirror.typed.bodies import TooManyMisfits
from tests.spark.events import event
from tests.spark.tables.test_documents import lake_in, put, typed
from tests.spark.tables.test_lake import apply, batch


def quarantined(lake: Lake) -> set[tuple[str, int, str, str]]:
    found = DeltaTable(lake.folder.child("quarantine").url).to_pyarrow_table().to_pylist()
    assert len(found) == len({(row["key"], row["at_branch"], row["at_seqno"], row["reason"]) for row in found})
    return {(row["key"], row["seqno"], row["reason"], row["text"][:30]) for row in found}


def killed(*_: Any, **__: Any) -> None:
    raise MirrorError("killed")


@pytest.mark.parametrize("per_collection", [False, True])
def test_misfits_are_kept_once_with_their_reason_whatever_breaks_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, per_collection: bool
) -> None:
    layouts = replace(typed("total decimal(10,2)"), per_collection=per_collection)
    long = put("long", 3, total="x" * 5_000)
    first = [put("a", 1, total=1), event("mutation", "b", (1, 2), value=b'{"total":1e-999999999e1}'), long]
    with lake_in(tmp_path, layouts) as lake:
        assert apply(lake, batch(0), [first]) == Applied(3, 3, 0, 0, 2)
        cut = '"' + "x" * 36 + "..."
        kept = {
            ("b", 2, "malformed JSON: Expecting ',' delimiter: line 1 column 22 (char 21)", '{"total":1e-999999999e1}'),
            ("long", 3, f"total: {cut} is not a decimal number", '{"total": "xxxxxxxxxxxxxxxxxxx'),
        }
        assert quarantined(lake) == kept
        second = [
            put("a", 4, total=[]),
            put("b", 5, total=1e20),
            put("c", 6, total="y"),
            event("deletion", "c", (1, 7)),
        ]
        with monkeypatch.context() as patch:
            patch.setattr(DocumentsTable, "_merge", killed)
            with pytest.raises(MirrorError, match="killed"):
                apply(lake, batch(1), [second])
    kept |= {("a", 4, "total: [] is not a decimal number", '{"total": []}')}
    kept |= {("b", 5, "total: 1e+20 has too many digits for decimal128(10, 2)", '{"total": 1e+20}')}
    with lake_in(tmp_path, layouts) as lake:
        assert quarantined(lake) == kept
        assert apply(lake, batch(1), [second]) == Applied(4, 0, 2, 0, 2)
        assert quarantined(lake) == kept
        lake.tidy(0)
        assert quarantined(lake) == kept


def test_what_was_too_much_to_be_written_is_shown(tmp_path: Path) -> None:
    with lake_in(tmp_path, typed("total double", misfits_max=0.1)) as lake:
        with pytest.raises(TooManyMisfits):
            apply(lake, batch(0), [[put("a", 1, total="x"), put("b", 2, total=1)]])
        assert {key for key, *_ in quarantined(lake)} == {"a"}
        assert lake.documents.to_pyarrow_table().num_rows == 0
