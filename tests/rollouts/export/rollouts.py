"""Rollouts with known tokens, to be exported."""

from typing import Any

from paddock.rollouts.outcome import Outcome
from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.trace import Call, Level, Role

END = 9


def record(rollout_id: str = "r1", reward: float | None = 0.5, **more: Any) -> RolloutRecord:
    known: dict[str, Any] = {"outcome": Outcome.OK, "batch_id": "b1", "model": "policy", "finished_at": 5.0}
    return RolloutRecord(rollout_id, "t1", reward=reward, **{**known, **more})


def call(index: int, prompt: list[int], sampled: list[int], role: Role = Role.AGENT, **more: Any) -> Call:
    known: dict[str, Any] = {
        "logprobs": [-(0.25 + 0.125 * at) for at in range(len(sampled))],
        "message": {"role": "assistant", "content": f"said {index}"},
        "request": {"messages": [{"role": "user", "content": "hi"}], "model": "policy"},
        "forwarded": {"temperature": 1.0},
        "finish_reason": "stop",
        "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(sampled)},
        "level": Level.TOKENS,
        "status": 200,
        "started": 1000.0 + index,
        "ended": 1000.5 + index,
    }
    return Call(
        f"c{index}",
        index,
        role=role,
        prompt_token_ids=prompt,
        completion_token_ids=sampled,
        **{**known, **more},
    )


def conversation(count: int = 3, **more: Any) -> list[Call]:
    """Each prompt is the one before, its answer, and one token of a tool."""
    calls, prompt = [], [1, 2, 3]
    for index in range(count):
        sampled = [100 + index, 200 + index, END]
        calls.append(call(index, prompt, sampled, **more))
        prompt = [*prompt, *sampled, 60 + index]
    return calls


def forked() -> list[Call]:
    """A conversation, a subagent, an answer that was dropped, and a fork from the first call."""
    calls = conversation(3)
    return [
        *calls,
        call(3, [7, 7], [31, END], Role.SUBAGENT),
        call(4, [1, 2, 3, 100, 200, END, 77], [41, END], Role.RETRIED),
        call(5, [1, 2, 3, 100, 200, END, 77], [51, 52, END]),
        call(6, [8, 8], [61], Role.TITLE),
    ]
