"""Reads tar archives as a stream: ustar, pax and GNU headers, from untrusted sources.

`tarfile` ends an archive silently at a damaged header, and reads extension headers of any size into memory. This
reader refuses both. It yields bytes for names, because names in layers need not be UTF-8. It writes nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from paddock.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

BLOCK_BYTES = 512
CHUNK_BYTES = 1 << 18
MAX_EXTENSION_BYTES = 1 << 20
"""Of all extension headers of one entry, or of all global ones. PATH_MAX is 4096, and an xattr has at most 64 KiB."""
ZERO_BLOCK = bytes(BLOCK_BYTES)
HINT = "make or fetch the archive again"

FILE_KINDS = (b"0", b"\0", b"7")
HARD_LINK, SYMLINK, CHARACTER_DEVICE, BLOCK_DEVICE, FOLDER, FIFO = b"1", b"2", b"3", b"4", b"5", b"6"
WITHOUT_DATA = (HARD_LINK, SYMLINK, CHARACTER_DEVICE, BLOCK_DEVICE, FOLDER, FIFO)
PAX_HEADER, PAX_GLOBAL, GNU_LONG_NAME, GNU_LONG_LINK, GNU_SPARSE = b"x", b"g", b"L", b"K", b"S"
XATTR_PREFIX = "SCHILY.xattr."
PAX_LENGTH = re.compile(rb"(\d{1,10}) ")


class ByteSource(Protocol):
    def read(self, size: int, /) -> bytes:
        """Exactly `size` bytes, fewer only at the end."""


@dataclass(frozen=True, slots=True)
class TarEntry:
    """One entry of an archive."""

    name: bytes
    kind: bytes
    """The type flag. Every kind of regular file is `0`."""
    mode: int
    uid: int
    gid: int
    size: int
    mtime_nanoseconds: int
    link: bytes = b""
    xattrs: Mapping[str, bytes] = field(default_factory=dict)


class TarReader:
    """Iterate over it, and call `content` for an entry's data before the next one is requested."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._left = 0
        self._padding = 0
        self._extension_bytes = 0
        self._global_bytes = 0

    def __iter__(self) -> Iterator[TarEntry]:
        pax: dict[str, bytes] = {}
        shared: dict[str, bytes] = {}
        while True:
            self._skip()
            header = self._source.read(BLOCK_BYTES)
            if header == ZERO_BLOCK or not header:
                break
            kind = header[156:157]
            size = self._parse_header(header)
            if kind == PAX_GLOBAL:
                shared.update(parse_pax(self._read_global_extension(size)))
            elif kind == PAX_HEADER:
                pax.update(parse_pax(self._read_extension(size)))
            elif kind == GNU_LONG_NAME:
                pax["path"] = self._read_extension(size).rstrip(b"\0")
            elif kind == GNU_LONG_LINK:
                pax["linkpath"] = self._read_extension(size).rstrip(b"\0")
            else:
                yield self._entry(header, kind, {**shared, **pax})
                pax = {}
                self._extension_bytes = 0
        if pax:
            raise damaged("it ends after an extension header")
        # Padding after the end is part of the digest.
        while self._source.read(CHUNK_BYTES):
            pass

    def content(self) -> Iterator[bytes]:
        """The data of the present entry, in chunks."""
        while self._left:
            chunk = self._source.read(min(self._left, CHUNK_BYTES))
            if not chunk:
                raise damaged("it ends within a file")
            self._left -= len(chunk)
            yield chunk

    def _skip(self) -> None:
        for _ in self.content():
            pass
        if self._padding and len(self._source.read(self._padding)) < self._padding:
            raise damaged("it ends within a file")
        self._padding = 0

    def _expect(self, size: int) -> None:
        self._left, self._padding = size, -size % BLOCK_BYTES

    def _parse_header(self, header: bytes) -> int:
        if len(header) < BLOCK_BYTES:
            raise damaged("it ends within a header")
        rest = header[:148] + b" " * 8 + header[156:]
        # Some programs add signed characters.
        unsigned, checksum = sum(rest), parse_number(header[148:156])
        if checksum not in (unsigned, unsigned - 256 * sum(byte > 127 for byte in rest)):
            raise damaged("the checksum of a header is wrong")
        size = parse_number(header[124:136])
        if size < 0:
            raise damaged("an entry has a negative size")
        return size

    def _read_extension(self, size: int) -> bytes:
        self._extension_bytes += size
        return self._read_limited(size, self._extension_bytes)

    def _read_global_extension(self, size: int) -> bytes:
        self._global_bytes += size
        return self._read_limited(size, self._global_bytes)

    def _read_limited(self, size: int, total: int) -> bytes:
        if total > MAX_EXTENSION_BYTES:
            raise damaged(f"the extension headers of an entry have {total} bytes")
        self._expect(size)
        return b"".join(self.content())

    def _entry(self, header: bytes, kind: bytes, pax: Mapping[str, bytes]) -> TarEntry:
        if kind == GNU_SPARSE or any(key.startswith("GNU.sparse.") for key in pax):
            raise ImageError("the archive has sparse files", hint="make it without --sparse (-S)")
        size = pax_integer(pax, "size", parse_number(header[124:136]))
        name = pax.get("path") or ustar_name(header)
        is_file = kind in FILE_KINDS
        if kind == b"\0" and name.endswith(b"/"):
            kind, is_file = FOLDER, False
        # Links, folders and devices have no data, whatever their size is. Entries of unknown kinds may have some.
        self._expect(0 if kind in WITHOUT_DATA else size)
        return TarEntry(
            name=name,
            kind=b"0" if is_file else kind,
            mode=parse_number(header[100:108]) & 0o7777,
            uid=pax_integer(pax, "uid", parse_number(header[108:116])),
            gid=pax_integer(pax, "gid", parse_number(header[116:124])),
            size=size if is_file else 0,
            mtime_nanoseconds=parse_time(pax["mtime"]) if "mtime" in pax else parse_number(header[136:148]) * 10**9,
            link=pax.get("linkpath") or header[157:257].split(b"\0", 1)[0],
            xattrs={
                key.removeprefix(XATTR_PREFIX): value for key, value in pax.items() if key.startswith(XATTR_PREFIX)
            },
        )


def ustar_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    # GNU archives have other fields where ustar has the prefix.
    prefix = header[345:500].split(b"\0", 1)[0] if header[257:263] == b"ustar\0" else b""
    return prefix + b"/" + name if prefix else name


def parse_number(text: bytes) -> int:
    """An octal number or, with the first bit set, a binary one."""
    if text[0] & 0x80:
        value = int.from_bytes(text, "big", signed=False) & ((1 << (8 * len(text) - 1)) - 1)
        return value - (1 << (8 * len(text) - 1)) if text[0] & 0x40 else value
    digits = text.split(b"\0", 1)[0].strip()
    try:
        return int(digits, 8) if digits else 0
    except ValueError as error:
        raise damaged("a number in a header is not octal") from error


def parse_pax(text: bytes) -> dict[str, bytes]:
    """The records `LENGTH KEY=VALUE\\n` of a pax header."""
    records: dict[str, bytes] = {}
    start = 0
    while start < len(text):
        # A slice of each record only: cutting records off the text takes a time that grows with its square.
        match = PAX_LENGTH.match(text, start)
        end = start + int(match[1]) if match is not None else 0
        if match is None or not match.end() < end <= len(text):
            raise damaged("a pax header cannot be read")
        key, equals, value = text[match.end() : end].partition(b"=")
        if not equals or not value.endswith(b"\n"):
            raise damaged("a pax header cannot be read")
        records[key.decode("utf-8", "surrogateescape")] = value[:-1]
        start = end
    return records


def pax_integer(pax: Mapping[str, bytes], key: str, default: int) -> int:
    if key not in pax:
        return default
    if not pax[key].isdigit() or len(pax[key]) > 18:
        raise damaged(f"{key} of an entry is {pax[key][:20]!r}")
    return int(pax[key])


def parse_time(text: bytes) -> int:
    """Nanoseconds from a decimal number of seconds."""
    seconds, _, fraction = text.partition(b".")
    try:
        whole = int(seconds or b"0") * 10**9
        part = int(fraction[:9].ljust(9, b"0"))
    except ValueError as error:
        raise damaged(f"the time of an entry is {text[:30]!r}") from error
    return whole - part if seconds.startswith(b"-") else whole + part


def damaged(reason: str) -> ImageError:
    return ImageError(f"the archive is damaged: {reason}", hint=HINT)
