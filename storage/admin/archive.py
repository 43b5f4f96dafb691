"""Storage of a backup's parts: files of a folder, or members of a tar stream.

The name of a tar's member is never used as a path.
"""

from __future__ import annotations

import io
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Iterator
from typing import IO

from storage.admin.backup import AGAIN, MANIFEST, MANIFEST_BYTES_MAX, PART_BYTES, BackupPart, contents, no_part
from storage.env.directory import replace_file, sync_directory
from storage.errors import CorruptedError, StorageError


class FolderSink:
    def __init__(self, path: str) -> None:
        """Make the folder. Raises OSError, or StorageError if the folder is not empty."""
        self._path = path
        os.makedirs(path, mode=0o700, exist_ok=True)
        if names := contents(path):
            hint = "an unfinished backup has no backup.json; give an empty or new directory"
            raise StorageError(f"is not empty: it holds {names[0]}", path=path, hint=hint)

    def discard(self) -> None:
        for name in contents(self._path):
            shutil.rmtree(os.path.join(self._path, name), ignore_errors=True)

    def put(self, part: BackupPart) -> None:
        target = os.path.join(self._path, part.name)
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        replace_file(target, part.data)
        if part.name == MANIFEST:
            for folder, _, _ in os.walk(self._path):
                sync_directory(folder)


class TarSink:
    """Writes parts as members of an uncompressed tar; `file` need not be seekable."""

    def __init__(self, file: IO[bytes], *, time_s: int) -> None:
        self._time_s = time_s
        self._tar = tarfile.open(fileobj=file, mode="w|", format=tarfile.PAX_FORMAT)  # noqa: SIM115 - closed by `close`

    def put(self, part: BackupPart) -> None:
        member = tarfile.TarInfo(part.name)
        member.size, member.mtime, member.mode = len(part.data), self._time_s, 0o600
        self._tar.addfile(member, io.BytesIO(part.data))

    def close(self) -> None:
        self._tar.close()


def folder_parts(path: str) -> Iterator[BackupPart]:
    """Yield the parts in a folder, `backup.json` last. Raises CorruptedError, StorageError."""
    if not os.path.exists(os.path.join(path, MANIFEST)):
        raise CorruptedError(f"is no complete backup: it has no {MANIFEST}", path=path, hint=AGAIN)
    names = []
    for folder, _, files in os.walk(path):
        names += [os.path.relpath(os.path.join(folder, name), path) for name in files]
    for name in sorted(names, key=lambda name: (name == MANIFEST, name)):
        try:
            with open(os.path.join(path, name), "rb") as file:
                part = _part(name, file, os.fstat(file.fileno()).st_size)
        except OSError as error:
            raise unreadable(error, os.path.join(path, name)) from error
        yield part


def unreadable(error: OSError, path: str) -> StorageError:
    return StorageError(f"cannot be read: {error.strerror}", path=path, hint="give --from a backup")


def tar_parts(file: IO[bytes]) -> Iterator[BackupPart]:
    """Yield the parts in a tar, plain or compressed by gzip, bzip2 or xz. Raises CorruptedError, OSError."""
    try:
        with tarfile.open(fileobj=file, mode="r|*") as tar:
            for member in tar:
                if member.isdir():
                    continue
                content = tar.extractfile(member) if member.isreg() else None
                if content is None:
                    raise no_part(member.name)
                yield _part(member.name.removeprefix("./"), content, member.size)
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CorruptedError(f"the backup is damaged or cut short: {error}", hint=AGAIN) from error


def _part(name: str, file: IO[bytes], size: int) -> BackupPart:
    if size > (MANIFEST_BYTES_MAX if name == MANIFEST else PART_BYTES):
        raise no_part(name, ": too large")
    return BackupPart(name, file.read())
