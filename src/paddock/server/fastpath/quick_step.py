"""Reads a frame that is a step, and nothing unusual, without parsing its envelope.

Most frames are steps, spelled in one of three ways: by OpenEnv's clients (with or without spaces), or by Paddock's
own, which append `timeout_s`, `id` and `ack`. Only the action between prefix and suffix is given to pydantic. JSON
values end where they end: if that part is a whole JSON value, so is the frame. Everything else is left to
`Wire.parse`, which accepts the same frames and also explains what is wrong with the others.

Measured gain, with `conversation`: 1.3 times the inline steps with 16 sessions and more.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from paddock.protocol.finite import find_nonfinite

COMPACT_PREFIX = b'{"type":"step","data":{'
SPACED_PREFIX = b'{"type": "step", "data": {'
COMPACT_BEGIN, SPACED_BEGIN = len(COMPACT_PREFIX) - 1, len(SPACED_PREFIX) - 1
_SUFFIX = re.compile(
    rb'\}(?:,"timeout_s":((?:0|[1-9]\d{0,8})(?:\.\d{1,9})?))?,"id":(0|[1-9]\d{0,14}),"ack":(0|[1-9]\d{0,14})\}\Z'
)
MAX_SUFFIX_BYTES = 96


class QuickStep(NamedTuple):
    action: Any
    number: int | None = None
    ack: int | None = None
    timeout: float | None = None


class QuickStepReader:
    """For one action type."""

    def __init__(self, action_type: Any) -> None:
        self._read_action = TypeAdapter(action_type).validator.validate_json

    def read(self, raw: bytes) -> QuickStep | None:
        """The step in a frame; None if `Wire.parse` has to look at it."""
        begin = COMPACT_BEGIN if raw.startswith(COMPACT_PREFIX) else SPACED_BEGIN
        if begin == SPACED_BEGIN and not raw.startswith(SPACED_PREFIX):
            return None
        if raw[-2:] == b"}}":
            suffix, end = None, len(raw) - 1
        else:
            suffix = _SUFFIX.search(raw, max(begin, len(raw) - MAX_SUFFIX_BYTES))
            if suffix is None:
                return None
            end = suffix.start() + 1
        try:
            action = self._read_action(raw[begin:end])
        except BaseException:
            # A validator may raise anything, even SystemExit. The long way explains it.
            return None
        if find_nonfinite(action) is not None:
            return None
        if suffix is None:
            return QuickStep(action)
        seconds, number, ack = suffix.groups()
        timeout = None if seconds is None else float(seconds)
        return None if timeout == 0 else QuickStep(action, int(number), int(ack), timeout)
