"""The archive of a published task: unpacked from an untrusted source, and hashed as Harbor does.

The hash is the SHA-256 of a line `PATH NUL HASH LF` for each file, in the order of their paths. It covers the files
and folders in COVERED; what else an archive holds is left out, because nothing says that it was published.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import ImageError, TaskError
from paddock.limits import GIBIBYTE
from paddock.sandbox.images.tar_reader import FILE_KINDS, FOLDER, TarReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.sandbox.images.tar_reader import TarEntry

COVERED = frozenset(
    {"task.toml", "instruction.md", "README.md", "trajectory.json", "environment", "tests", "solution", "steps"}
)
LARGEST_TASK = 16 * GIBIBYTE
MOST_ENTRIES = 200_000
DEEPEST = 64
"""Folders in each other."""
FILE_MODE, PROGRAM_MODE = 0o644, 0o755
SHOWN_CHARACTERS = 300
PUBLISH_HINT = "publish the task again, or choose another version"


def unpack_task(archive: Path, folder: Path) -> str:
    """Unpack the covered files into the empty `folder`. Returns the hash of their content. Raises TaskError."""
    hashes: dict[str, str] = {}
    try:
        with gzip.open(archive) as stream:
            reader = TarReader(_LimitedStream(stream))
            for number, entry in enumerate(reader):
                if number == MOST_ENTRIES:
                    raise TaskError(f"the archive has more than {MOST_ENTRIES} entries", hint=PUBLISH_HINT)
                path = _path(entry)
                if entry.kind == FOLDER or path.parts[0] not in COVERED:
                    continue
                hashes[str(path)] = _write(reader, entry, folder / path)
    except ImageError as error:
        raise TaskError(error.message, hint=PUBLISH_HINT) from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise TaskError(f"the archive cannot be decompressed: {error}", hint=PUBLISH_HINT) from error
    return content_hash(hashes)


def content_hash(hashes: Mapping[str, str]) -> str:
    """Harbor's hash of a task from the hashes of its files."""
    lines = "".join(f"{path}\0{hashes[path]}\n" for path in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def _path(entry: TarEntry) -> PurePosixPath:
    """Where the entry belongs. Raises TaskError for links, devices and paths that lead elsewhere."""
    try:
        name = entry.name.decode()
    except UnicodeDecodeError:
        raise _refused(entry) from None
    path = PurePosixPath(name)
    if entry.kind != FOLDER and entry.kind not in FILE_KINDS:
        raise TaskError(f"{name[:SHOWN_CHARACTERS]!r} in the archive is a link or a device", hint=PUBLISH_HINT)
    leads_out = path.is_absolute() or ".." in path.parts
    if leads_out or len(path.parts) > DEEPEST or "\n" in name or "\0" in name:
        raise _refused(entry)
    if entry.kind != FOLDER and not path.parts:
        raise _refused(entry)
    return path


def _refused(entry: TarEntry) -> TaskError:
    name = entry.name.decode(errors="replace")[:SHOWN_CHARACTERS]
    return TaskError(f"the archive has the path {name!r}", hint=PUBLISH_HINT)


def _write(reader: TarReader, entry: TarEntry, file: Path) -> str:
    digest = hashlib.sha256()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb") as output:
            for chunk in reader.content():
                digest.update(chunk)
                output.write(chunk)
        file.chmod(PROGRAM_MODE if entry.mode & 0o100 else FILE_MODE)
    except OSError as error:
        hint = "free space on the disk" if error.errno == errno.ENOSPC else PUBLISH_HINT
        name = entry.name.decode()[:SHOWN_CHARACTERS]
        raise TaskError(f"{name!r} of the archive: {error.strerror}", hint=hint) from error
    return digest.hexdigest()


class _LimitedStream:
    """A stream that refuses to become too large: a small archive can expand without end."""

    def __init__(self, stream: gzip.GzipFile) -> None:
        self._stream = stream
        self._left = LARGEST_TASK

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TaskError(f"the archive has more than {LARGEST_TASK} bytes", hint=PUBLISH_HINT)
        return data
