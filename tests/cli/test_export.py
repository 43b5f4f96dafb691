"""`export`: every document of one moment as JSON lines, with positions that `changes` goes on from."""

from __future__ import annotations

import base64
import json
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli import export
from mirror.client import SOCKET_NAME, socket_address
from mirror.document import values
from mirror.sandbox.cluster import SandboxCluster
from mirror.sandbox.thread import SandboxThread
from storage.model import Branch, Document, Kind, Seqno
from tests.cli.conftest import LIMIT_S, background, call, copy_of, succeed
from tests.processes import without_rootly_powers

JSON_MD = (Path(__file__).parents[2] / "cli" / "JSON.md").read_text()


def test_an_export_to_stdout_has_every_document_with_metadata_and_collection(mirrored: Path) -> None:
    result = succeed("export", "--data", mirrored)
    found = {json.dumps(line, sort_keys=True) for line in result.lines}
    scanned = call("scan", "--data", mirrored, "--json").lines
    assert found == {json.dumps(line | {"collection": "_default._default"}, sort_keys=True) for line in scanned}
    assert len(result.lines) == len(scanned) == 183
    binary = next(line for line in result.lines if "key_b64" in line)
    assert base64.b64decode(binary["value_b64"]) == b"\x00\x01binary"


def test_a_directory_gets_a_file_for_each_vbucket_and_a_file_its_name_at_the_end(
    mirrored: Path, tmp_path: Path
) -> None:
    (tmp_path / "split").mkdir()
    split = call("export", "--data", mirrored, "--to", tmp_path / "split", "--json")
    assert [name for name in split.json if f"`{name}`" not in JSON_MD] == []
    assert (split.json["documents"], split.json["vbuckets"]) == (183, 16)
    files = sorted((tmp_path / "split").iterdir())
    assert [file.name for file in files] == [f"vbucket-{vbid:05}.jsonl" for vbid in range(16)]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert len(lines) == 183
    assert all(json.loads(line)["vbid"] == 3 for line in files[3].read_text().splitlines())
    assert call("export", "--data", mirrored, "--to", tmp_path / "one.jsonl", "--vbid", "3").code == 0
    assert (tmp_path / "one.jsonl").read_bytes() == files[3].read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["one.jsonl", "split"]


@pytest.mark.parametrize("command", [("export",), ("sql", "SELECT * FROM documents", "--json")], ids=["export", "sql"])
def test_a_reader_without_rights_to_the_control_socket_reads_without_a_lease(
    mirrored: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """A member of `readers_group` could neither export nor query while a service ran."""
    data = copy_of(mirrored, tmp_path / "data")
    with socket.socket(socket.AF_UNIX) as service, socket_address(data) as address:
        service.bind(address)
        service.listen()
        (data / SOCKET_NAME).chmod(0)
        result = succeed(*command, "--data", data, preexec_fn=without_rootly_powers)
    assert len(result.lines) == 183
    assert f"warning: no lease: this user may not use the control socket of {data}" in result.complaint


def test_an_export_is_readable_only_by_its_user_unless_the_target_allows_more(mirrored: Path, tmp_path: Path) -> None:
    """Files had the mode 0644 once, and 0666 with a umask of 0."""

    def export_to(to: str, *more: object) -> None:
        assert call("export", "--data", mirrored, "--vbid", 3, "--to", to, *more, preexec_fn=no_umask).code == 0

    def modes(*paths: Path) -> list[str]:
        return [f"{stat.S_IMODE(path.stat().st_mode):o}" for path in paths]

    export_to(f"{tmp_path}/split/", "--cursor", tmp_path / "cursor")
    assert modes(tmp_path / "split", tmp_path / "split" / "vbucket-00003.jsonl", tmp_path / "cursor") == [
        "700",
        "600",
        "600",
    ]
    for path, mode in ((tmp_path / "split", 0o755), (tmp_path / "one", 0o644)):
        path.touch()
        path.chmod(mode)
    export_to(str(tmp_path / "one"))
    export_to(f"{tmp_path}/split/")
    assert modes(tmp_path / "split", tmp_path / "one") == ["755", "644"]


def test_a_pipe_or_device_gets_the_documents_and_stays(mirrored: Path, tmp_path: Path) -> None:
    """As root, `--to /dev/null` put a file in the place of the device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to(os.devnull)
    arguments = ["export", "--data", mirrored, "--vbid", "3", "--to"]
    assert call(*arguments, tmp_path / "null").code == 0
    assert (tmp_path / "null").is_char_device()
    with background(*arguments, tmp_path / "pipe") as exporting:
        assert (tmp_path / "pipe").read_bytes() == call(*arguments, "-").raw
        assert exporting.wait(LIMIT_S) == 0
    assert (tmp_path / "pipe").is_fifo()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["null", "pipe"]


def test_a_link_keeps_its_file_until_the_new_one_is_complete(mirrored: Path, tmp_path: Path) -> None:
    (tmp_path / "newest").symlink_to("orders")
    (tmp_path / "orders").write_text("old")
    arguments = ("export", "--data", mirrored, "--to", tmp_path / "newest")
    failed = call(*arguments, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100)))
    assert (failed.code, (tmp_path / "orders").read_text()) == (1, "old"), failed.err
    assert call(*arguments).code == 0
    assert (tmp_path / "newest").is_symlink()
    assert (tmp_path / "orders").read_bytes() == call(*arguments[:3], "--to", "-").raw
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["newest", "orders"]


WRITING = {
    "export to a file": ("export", "--data", "{data}", "--to", "{folder}/a.jsonl"),
    "export to a folder": ("export", "--data", "{data}", "--vbid", "3", "--to", "{folder}/"),
    "export with a cursor": ("export", "--data", "{data}", "--vbid", "3", "--cursor", "{folder}/cursor"),
    "changes": ("changes", "--data", "{data}", "--vbid", "3", "--cursor", "{folder}/cursor"),
    "sql": ("sql", "SELECT 1 AS a", "--data", "{data}", "--to", "{folder}/a.parquet"),
    "user": ("user", "add", "ann", "--file", "{folder}/users.json"),
    "assets": ("assets", "--to", "{folder}"),
    "backup": ("backup", "--data", "{data}", "--to", "{folder}/backup"),
}


@pytest.mark.parametrize("command", WRITING.values(), ids=WRITING)
def test_the_temporary_file_has_a_name_that_other_users_cannot_predict(
    mirrored: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """In a shared folder another user made `F.new` first: owned every document, or a link overwrote a file."""

    victim, empty, shared = tmp_path / "victim", tmp_path / "empty", tmp_path / "shared"

    def written(folder: Path) -> list[str]:
        succeed(*(word.format(data=mirrored, folder=folder) for word in command), text="a password\n")
        return sorted(path.name for path in folder.iterdir() if path.is_file() and not path.is_symlink())

    empty.mkdir()
    shared.mkdir()
    victim.write_text("precious")
    names = written(empty)
    for name in names:
        (shared / f"{name}.new").symlink_to(victim)
    assert (written(shared), victim.read_text()) == (names, "precious")


def test_a_cursor_of_changes_is_not_replaced(mirrored: Path, tmp_path: Path) -> None:
    """Events that `changes` had still to print were skipped silently."""
    file = tmp_path / "cursor"
    call("changes", "--data", mirrored, "--since", "now", "--cursor", file)
    before = file.read_text()
    result = call("export", "--data", mirrored, "--cursor", file)
    assert (result.code, result.out) == (2, "")
    assert f"the cursor file {file} exists" in result.complaint
    assert file.read_text() == before


def no_umask() -> None:
    os.umask(0)


@pytest.fixture(scope="module")
def moving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[SandboxThread, Path]]:
    data = tmp_path_factory.mktemp("moving") / "data"
    with SandboxThread(SandboxCluster(vbuckets=4)) as source:
        for number in range(20):
            source.call(source.cluster.set, f"k{number}", {"n": number})
        succeed("run", "--source", source.connection_string, "--data", data, "--until-caught-up", "--groups", "2")
        yield source, data


def test_changes_since_the_positions_of_an_export_complete_it(
    moving: tuple[SandboxThread, Path], tmp_path: Path
) -> None:
    source, data = moving
    file = tmp_path / "position"
    exported = call("export", "--data", data, "--cursor", file).lines
    source.call(source.cluster.set, "k3", {"n": 333})
    source.call(source.cluster.delete, "k4")
    assert call("run", "--source", source.connection_string, "--data", data, "--until-caught-up").code == 0
    events = call("changes", "--data", data, "--since", file, "--json").lines
    assert sorted((event["kind"], event["document"]["key"]) for event in events) == [
        ("deletion", "k4"),
        ("mutation", "k3"),
    ]
    known = {line["key"]: line["value"] for line in exported}
    for event in events:
        known.pop(event["document"]["key"])
        if event["kind"] == "mutation":
            known["k3"] = event["document"]["value"]
    assert known == {line["key"]: line["value"] for line in call("export", "--data", data).lines}


def document(value: bytes, datatype: int) -> Any:
    raw = Document(3, 0, b"key", Seqno(7), 2, 3, 1, 0, datatype, value, Kind.MUTATION, Branch(1))
    return json.loads(export.with_xattrs(raw))


def test_xattrs_are_separate_members_and_a_malformed_value_stays_whole() -> None:
    value, datatype = values.join({b"_sync": b'{"rev":\n1}', b"odd": b"no json"}, b'{"a": 1}', values.JSON)
    for stored, bits in ((value, datatype), values.deflate(value * 1, datatype)):
        shown = document(stored, bits)
        assert (shown["value"], shown["datatype"]) == ({"a": 1}, 1)
        assert shown["xattrs"] == {"_sync": {"rev": 1}, "odd": "no json"}
    damaged = document(b"\x00\x00\xff\xff{}", values.XATTR)
    assert "problem" in damaged
    assert base64.b64decode(damaged["value_b64"]) == b"\x00\x00\xff\xff{}"


def test_a_mistake_is_one_line(mirrored: Path, tmp_path: Path) -> None:
    files, description = sorted(mirrored.rglob("*")), (mirrored / "mirror.json").read_bytes()
    target = tmp_path / "export.jsonl"
    for arguments, code, words in (
        (["--json"], 2, "--json prints to stdout too (give --to a place)"),
        (["--as-of", "7"], 2, "takes a time here"),
        (["--as-of", "2001-01-01"], 1, "nothing is kept as of 2001-01-01"),
        (["--collection", "a.b"], 2, "no collection 'a.b'"),
        (["--to", "/proc/none/file"], 1, "/proc/none"),
        (["--to", mirrored], 2, "is in the data directory"),
        (["--to", mirrored / "mirror.json"], 2, "is in the data directory"),
        (["--format", "parquet", "--to", mirrored / "new"], 2, "is in the data directory"),
        (["--cursor", mirrored / "cursor"], 2, "is in the data directory"),
        (["--to", target, "--cursor", target], 2, "is in the export"),
        (["--to", f"{target}/", "--cursor", target / "vbucket-00000.jsonl"], 2, "no such folder"),
        (["--to", tmp_path, "--cursor", tmp_path / "vbucket-00000.jsonl"], 2, "is in the export"),
        (["--to", target, "--cursor", tmp_path / "none" / "cursor"], 2, "no such folder"),
    ):
        call("export", "--data", mirrored, *arguments).assert_complains(code, words)
    assert (sorted(mirrored.rglob("*")), (mirrored / "mirror.json").read_bytes()) == (files, description)
    assert list(tmp_path.iterdir()) == []
