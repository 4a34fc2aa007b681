"""Drivers for agent programs, by name; each is imported when it is chosen.

Every module of this package is the driver of one agent, except the shared ones. The agent `claude-code` is the class
with that name in `claude_code.py`. A module with a leading underscore is a part of one driver.
"""

from __future__ import annotations

import difflib
import pkgutil

from paddock.agents.base import AgentBase
from paddock.errors import ConfigError
from paddock.loading import class_named

SHARED_MODULES = ("base", "equipment", "headless", "install")
AGENTS = {
    module.name.replace("_", "-"): f"{__name__}.{module.name}"
    for module in pkgutil.iter_modules(__path__)
    if module.name not in SHARED_MODULES and not module.name.startswith("_")
} | {"loop": "paddock.rollouts.loop.agent"}
"""The module of each agent."""


def load_agent(spec: str, *, driver: str | None = None) -> AgentBase:
    """The driver that `spec` names: `NAME` or `NAME:ARGUMENT`. Raises ConfigError."""
    name, _, argument = spec.partition(":")
    agent_class = find_agent(name)
    if driver is not None and driver not in agent_class.drivers:
        raise ConfigError(f"{name} has no driver {driver!r}", hint=f"use {' or '.join(agent_class.drivers)}")
    return agent_class.from_spec(argument, driver or agent_class.drivers[0])


def find_agent(name: str) -> type[AgentBase]:
    """The class of that name. Raises ConfigError if there is none."""
    if name not in AGENTS:
        close = difflib.get_close_matches(name, AGENTS, 1)
        suggestion = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"no agent is called {name!r}", hint=f"{suggestion}agents: {', '.join(AGENTS)}")
    agent_class: type[AgentBase] = class_named(AgentBase, AGENTS[name], name)
    return agent_class
