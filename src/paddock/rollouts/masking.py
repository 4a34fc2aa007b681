"""Known secrets taken out of whatever is about to be kept."""

from __future__ import annotations

from typing import Any, TypeVar

MASK = "***"
ValueT = TypeVar("ValueT", bound=Any)


def mask(value: ValueT, secrets: tuple[str, ...]) -> ValueT:
    """`value` with every secret in its strings replaced; lists and objects are gone through."""
    known = tuple(secret for secret in secrets if secret)
    return _mask(value, known) if known else value


def _mask(value: Any, secrets: tuple[str, ...]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            if secret in value:
                value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {_mask(key, secrets): _mask(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item, secrets) for item in value]
    return value
