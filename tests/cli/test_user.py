"""`user`: a users file is made and changed, and nothing of a password is in it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from mirror.serve.access.auth import FileUsers, Reader
from tests.cli.conftest import Result, call_here


def user(*arguments: str, password: str = "") -> Result:
    return call_here("user", *arguments, text=password)


def test_users_are_added_changed_listed_and_removed(tmp_path: Path) -> None:
    file = tmp_path / "users.json"
    assert user("add", "ann", "--file", str(file), password="secret one\n").code == 0
    assert user("add", "bob", "-f", str(file), "--read", "a.*", "--read", "b.c", password="two").code == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "secret" not in file.read_text()
    users = FileUsers(file)
    assert users.check("ann", "secret one") == Reader("ann")
    assert users.check("bob", "two") == Reader("bob", frozenset({"a.*", "b.c"}))
    listed = user("list", "-f", str(file), "--json")
    assert json.loads(listed.out) == {"users": {"ann": ["*"], "bob": ["a.*", "b.c"]}, "anonymous": None}
    assert user("list", "-f", str(file)).out == "ann  *\nbob  a.* b.c\n"
    assert user("add", "ann", "-f", str(file), password="three").code == 0
    assert user("add", "bob", "-f", str(file), password="four").code == 0
    assert FileUsers(file).check("bob", "four") == Reader("bob", frozenset({"a.*", "b.c"})), "no further right"
    assert user("remove", "bob", "-f", str(file)).code == 0
    users = FileUsers(file)
    assert users.check("ann", "secret one") is None
    assert users.check("ann", "three")
    assert users.reader("bob") is None
    assert [path.name for path in tmp_path.iterdir()] == ["users.json"]


def test_a_mistake_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "users.json"
    for arguments, password, code, said in (
        (["add", "ann"], "", 2, "no password"),
        (["add", "ann", "--read", "x"], "one", 2, "neither"),
        (["remove", "ann"], "", 5, "no user 'ann'"),
        (["list"], "", 2, "cannot be read"),
    ):
        result = user(*arguments, "-f", str(file), password=password)
        assert (result.code, result.out) == (code, "")
        assert said in result.err
        assert not file.exists()
    assert "cannot be written" in user("add", "ann", "-f", str(tmp_path / "no" / "f"), password="x").err
