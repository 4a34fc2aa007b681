"""What the guest and its owner both know about files: the home folder, and the description of an entry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

HOME = PurePosixPath("/home/user")


@dataclass(frozen=True, slots=True)
class Entry:
    """One file, folder or link below a listed folder."""

    path: str
    """Relative to the listed folder."""
    kind: str
    """`file`, `folder`, `link` or `other`."""
    size: int
    mode: int
