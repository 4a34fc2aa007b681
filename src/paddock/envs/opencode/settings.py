"""What the operator of the server decides, read from environment variables in this one place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_ROLLOUTS = 1024


@dataclass(frozen=True, slots=True)
class Settings:
    store: str | None = None
    """The store's folder. None: the usual one."""
    sandbox: str = "bwrap"
    consent: bool = False
    """Whether a sandbox that does not isolate may be used."""
    max_rollouts: int = 4
    """Rollouts at a time; more of them wait."""


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """`PADDOCK_STORE`, `PADDOCK_SANDBOX`, `PADDOCK_UNSAFE` and `PADDOCK_MAX_ROLLOUTS`. Raises ConfigError."""
    source = os.environ if environ is None else environ
    count = source.get("PADDOCK_MAX_ROLLOUTS") or "4"
    if not (count.isascii() and count.isdigit() and 1 <= int(count) <= MOST_ROLLOUTS):
        raise ConfigError(f"PADDOCK_MAX_ROLLOUTS is {count!r}", hint=f"give a whole number from 1 to {MOST_ROLLOUTS}")
    unsafe = source.get("PADDOCK_UNSAFE") or "0"
    if unsafe not in ("0", "1"):
        raise ConfigError(f"PADDOCK_UNSAFE is {unsafe!r}", hint="1 allows a sandbox that does not isolate")
    return Settings(
        store=source.get("PADDOCK_STORE") or None,
        sandbox=source.get("PADDOCK_SANDBOX") or "bwrap",
        consent=unsafe == "1",
        max_rollouts=int(count),
    )
