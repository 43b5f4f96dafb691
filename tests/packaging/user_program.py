"""A user's program: reads of every kind, each error that it handles, and types that mypy --strict follows."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import mirror


def newest(view: mirror.View, key: str) -> bytes | None:
    try:
        document: mirror.Document | None = view.get(key)
    except mirror.Unavailable as error:
        print(error.hint, file=sys.stderr)
        return None
    return None if document is None else document.value


def before(view: mirror.View, key: str, ms: int) -> mirror.Document | None:
    try:
        return view.get(key, as_of=mirror.Time(ms))
    except mirror.NoSuchBoundary:
        return None


def written(view: mirror.View, token: mirror.MutationToken) -> bool:
    try:
        view.wait_for(token, timeout_s=0.01)
    except mirror.NotPublished as error:
        return not error.retryable
    except mirror.WriteLost:
        return False
    return True


def events(view: mirror.View, since: mirror.Token | None) -> Iterator[tuple[str, mirror.Token]]:
    changes: Iterator[mirror.Change] = view.changes(since=since)
    for change in changes:
        if change.document is not None and change.document.kind is mirror.Kind.MUTATION:
            yield change.document.key.decode(), change.token


def main(path: Path) -> int:
    try:
        with mirror.open_view(path) as view:
            print(newest(view, "a"), before(view, "a", 0))
            print(sorted(document.key for document in view.scan(prefix="b")))
            found = dict(events(view, None))
            print(sorted(found))
            token = mirror.Token.parse(str(found["a"]))
            print(
                written(
                    view, mirror.MutationToken(token.vbid, view.state(token.vbid).failover_log[0].vbuuid, token.seqno)
                )
            )
    except (mirror.NotAMirror, mirror.CorruptedError) as error:
        print(error, file=sys.stderr)
        return 1
    except mirror.StorageError as error:
        return 75 if error.retryable else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
