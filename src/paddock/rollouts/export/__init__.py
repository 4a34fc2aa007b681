"""Rollouts in the forms that trainers read: pure functions of what the store holds, one small file each.

A form has `export`, which makes documents of one rollout; `complaints`, which says what is wrong with a document;
and `accept`, which hands a document to the trainer's own package and so lets that judge it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from paddock.errors import ConfigError
from paddock.rollouts.export.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.trace import Call

FORMS = {
    name: f"paddock.rollouts.export.{name}"
    for name in (
        *("jsonl", "openenv", "trl", "skyrl", "verl", "prime", "verifiers", "slime", "tinker", "atif", "parquet"),
        "replay",
    )
}
FLAGGED = Policy(unscored="flag")


class Form(Protocol):
    """What the module of a form has."""

    WHOLE: bool
    """Whether it needs whole calls: requests, messages, and the texts of tokens."""
    PACKAGE: str | None
    """The package that `accept` needs."""

    def export(self, record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
        """The documents of one rollout; none if there is nothing in it that the policy lets through."""

    def complaints(self, document: dict[str, Any]) -> Iterator[str]:
        """What is wrong with a document."""

    def accept(self, document: dict[str, Any]) -> None:
        """Raise if the trainer's package does not take it; ImportError if the package is not here."""


def load_form(name: str) -> Form:
    if name not in FORMS:
        raise ConfigError(f"there is no form {name!r}", hint=f"use {', '.join(FORMS)}")
    return cast("Form", importlib.import_module(FORMS[name]))


def export_rollout(
    form: str, record: RolloutRecord, calls: Sequence[Call], policy: Policy = FLAGGED
) -> Iterator[bytes]:
    """The lines of one rollout. A form may have none for a rollout that it cannot use."""
    for document in load_form(form).export(record, calls, policy):
        yield orjson.dumps(document)
