"""Rollouts in the forms that trainers read: pure functions of what the store holds, one small file each."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import orjson

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

FORMS = {
    "jsonl": "paddock.rollouts.export.jsonl",
    "openenv": "paddock.rollouts.export.openenv",
    "replay": "paddock.rollouts.export.replay",
}


def export_rollout(form: str, record: RolloutRecord, calls: Sequence[Call]) -> Iterator[bytes]:
    """The lines of one rollout. A form may have none for a rollout that it cannot use."""
    if form not in FORMS:
        raise ConfigError(f"there is no form {form!r}", hint=f"use {', '.join(FORMS)}")
    for document in importlib.import_module(FORMS[form]).export(record, calls):
        yield orjson.dumps(document)
