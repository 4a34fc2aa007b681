"""Archives as parts: each large file in them is a blob of its own, which other archives and snapshots share.

Work folders of forks are alike, and a new time in a header makes each archive another one.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.store.packing import compress, decode, decompress, encode

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = b"\3"
"""Begins the data of a blob that is stored in parts."""
SPLIT_BYTES = 256 * 1024
"""Smaller archives are stored whole."""
PART_BYTES = 64 * 1024
"""Smaller files stay with what is around them, and are compressed together."""
TAR_MAGIC, TAR_MAGIC_AT = b"ustar", 257


@dataclass(frozen=True, slots=True)
class Parts:
    """An archive in parts."""

    rest: bytes
    """What the blob of the archive has: the digests of its files, and all bytes between them."""
    files: dict[str, bytes]
    """The contents of its large files, by their digests."""


def split(data: bytes) -> Parts | None:
    """The parts of an archive; None for other data, and where it is not worth it."""
    places = find_files(data)
    if not places:
        return None
    gaps, order, files, end = [], [], {}, 0
    for start, size in places:
        content = data[start : start + size]
        digest = hashlib.sha256(content).hexdigest()
        gaps.append(data[end:start])
        order.append([start - end, digest])
        files[digest] = content
        end = start + size
    return Parts(MARK + compress(encode(order) + b"\n" + b"".join([*gaps, data[end:]])), files)


def find_files(data: bytes) -> list[tuple[int, int]]:
    """Where the contents of the large files of a tar archive are: their offsets and sizes, in order."""
    if len(data) < SPLIT_BYTES or not data.startswith(TAR_MAGIC, TAR_MAGIC_AT):
        return []
    places: list[tuple[int, int]] = []
    end = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as packed:
            for member in packed:
                start, size = member.offset_data, member.size
                if (
                    member.isreg()
                    and not member.issparse()
                    and size >= PART_BYTES
                    and end <= start <= len(data) - size
                ):
                    places.append((start, size))
                    end = start + size
    except (tarfile.TarError, ValueError):
        return []
    return places


def digests(rest: bytes) -> list[str]:
    """The parts that a blob needs; none if it is whole. Raises StoreError for damaged data."""
    return [digest for _, digest in _read(rest)[0]] if rest.startswith(MARK) else []


def join(rest: bytes, read: Callable[[str], bytes]) -> bytes:
    """The data of a blob, also of one in parts. Raises StoreError for damaged data."""
    if not rest.startswith(MARK):
        return decompress(rest)
    order, gaps = _read(rest)
    pieces, end = [], 0
    for size, digest in order:
        pieces += [gaps[end : end + size], read(digest)]
        end += size
    return b"".join([*pieces, gaps[end:]])


def _read(rest: bytes) -> tuple[list[tuple[int, str]], bytes]:
    order, _, gaps = decompress(rest[len(MARK) :]).partition(b"\n")
    return decode(order), gaps
