"""Checks that the fields of a config class have the types of their annotations.

Covers values of builtin types only: `n="4"`, `snapshots="no"`, `budget=5`. An object of any other class is accepted,
because the annotation may be a name that only type checkers import. A `Literal` is left to its config class, whose
error lists the values.
"""

from __future__ import annotations

import sys
from dataclasses import fields
from functools import cache
from typing import Any, Literal, get_origin

from paddock.errors import ConfigError

BUILTINS: dict[str, type] = {
    "None": type(None),
    **{kind.__name__: kind for kind in (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)},
}

COLLECTIONS = {list, tuple, set, frozenset}
"""A field for one of them accepts them all, but no text."""


def check_types(config: Any, *names: str) -> None:
    """Raises ConfigError for the first field with a value of a builtin type that its annotation does not name.

    `names` are the fields to check. Without any, all are."""
    builtins = frozenset(BUILTINS.values())
    for name, (annotation, allowed) in _named_types(config.__class__).items():
        kind = type(getattr(config, name))
        if kind in builtins and kind not in allowed and (not names or name in names):
            # The value is left out: it may be a secret.
            raise ConfigError(f"{name} has a value of type {kind.__name__}", hint=f"it takes {annotation}")


@cache
def _named_types(config_class: type[Any]) -> dict[str, tuple[str, frozenset[type]]]:
    """For each field that is no `Literal`: its annotation, and the builtin types that it names."""
    module = vars(sys.modules[config_class.__module__])
    types = {}
    for each in fields(config_class):
        names = str(each.type).split(" | ")
        allowed = {BUILTINS[name] for text in names if (name := text.partition("[")[0]) in BUILTINS}
        if float in allowed:
            allowed.add(int)
        if allowed & COLLECTIONS:
            allowed |= COLLECTIONS
        if not any(get_origin(module.get(name)) is Literal for name in names):
            types[each.name] = str(each.type), frozenset(allowed)
    return types
