"""Estimates how long a local model needs for the first prompt of an agent, and names an agent with a shorter one.

Agent programs send thousands of tokens of instructions with their first call. A processor reads some hundred of them
per second, and a small model has a small context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paddock.agents import AGENTS, find_agent
from paddock.capture.errors import UpstreamFailure
from paddock.models.local import CONTEXT_TOKENS

if TYPE_CHECKING:
    from paddock.agents.base import AgentBase
    from paddock.capture.upstream import Upstream
    from paddock.models.endpoint import Endpoint

PROBE_WORDS = 192
"""Long enough that the rate is that of a real prompt, short enough to be read in a second or two."""
NOTED_SECONDS = 5.0
"""A shorter wait is not worth a line."""
TASK_TOKENS = 1024
"""Kept free for the task and the first answers, when a prompt is compared with the context."""


async def warn_of_long_prompt(agent: AgentBase, endpoint: Endpoint, upstream: Upstream) -> str | None:
    """A line for the user, or None if the model is not local, or reads the first prompt of this agent soon."""
    if not agent.prompt_tokens or not is_local(endpoint):
        return None
    advice = suggest_shorter(agent)
    size = f"the first prompt of {agent.name} has about {agent.prompt_tokens:,} tokens"
    if agent.prompt_tokens + TASK_TOKENS > CONTEXT_TOKENS:
        return f"warning: {size}, and a local model reads {CONTEXT_TOKENS:,} at most. {advice}"
    rate = await measure_rate(endpoint, upstream)
    if rate is None or (seconds := agent.prompt_tokens / rate) < NOTED_SECONDS:
        return None
    return f"{size}: about {seconds:.0f} s until its first answer on this machine. {advice}"


def is_local(endpoint: Endpoint) -> bool:
    return (endpoint.label or "").partition(":")[0] == "local"


async def measure_rate(endpoint: Endpoint, upstream: Upstream) -> float | None:
    """Tokens of a prompt that the model reads in a second. None if it does not say: the first call will show why."""
    document = {"prompt": "word " * PROBE_WORDS, "n_predict": 1, "cache_prompt": False}
    try:
        answer = await upstream.post_to_root(endpoint, "/completion", document)
    except UpstreamFailure:
        return None
    rate = (answer.get("timings") or {}).get("prompt_per_second")
    return float(rate) if isinstance(rate, int | float) and rate > 0 else None


def suggest_shorter(agent: AgentBase) -> str:
    others = [each for each in map(find_agent, AGENTS) if each.prompt_tokens]
    shortest = min(others, key=lambda each: each.prompt_tokens)
    if shortest.name == agent.name:
        return "Other agents send more."
    return f"--agent {shortest.name} sends about {shortest.prompt_tokens:,}."
