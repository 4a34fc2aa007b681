"""Rollouts with fixed tokens, and their documents in a form."""

from typing import Any

from paddock.capture.trace import Call, Level, Role
from paddock.export import load_form
from paddock.export.policy import Policy
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

END = 9


def record(rollout_id: str = "r1", reward: float | None = 0.5, **more: Any) -> RolloutRecord:
    values: dict[str, Any] = {"outcome": Outcome.OK, "batch_id": "b1", "model": "policy", "finished_at": 5.0}
    return RolloutRecord(rollout_id, "t1", reward=reward, **{**values, **more})


def call(index: int, prompt: list[int], sampled: list[int], role: Role = Role.AGENT, **more: Any) -> Call:
    values: dict[str, Any] = {
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
        **{**values, **more},
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


def exported(form: str, calls: list[Call], policy: Policy | None = None, **values: Any) -> list[dict[str, Any]]:
    """The documents of a rollout with these calls; `values` are those of its record."""
    return list(load_form(form).export(record(**values), calls, policy or Policy()))


def problems(form: str, document: dict[str, Any]) -> list[str]:
    return list(load_form(form).find_problems(document))


def save(store: Store, about: RolloutRecord, calls: list[Call]) -> None:
    """Store a rollout; without an outcome it is still running."""
    outcome, about.outcome = about.outcome, None
    store.begin(about)
    for each in calls:
        store.save_call(about.rollout_id, each)
    if outcome is not None:
        about.outcome = outcome
        store.finish(about)
