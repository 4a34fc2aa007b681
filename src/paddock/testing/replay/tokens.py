"""A toy tokenizer: reversible, deterministic, and without a vocabulary file.

Ids 0 to 255 are bytes, the ids of `Marker` are the marks of the chat template, and every run of two
to four letters of `[ a-z]` has an id of its own that is computed, both ways, in base 27. It knows
nothing about chats or scripts.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable


class Marker:
    """Ids that text never encodes to: a user who writes `<|end|>` gets the bytes of it."""

    BEGIN: Final = 256
    TOOLS: Final = 257
    SYSTEM: Final = 258
    USER: Final = 259
    ASSISTANT: Final = 260
    RESULT: Final = 261
    END: Final = 262
    THINK: Final = 263
    THOUGHT: Final = 264
    CALL: Final = 265
    ARGUMENTS: Final = 266
    CALLED: Final = 267


MARKER_TEXT: dict[int, str] = {value: f"<|{name.lower()}|>" for name, value in vars(Marker).items() if name.isupper()}

LETTERS = " abcdefghijklmnopqrstuvwxyz"
BASE = len(LETTERS)
FIRST_RUN = {2: 300, 3: 300 + BASE**2, 4: 300 + BASE**2 + BASE**3}
"""The id of the first run of each length."""
VOCABULARY = FIRST_RUN[4] + BASE**4

_PIECES = re.compile(rb"(?s)[ a-z]{2,4}|.")
_MARKERS = re.compile("(" + "|".join(map(re.escape, MARKER_TEXT.values())) + ")")
_MARKER_IDS = {text: token for token, text in MARKER_TEXT.items()}


class _Ids(dict[bytes, int]):
    """Pieces met so far. Each is computed once."""

    def __missing__(self, piece: bytes) -> int:
        value = piece[0]
        if len(piece) > 1:
            value = 0
            for letter in piece:
                value = value * BASE + LETTERS.index(chr(letter))
            value += FIRST_RUN[len(piece)]
        self[piece] = value
        return value


_IDS = _Ids()


@lru_cache(maxsize=1024)
def encode(text: str) -> tuple[int, ...]:
    """The ids of plain text; markers written out in it are only bytes."""
    # A conversation repeats its history with every request, so whole messages are met again and again.
    return tuple(map(_IDS.__getitem__, _PIECES.findall(text.encode("utf-8", "surrogatepass"))))


def encode_with_markers(text: str) -> list[int]:
    """The ids of text in which written-out markers are markers, as an engine's `/tokenize` takes it."""
    ids: list[int] = []
    for part in _MARKERS.split(text):
        marker = _MARKER_IDS.get(part)
        if marker is None:
            ids.extend(encode(part))
        else:
            ids.append(marker)
    return ids


def piece(token: int) -> bytes:
    """What one id stands for; nothing for a marker."""
    if token < 256:
        return bytes((token,))
    if token < FIRST_RUN[2]:
        return b""
    length = 2 if token < FIRST_RUN[3] else 3 if token < FIRST_RUN[4] else 4
    value = token - FIRST_RUN[length]
    letters = []
    for _ in range(length):
        value, letter = divmod(value, BASE)
        letters.append(LETTERS[letter])
    return "".join(reversed(letters)).encode()


def decode(ids: Iterable[int]) -> str:
    """The text of ids, markers written out."""
    parts = (MARKER_TEXT[token].encode() if token in MARKER_TEXT else piece(token) for token in ids)
    return b"".join(parts).decode("utf-8", "surrogatepass")


def logprob(position: int, token: int, seed: int) -> float:
    """The logprob of a token at a position of the whole sequence: below 0, and full of digits."""
    mixed = (position * 0x9E3779B97F4A7C15 + token * 0xBF58476D1CE4E5B9 + seed * 0x94D049BB133111EB) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    # An odd number of 52 bits over a power of two: exact in a float, and 16 or 17 digits long when printed.
    return -(((mixed >> 12) | 1) / 2.0**50)


_MASK = 0xFFFFFFFFFFFFFFFF
