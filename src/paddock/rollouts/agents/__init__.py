"""Drivers for agent programs, by name; each is imported when it is chosen."""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from paddock.rollouts.agents.base import Agent

AGENTS = {
    "opencode": "paddock.rollouts.agents.opencode:OpenCode",
    "command": "paddock.rollouts.agents.command:CommandAgent",
}


def load_agent(spec: str, *, driver: str | None = None) -> Agent:
    """The driver that `spec` names: a name, or `command:PROGRAM ARGUMENTS`."""
    name, _, rest = spec.partition(":")
    if name not in AGENTS:
        close = difflib.get_close_matches(name, AGENTS, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"no agent is called {name!r}", hint=f"{meant}agents: {', '.join(AGENTS)}")
    module, _, attribute = AGENTS[name].partition(":")
    found: type[Agent] = getattr(importlib.import_module(module), attribute)
    chosen = driver or found.drivers[0]
    if chosen not in found.drivers:
        raise ConfigError(f"{name} has no driver {chosen!r}", hint=f"use {' or '.join(found.drivers)}")
    if name == "command":
        return found(rest)  # type: ignore[call-arg]
    if rest:
        raise ConfigError(f"agent {name!r} takes nothing after the colon", hint=f"write --agent {name}")
    return found(driver=chosen)  # type: ignore[call-arg]
