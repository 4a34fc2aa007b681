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
    "codex": "paddock.rollouts.agents.codex:Codex",
    "claude-code": "paddock.rollouts.agents.claude_code:ClaudeCode",
    "gemini-cli": "paddock.rollouts.agents.gemini_cli:GeminiCli",
    "qwen-code": "paddock.rollouts.agents.qwen_code:QwenCode",
    "mini-swe-agent": "paddock.rollouts.agents.mini_swe_agent:MiniSweAgent",
    "pi": "paddock.rollouts.agents.pi:Pi",
    "loop": "paddock.rollouts.loop.agent:LoopAgent",
    "command": "paddock.rollouts.agents.command:CommandAgent",
}


def load_agent(spec: str, *, driver: str | None = None) -> Agent:
    """The driver that `spec` names: a name, or `command:PROGRAM ARGUMENTS`."""
    name, _, rest = spec.partition(":")
    found = find_agent(name)
    chosen = driver or found.drivers[0]
    if chosen not in found.drivers:
        raise ConfigError(f"{name} has no driver {chosen!r}", hint=f"use {' or '.join(found.drivers)}")
    if name == "command":
        return found(rest)  # type: ignore[call-arg]
    if rest:
        raise ConfigError(f"agent {name!r} takes nothing after the colon", hint=f"write --agent {name}")
    return found(driver=chosen)


def find_agent(name: str) -> type[Agent]:
    """The class of that name. Raises ConfigError if there is none."""
    if name not in AGENTS:
        close = difflib.get_close_matches(name, AGENTS, 1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise ConfigError(f"no agent is called {name!r}", hint=f"{meant}agents: {', '.join(AGENTS)}")
    module, _, attribute = AGENTS[name].partition(":")
    found: type[Agent] = getattr(importlib.import_module(module), attribute)
    return found
