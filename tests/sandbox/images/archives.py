"""Small archives, made in the tests."""

import gzip
import io
import tarfile
from dataclasses import dataclass
from typing import Any

import zstandard


@dataclass(frozen=True)
class Member:
    """One entry of an archive."""

    name: str
    content: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    mtime: int = 1_700_000_000
    pax: tuple[tuple[str, str], ...] = ()


def folder(name: str, **settings: Any) -> Member:
    return Member(name, kind=tarfile.DIRTYPE, **{"mode": 0o755, **settings})


def symlink(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.SYMTYPE, link=target)


def hard_link(name: str, target: str) -> Member:
    return Member(name, kind=tarfile.LNKTYPE, link=target)


def make_tar(*members: Member) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            info = tarfile.TarInfo(member.name)
            info.type, info.linkname, info.mode = member.kind, member.link, member.mode
            info.uid, info.gid, info.mtime, info.size = member.uid, member.gid, member.mtime, len(member.content)
            info.pax_headers = dict(member.pax)
            archive.addfile(info, io.BytesIO(member.content))
    return buffer.getvalue()


COMPRESSIONS = {
    "none": lambda data: data,
    "gzip": gzip.compress,
    "two gzip members": lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]),
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
    "two zstd frames": lambda data: zstandard.compress(data[:700]) + zstandard.compress(data[700:]),
}
