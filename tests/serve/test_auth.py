"""Users of a file and of none: verifiers, passwords, patterns, and what is wrong with a file."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mirror.config import Settings
from mirror.errors import ConfigError
from mirror.serve.access import auth
from mirror.serve.access.auth import FileUsers, Reader, SourceUser, Users, current, entry_of, new_salt_key, users_of
from mirror.wire.sasl import HASHES, SaslError, ScramClient, ScramServer


def written(path: Path, document: Any) -> Path:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def scram_server(users: Users, mechanism: str) -> ScramServer:
    return ScramServer(
        mechanism, verifier_of=partial(users.verifier, mechanism), decoy_of=partial(users.decoy, mechanism)
    )


def scram(users: Users, mechanism: str, name: str, password: str) -> None:
    client, server = ScramClient(mechanism, name, password), scram_server(users, mechanism)
    client.verify(server.outcome(client.final(server.challenge(client.first()))))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    users = {"ann": entry_of("one"), "bob": entry_of("two", ("shop.items", "stock.*"))}
    return written(tmp_path / "users.json", {"users": users})


@pytest.mark.parametrize("mechanism", HASHES)
def test_users_of_a_file_log_in_by_each_mechanism(file: Path, mechanism: str) -> None:
    users = FileUsers(file)
    scram(users, mechanism, "ann", "one")
    for name, password in (("ann", "two"), ("carl", "one"), ("", "")):
        with pytest.raises(SaslError, match="wrong user or password"):
            scram(users, mechanism, name, password)


def test_users_of_a_file_log_in_by_password(file: Path) -> None:
    users = FileUsers(file)
    for _ in range(2):
        assert users.check("ann", "one") == Reader("ann")
        assert users.check("ann", "two") is None
        assert users.check("carl", "one") is None
    assert users.anonymous is None
    assert "one" not in file.read_text().replace("stored_key", "")


def test_patterns_select_the_readable_collections(file: Path) -> None:
    bob = FileUsers(file).reader("bob")
    assert bob is not None
    assert not bob.reads_all
    assert bob.may_read("shop.items")
    assert bob.may_read("stock.anything")
    assert not bob.may_read("shop.orders")
    assert not bob.may_read("_default._default")
    assert Reader("x").reads_all
    assert Reader("x").may_read("a.b")
    assert not Reader("x", frozenset()).may_read("a.b")


def test_a_changed_file_is_read_again_and_a_broken_one_changes_nothing(file: Path) -> None:
    users = FileUsers(file)
    assert users.check("ann", "one")
    written(file, {"users": {"ann": entry_of("new")}, "anonymous": {"read": ["shop.items"]}})
    os.utime(file, ns=(1, 1))
    assert users.check("ann", "one") is None
    assert users.check("ann", "new")
    assert users.anonymous == Reader("", frozenset({"shop.items"}))
    written(file, "{")
    os.utime(file, ns=(2, 2))
    assert users.check("ann", "new")
    file.unlink()
    assert users.check("ann", "new")


def with_verifiers(verifiers: object) -> object:
    return {"users": {"a": {"read": [], "verifiers": verifiers}}}


def with_sha1(**fields: object) -> object:
    return with_verifiers({"SCRAM-SHA1": {"salt": "AA==", "stored_key": "AA==", "server_key": "AA=="} | fields})


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("", "is not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 100_000, "is not JSON"),
        ({"user": {}}, "unknown member 'user'"),
        ({"users": []}, "`users`"),
        ({"users": {"a": 1}}, "user 'a'"),
        ({"users": {"": {}}}, "user ''"),
        ({"users": {"a": {}}}, "`read`"),
        ({"users": {"a": {"read": ["x"], "verifiers": {}}}}, "neither"),
        ({"users": {"a": {"read": ["*.x"], "verifiers": {}}}}, "neither"),
        ({"users": {"a": {"read": []}}}, "verifiers"),
        (with_verifiers({"MD5": {}}), "verifiers"),
        (with_verifiers({"SCRAM-SHA1": {}}), "invalid verifier"),
        (with_sha1(stored_key="A", server_key="", iterations=4096), "invalid verifier"),
        (with_sha1(iterations=1), "invalid verifier"),
        ({"anonymous": 1}, "`anonymous`"),
        ({"salt_key": 1}, "`salt_key`"),
        ({"salt_key": "AAAA"}, "`salt_key`"),
    ],
)
def test_an_invalid_users_file_is_one_clear_error(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^the users file .*{said}"):
        FileUsers(written(tmp_path / "users.json", document))


def test_a_missing_file_and_a_pipe_in_its_place_are_clear_errors(tmp_path: Path) -> None:
    """To open a pipe once blocked until another process wrote into it: each process stood still."""
    with pytest.raises(ConfigError, match="cannot be read"):
        FileUsers(tmp_path / "users.json")
    os.mkfifo(tmp_path / "users.json")
    with pytest.raises(ConfigError, match="is not a file"):
        FileUsers(tmp_path / "users.json")


def test_a_users_file_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "USERS_FILE_BYTES_MAX", 10)
    with pytest.raises(ConfigError, match="has more than 10 bytes"):
        FileUsers(written(tmp_path / "users.json", {"users": {}}))


def test_the_user_of_the_source_and_local_clients_read_without_a_users_file() -> None:
    password: list[str | None] = ["secret"]
    users = SourceUser("ann", lambda: password[0])
    scram(users, "SCRAM-SHA256", "ann", "secret")
    assert users.check("ann", "secret") == Reader("ann")
    assert users.check("ann", "wrong") is None
    assert users.check("bob", "secret") is None
    assert users.anonymous == Reader("")
    password[0] = "changed"
    scram(users, "SCRAM-SHA256", "ann", "changed")
    password[0] = None
    assert users.check("ann", "changed") is None
    with pytest.raises(SaslError):
        scram(users, "SCRAM-SHA256", "ann", "changed")
    assert SourceUser("", lambda: "secret").check("", "secret") is None


def challenge(users: Users, name: str, mechanism: str = "SCRAM-SHA256") -> tuple[bytes, bytes]:
    _, salt, iterations = scram_server(users, mechanism).challenge(f"n,,n={name},r=abc".encode()).split(b",")
    return salt, iterations


@pytest.mark.parametrize("mechanism", HASHES)
def test_an_unknown_user_cannot_be_distinguished_from_a_known_one(tmp_path: Path, mechanism: str) -> None:
    """By salt or iterations, in several processes and after a restart, with users of different ages."""
    ann = entry_of("one")
    for kept in ann["verifiers"].values():
        kept |= {"iterations": 15_000, "salt": "c2FsdCBvZiAyNCBieXRlcy4uLi4uLi4="}
    document = {"users": {"ann": ann, "bob": entry_of("two")}, "salt_key": new_salt_key()}
    file = written(tmp_path / "users.json", document)
    names = ["ann", "bob", *(f"unknown{number}" for number in range(40))]
    first, second = FileUsers(file), FileUsers(file)
    found = {name: challenge(first, name, mechanism) for name in names}
    assert found == {name: challenge(second, name, mechanism) for name in names}
    kinds = {(len(salt), iterations) for salt, iterations in found.values()}
    assert kinds == {(len(salt), iterations) for salt, iterations in (found["ann"], found["bob"])}
    assert len({salt for salt, _ in found.values()}) == len(names)
    secret = b"of the service"
    one, other = (SourceUser("ann", lambda: "one", secret) for _ in range(2))
    for name in ("ann", "x"):
        assert challenge(one, name, mechanism) == challenge(other, name, mechanism)


def test_an_unknown_user_costs_as_much_work_as_a_known_one(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []
    derive = hashlib.pbkdf2_hmac

    def counted(name: str, password: bytes, salt: bytes, iterations: int) -> bytes:
        rounds.append(iterations)
        return derive(name, password, salt, iterations)

    users = FileUsers(file)
    monkeypatch.setattr(hashlib, "pbkdf2_hmac", counted)
    for name in ("ann", "bob", "unknown", ""):
        rounds.clear()
        assert users.check(name, "wrong") is None
        assert rounds == [4096], name
        assert users.proven(name, "wrong") is None
        assert rounds == [4096], name


@pytest.mark.parametrize("mechanism", HASHES)
def test_a_challenge_takes_the_same_steps_for_known_and_unknown_users(tmp_path: Path, mechanism: str) -> None:
    """An unknown user's once took five times as long as a known one's in a file of 9,000: it looked through all."""
    entry = entry_of("pw")
    users = FileUsers(written(tmp_path / "users.json", {"users": {f"user{number:04}": entry for number in range(300)}}))

    def steps(name: str) -> list[str]:
        server = scram_server(users, mechanism)
        called: list[str] = []
        sys.setprofile(lambda frame, event, argument: called.append(f"{event} {frame.f_code.co_name} {argument!r:.20}"))
        try:
            server.challenge(f"n,,n={name},r=abcdefgh".encode())
        finally:
            sys.setprofile(None)
        return [each.partition(" object at")[0] for each in called]

    known, unknown = steps("user0007"), steps("unknown0")
    assert [each.split()[:2] for each in known] == [each.split()[:2] for each in unknown]
    assert len(known) < 300


def test_a_checked_password_is_remembered_until_its_entry_changes(file: Path) -> None:
    users = FileUsers(file)
    assert users.proven("ann", "one") is None
    assert users.check("ann", "one") == users.proven("ann", "one") == Reader("ann")
    assert users.proven("ann", "two") is None
    assert users.proven("bob", "one") is None
    written(file, {"users": {"ann": entry_of("one")}})
    os.utime(file, ns=(3, 3))
    assert users.proven("ann", "one") is None, "another salt: perhaps another password"


def test_a_reader_keeps_its_rights_until_its_entry_changes(file: Path) -> None:
    users = FileUsers(file)
    ann, document = users.reader("ann"), json.loads(file.read_text())
    assert ann is not None
    assert current(users, ann) == ann
    document["users"]["ann"]["read"] = ["shop.items"]
    os.utime(written(file, document), ns=(1, 1))
    assert current(users, ann) == Reader("ann", frozenset({"shop.items"}))
    document["users"]["ann"]["verifiers"] = entry_of("another")["verifiers"]
    os.utime(written(file, document), ns=(2, 2))
    assert current(users, ann) is None
    assert current(users, Reader("")) is None
    source = SourceUser("eve", lambda: "x")
    assert current(source, Reader("")) == Reader("")
    assert current(source, Reader("eve")) == Reader("eve")


def test_the_settings_choose_the_users(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DCP_MIRROR_PASSWORD", "secret")
    assert users_of(Settings(users_file=file)).check("ann", "one")
    assert users_of(Settings(source="couchbase://eve@host/bucket")).check("eve", "secret")
    assert users_of(Settings()).check("", "secret") is None
