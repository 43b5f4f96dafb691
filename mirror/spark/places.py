"""Destinations of a pipeline: a folder on a disk or a prefix in an object store.

`folder_at` is the only parser of destinations: a plain path, `file:///path`, `s3://bucket/prefix`,
`gs://bucket/prefix`, `abfss://container@account.dfs.core.windows.net/prefix`. Any other URL is refused, because as a
path it would be a local folder. delta-rs accesses object stores, for tables and for single files. So the same
environment variables (AWS_*, GOOGLE_*, AZURE_*) count for both.

A new object appears only when `close` of its file returns; a new local file is synced then. No file is renamed, because
object stores cannot rename.
"""

from __future__ import annotations

import contextlib
import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mirror.errors import ConfigError, MirrorError

OBJECT_STORES = ("s3", "gs", "abfss")
ACCEPTED = "a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or abfss://container@account.dfs.core.windows.net/prefix"

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
ERROR_LENGTH_MAX = 300


class Folder(ABC):
    """A place for files. In another process, `folder_at(url)` returns the same place."""

    url: str

    def __str__(self) -> str:
        return self.url

    @abstractmethod
    def child(self, name: str) -> Folder: ...

    @abstractmethod
    def create(self, name: str) -> Any:
        """Return a new file with `write`, `tell` and `close`. It is complete after `close`. Raises OSError."""

    @abstractmethod
    def discard(self, file: Any, name: str) -> None:
        """Abandon a file from `create` that was not closed. Never raises."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """Return a file to read, with `seek`. Raises OSError."""

    @abstractmethod
    def size(self, name: str) -> int | None: ...

    @abstractmethod
    def names(self) -> list[str]: ...

    @abstractmethod
    def remove(self, name: str) -> None: ...

    def error(self, error: Exception) -> MirrorError:
        why = (error.strerror if isinstance(error, OSError) else None) or plain(error)
        return MirrorError(f"{self.url}: cannot be written on {os.uname().nodename}: {why}", hint=self.remedy)

    @property
    @abstractmethod
    def remedy(self) -> str: ...


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder on a disk that this machine sees. `create` refuses a name that exists."""

    path: Path

    remedy = "give a folder that every machine of the job can write and that has room"

    @property
    def url(self) -> str:  # type: ignore[override]
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        return LocalFolder(self.path / name)

    def create(self, name: str) -> Any:
        path = self.path / name
        if path.parent != self.path:
            path.parent.mkdir(exist_ok=True)
        return _SyncedFile(FileIO(path, "xb"))

    def discard(self, file: Any, name: str) -> None:
        with contextlib.suppress(Exception):
            file.raw.close()
        with contextlib.suppress(OSError):
            self.remove(name)

    def open(self, name: str) -> Any:
        return (self.path / name).open("rb")

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


class _SyncedFile(BufferedWriter):
    def close(self) -> None:
        if not self.closed:
            try:
                self.flush()
                os.fsync(self.fileno())
            finally:
                super().close()


@dataclass(frozen=True)
class ObjectFolder(Folder):
    url: str

    remedy = "see that the bucket exists and that credentials are in the environment of every machine of the job"

    def child(self, name: str) -> ObjectFolder:
        return ObjectFolder(f"{self.url}/{name}")

    def _handler(self) -> Any:
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self.url)

    def create(self, name: str) -> Any:
        """Return an upload in parts. The object appears when the upload is closed."""
        return _Upload(self._handler()._handler.open_output_stream(name, None))

    def discard(self, file: Any, name: str) -> None:
        file.closed = True

    def open(self, name: str) -> Any:
        return self._handler().open_input_file(name)

    def size(self, name: str) -> int | None:
        from pyarrow.fs import FileType

        (found,) = self._handler().get_file_info([name])
        return int(found.size) if found.type == FileType.File else None

    def names(self) -> list[str]:
        from pyarrow.fs import FileSelector

        return sorted(each.path for each in self._handler().get_file_info_selector(FileSelector("", recursive=False)))

    def remove(self, name: str) -> None:
        """Remove an object; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            self._handler().delete_file(name)


class _Upload:
    """delta-rs's writer as a Python file. The writer takes only bytes, so `write` converts Arrow's buffers."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._count = 0
        self.closed = False

    def write(self, data: Any) -> int:
        text = bytes(data)
        self._raw.write(text)
        self._count += len(text)
        return len(text)

    def tell(self) -> int:
        return self._count

    def flush(self) -> None:
        """Do nothing: delta-rs sends each part when it is full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._raw.close()


def folder_at(text: str | Path) -> Folder:
    """Return the folder of a path or URL. Raises ConfigError for a URL that is not a destination."""
    if isinstance(text, Path):
        return LocalFolder(text.absolute())
    scheme = _scheme_of(text)
    if scheme is None or scheme == "file":
        return LocalFolder(local_path(text))
    if scheme not in OBJECT_STORES:
        raise ConfigError(f"{text}: {scheme}:// cannot be written", hint=f"give {ACCEPTED}")
    parts = urlsplit(text)
    if not text.lower().startswith(f"{scheme}://") or not parts.netloc or parts.query or parts.fragment:
        raise ConfigError(f"{text}: not a URL of a bucket and a prefix", hint=f"give {ACCEPTED}")
    if not parts.path.strip("/"):
        raise ConfigError(f"{text}: names a whole bucket", hint="give a prefix in it, such as s3://bucket/orders")
    if parts.password is not None:
        raise ConfigError(f"{scheme}://{parts.hostname}: a URL must not contain a password", hint="use the environment")
    return ObjectFolder(f"{scheme}://{parts.netloc}/{parts.path.strip('/')}")


def local_path(text: str | Path) -> Path:
    text = str(text)
    scheme = _scheme_of(text)
    if scheme is None:
        return Path(text).absolute()
    if scheme != "file":
        raise ConfigError(
            f"{text}: must be on this machine, and {scheme}:// is not", hint="give a path or file:///path"
        )
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ConfigError(f"{text}: not a path of this machine", hint="write it as file:///path")
    return Path(unquote(parts.path))


def _scheme_of(text: str) -> str | None:
    found = _SCHEME.match(text)
    return found[1].lower() if found else None


def plain(error: BaseException) -> str:
    text = " ".join(_COLOUR.sub("", str(error)).replace("\u21b3", ":").split()).replace(" :", ":")
    return text if len(text) <= ERROR_LENGTH_MAX else text[:ERROR_LENGTH_MAX] + "..."
