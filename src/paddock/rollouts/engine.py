"""Where the rollouts of a batch run: in this process, or wherever an engine places them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from paddock.rollouts.batch import Place
    from paddock.rollouts.recipe import Recipe

LOCAL = "local"
ENGINES = (LOCAL, "ray")


class Engine(Protocol):
    def opened(self, recipe: Recipe, log: Callable[[str], None]) -> AbstractAsyncContextManager[Place]:
        """What makes the rollouts of one batch, while it is entered."""


def find_engine(named: str | Engine) -> Engine | None:
    """The engine of that name, imported when it is asked for. None for `local`."""
    if not isinstance(named, str):
        return named
    if named not in ENGINES:
        raise ConfigError(f"there is no engine {named!r}", hint=f"use {' or '.join(ENGINES)}")
    if named == LOCAL:
        return None
    from paddock.scale.rollouts import RayEngine

    return RayEngine()
