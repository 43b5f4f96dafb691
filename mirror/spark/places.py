"""Where a pipeline writes: a folder on a disk or a prefix in an object store, from one text.

Knows URLs, files and object stores; never what is written. `folder_at` is the only parser of destinations: a plain
path, `file:///path`, `s3://bucket/prefix`, `gs://bucket/prefix`,
`abfss://container@account.dfs.core.windows.net/prefix`. Any other URL is refused: it must not become a local folder of
that name. Object stores are reached through delta-rs for tables and for single files alike, so both use the same
environment variables (AWS_*, GOOGLE_*, AZURE_*).

Invariants: a file of a folder is there once `close` returned, and not before (a local file is synced; an object appears
with its last byte); nothing here renames, since object stores cannot.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from abc import ABC, abstractmethod
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from mirror.errors import ConfigError, MirrorError

OBJECT_STORES = ("s3", "gs", "abfss")
ACCEPTED = "a path, file:///path, s3://bucket/prefix, gs://bucket/prefix or abfss://container@account.dfs.core.windows.net/prefix"

AWS_SOURCES = {
    *("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
}
METADATA_TIMEOUT_S = 1.0
"""An instance's own service answers in milliseconds; elsewhere nothing may answer at all."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")
ERROR_LENGTH_MAX = 300
COPY_BYTES = 4 * 1024 * 1024


class Folder(ABC):
    """A place for files. `url` finds it again in another process: give it to `folder_at`."""

    url: str

    def __str__(self) -> str:
        """As in messages."""
        return self.url

    @abstractmethod
    def child(self, name: str) -> Folder:
        """The folder of that name in this one."""

    @abstractmethod
    def create(self, name: str) -> Any:
        """A new file to write: `write`, `tell`, and `close`, after which it is there. Raises OSError."""

    @abstractmethod
    def discard(self, file: Any, name: str) -> None:
        """Give up a file that was created and not closed. Never raises."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """A file to read, with `seek`. Raises OSError."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of a file; None: there is none. Raises OSError."""

    @abstractmethod
    def names(self) -> list[str]:
        """What is in the folder, sorted; empty where there is no folder. Raises OSError."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file. Harmless where there is none."""

    def check_access(self) -> None:  # noqa: B027 - a disk is asked when it is written
        """Raise ConfigError if nothing there can be written by this process."""

    def error(self, error: Exception) -> MirrorError:
        """The error of a folder that cannot be used, with the machine that found out."""
        why = (error.strerror if isinstance(error, OSError) else None) or plain(error)
        return MirrorError(
            f"{self.url}: cannot be written on {os.uname().nodename}: {why}",
            hint=self.remedy,
        )

    @property
    @abstractmethod
    def remedy(self) -> str:
        """What a user can do about a folder that cannot be used."""


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder on a disk that this machine sees."""

    path: Path

    remedy = "give a folder that every machine of the job can write and that has room"

    @property
    def url(self) -> str:  # type: ignore[override]
        """The absolute path."""
        return str(self.path)

    def child(self, name: str) -> LocalFolder:
        """A folder below."""
        return LocalFolder(self.path / name)

    def create(self, name: str) -> Any:
        """Refuses a name that exists."""
        return _SyncedFile((self.path / name).open("xb"))

    def discard(self, file: Any, name: str) -> None:
        """Remove what there is of it."""
        with contextlib.suppress(Exception):
            file.discard()
        self.remove(name)

    def open(self, name: str) -> Any:
        """Read from the disk."""
        return (self.path / name).open("rb")

    def size(self, name: str) -> int | None:
        """From the directory."""
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def names(self) -> list[str]:
        """From the directory."""
        try:
            return sorted(os.listdir(self.path))
        except FileNotFoundError:
            return []

    def remove(self, name: str) -> None:
        """From the directory."""
        (self.path / name).unlink(missing_ok=True)


class _SyncedFile:
    """A file whose `close` syncs it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.closed = False

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def tell(self) -> int:
        return self._file.tell()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            with self._file:
                self._file.flush()
                os.fsync(self._file.fileno())

    def discard(self) -> None:
        self.closed = True
        self._file.close()


@dataclass(frozen=True)
class ObjectFolder(Folder):
    """A prefix in an object store."""

    url: str

    remedy = "see that the bucket exists and that credentials are in the environment of every machine of the job"

    def child(self, name: str) -> ObjectFolder:
        """A longer prefix."""
        return ObjectFolder(f"{self.url}/{name}")

    def check_access(self) -> None:
        """Look for AWS credentials before delta-rs does, which asks for ten seconds and ends with a page of text."""
        if self.url.startswith("s3://") and not _has_aws_credentials():
            raise ConfigError(
                f"{self.url}: no AWS credentials were found",
                hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, on every machine of the job",
            )

    def _handler(self) -> Any:
        from deltalake.fs import DeltaStorageHandler

        return DeltaStorageHandler(self.url)

    def create(self, name: str) -> Any:
        """An upload in parts, which the store shows once it is complete."""
        return _Upload(self._handler()._handler.open_output_stream(name, None))

    def discard(self, file: Any, name: str) -> None:
        """An upload that is not completed is never shown."""
        file.closed = True

    def open(self, name: str) -> Any:
        """A copy of the object on this machine's disk, gone once it is closed."""
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - closed by the caller
        try:
            with self._handler().open_input_stream(name) as source:
                while text := source.read(COPY_BYTES):
                    copy.write(text)
            copy.seek(0)
        except BaseException:
            copy.close()
            raise
        return copy

    def size(self, name: str) -> int | None:
        """As the store says."""
        from pyarrow.fs import FileType

        (found,) = self._handler().get_file_info([name])
        return int(found.size) if found.type == FileType.File else None

    def names(self) -> list[str]:
        """As the store lists them."""
        from pyarrow.fs import FileSelector

        return sorted(each.path for each in self._handler().get_file_info_selector(FileSelector("", recursive=False)))

    def remove(self, name: str) -> None:
        """Deleting an object that is not there is no error in any of the stores."""
        with contextlib.suppress(FileNotFoundError):
            self._handler().delete_file(name)


class _Upload:
    """delta-rs's writer as a Python file: it takes nothing but bytes, and Arrow writes buffers."""

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
        """Parts are sent as they are full."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._raw.close()


def _has_aws_credentials() -> bool:
    """True if the environment or a file names some, or a metadata service answers at all."""
    given = {name.upper() for name in os.environ}
    homes = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    files = (Path(os.environ.get(name, home)).expanduser() for name, home in homes.items())
    if given & AWS_SOURCES or any(each.is_file() for each in files):
        return True
    endpoint = urlsplit(os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254"))
    connection = HTTPConnection(endpoint.hostname or "", endpoint.port, timeout=METADATA_TIMEOUT_S)
    try:
        connection.request("PUT", "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "1"})
        connection.getresponse()
    except (OSError, HTTPException):
        return False
    finally:
        connection.close()
    return True


def folder_at(text: str | Path) -> Folder:
    """The folder that a user named. Raises ConfigError for a URL that nothing here can write."""
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
    """A path on this machine, from a path or `file:///path`. Raises ConfigError for any other URL."""
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
    """A library's error in one line without colours."""
    text = " ".join(_COLOUR.sub("", str(error)).replace("\u21b3", ":").split()).replace(" :", ":")
    return text if len(text) <= ERROR_LENGTH_MAX else text[:ERROR_LENGTH_MAX] + "..."
