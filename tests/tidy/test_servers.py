"""uvicorn is used by its public names alone."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PUBLIC = {"Config", "Server", "load", "http_protocol_class", "server_state"}
"""The classes that uvicorn exports, and the members that are used of them."""


def private_names(tree: ast.AST) -> Iterator[str]:
    """Imports from inside of uvicorn, members of its objects that are not in PUBLIC, and private names."""
    objects = {"uvicorn"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(each in ast.unparse(node.value) for each in ("uvicorn.", "config.")):
            objects |= {each.id for each in node.targets if isinstance(each, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "uvicorn":
            yield f"from {node.module}"
        elif isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.startswith("uvicorn."))
        elif isinstance(node, ast.Attribute):
            root = node.value
            while isinstance(root, ast.Attribute | ast.Call):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            is_its = isinstance(root, ast.Name) and root.id in objects
            if (is_its and node.attr not in PUBLIC) or re.match(r"self\._server\._", ast.unparse(node)):
                yield ast.unparse(node)


def test_private_names_of_the_server_are_not_used() -> None:
    files = [path for path in (ROOT / "mirror").rglob("*.py") if "uvicorn" in path.read_text()]
    assert files == [ROOT / "mirror" / "serve" / "http" / "protocol.py"]
    assert list(private_names(ast.parse(files[0].read_text()))) == []


@pytest.mark.parametrize(
    "text",
    [
        "from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol", "from uvicorn import main",
        "import uvicorn.server", "config = uvicorn.Config(app)\nconfig.loaded_app", "uvicorn.Server(x).force_exit",
        "self._server._unset_keepalive_if_required()",
    ],
)  # fmt: skip
def test_a_private_name_is_noticed(text: str) -> None:
    assert list(private_names(ast.parse(text)))
