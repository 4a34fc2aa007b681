"""Exports: rollouts in the forms that trainers read, each a pure function of what the store holds.

Every module of this package is one form, except the shared ones; it defines a `FORM`. `samples` turns the calls of a
rollout into training sequences, `policy` decides what may be trained on, `shared_calls` which of several forks trains
on what they share, and `stream` writes whole stores to files.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import orjson

from paddock.errors import ConfigError
from paddock.export.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from paddock.capture.trace import Call
    from paddock.store.record import RolloutRecord

    Document = dict[str, Any]
    TreeExport = Callable[[Sequence[tuple[RolloutRecord, Sequence[Call]]], Policy, str], Iterator[Document]]

SHARED_MODULES = ("checks", "conversation", "policy", "samples", "shared_calls", "stream", "trees")
FORMS = tuple(module.name for module in pkgutil.iter_modules(__path__) if module.name not in SHARED_MODULES)
"""The names of all forms."""
FLAGGED = Policy(unscored="flag")


class RolloutWriter(Protocol):
    """Writes rollouts to a file of the form's own type."""

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        """Write a rollout; returns its number of documents, and the number of tokens that count for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form. Its documents are JSON objects, written one per line unless it has a writer of its own."""

    summary: str
    """What a document is, in a few words, for `paddock trace export --help`."""
    export: Callable[[RolloutRecord, Sequence[Call], Policy], Iterator[Document]]
    """The documents of one rollout; none if the policy lets nothing of it through."""
    find_problems: Callable[[Document], Iterator[str]]
    """What is wrong with a document, by our own rules."""
    package: str | None = None
    """The package that `validate` imports."""
    validate: Callable[[Document], object] | None = None
    """Pass a document to the trainer's package: raises if the package rejects it, ImportError if it is missing."""
    needs_whole_calls: bool = False
    """Whether `export` reads requests, messages and the texts of tokens. Token ids and logprobs are always there."""
    is_for_training: bool = True
    """Whether the policy applies."""
    suffix: str = "jsonl"
    """The suffix of its files."""
    open_writer: Callable[[Path, Policy], AbstractContextManager[RolloutWriter]] | None = None
    """For a form that is not lines of JSON."""
    export_tree: (
        Callable[[Sequence[tuple[RolloutRecord, Sequence[Call]]], Policy, str], Iterator[Document]] | None
    ) = None
    """For a form that can have a rollout and its forks in one document: those of a tree, whose id comes last."""
    find_tree_problems: Callable[[Document], Iterator[str]] | None = None


def load_form(name: str) -> Form:
    """Import a form. Raises ConfigError if there is no such form."""
    if name not in FORMS:
        raise ConfigError(f"there is no form {name!r}", hint=f"use {', '.join(FORMS)}")
    form: Form = importlib.import_module(f"{__name__}.{name}").FORM
    return form


def export_rollout(
    form: str, record: RolloutRecord, calls: Sequence[Call], policy: Policy = FLAGGED
) -> Iterator[bytes]:
    """The lines of one rollout. A form may have none for a rollout that it cannot use."""
    for document in load_form(form).export(record, calls, policy):
        yield orjson.dumps(document)
