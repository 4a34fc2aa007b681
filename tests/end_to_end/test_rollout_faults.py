"""Models that break in every way: who is blamed, what is kept, and that nothing half is trained on."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from paddock.agents import load_agent
from paddock.agents.base import Agent
from paddock.capture.trace import Call
from paddock.limits import Budget, RolloutTimeouts, SandboxLimits
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer, ServedRequest
from paddock.rollouts.api import run_rollout
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from rollouts.played import a_task, needs_bwrap, own_children, run, speaker

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(90, func_only=True), needs_bwrap]

WORK = [
    {"tool": "bash", "arguments": {"command": "echo 42 > answer.txt"}},
    {"tool": "bash", "arguments": {"command": "cat answer.txt"}},
    {"text": "The answer is in answer.txt, as it should be."},
]
ASKS_AGAIN = "sys.exit(converse(tries=2))"
LATE = {"cut_after": 4, "per_token_delay": 0.03}
"""Slow enough that the agent has the first tokens when the stream breaks."""
UNARY = "sys.exit(converse(stream=False))"


@dataclass(frozen=True)
class Case:
    """A fault, and what must come of it."""

    faults: list[dict[str, Any]]
    outcome: Outcome = Outcome.OK
    reward: float | None = 1.0
    agent: str = "sys.exit(converse())"
    options: dict[str, Any] = field(default_factory=dict)
    seconds: float = 20.0
    """For one model call."""
    budget: Budget = field(default_factory=Budget)


@dataclass
class Story:
    record: RolloutRecord
    calls: list[Call]
    log: list[ServedRequest]


CASES = {
    "429": Case([{"turn": 1, "status": 429}]),
    "429 with a time": Case([{"turn": 1, "status": 429, "retry_after": 1.2}]),
    "429 with a time that nobody waits for": Case(
        [{"turn": 1, "status": 429, "retry_after": 9999, "times": 9}], Outcome.MODEL, None, seconds=3
    ),
    "500 twice": Case([{"turn": 1, "status": 500, "times": 2}]),
    "500 for ever": Case([{"turn": 1, "status": 500, "times": 99}], Outcome.MODEL, None),
    "503 for ever, first": Case([{"status": 503, "times": 99}], Outcome.MODEL, None),
    "401": Case([{"status": 401, "times": 99}], Outcome.MODEL, None),
    "cut": Case([{"turn": 1, "cut_after": 3}], Outcome.MODEL, None),
    "cut, asked again": Case([{"turn": 1, "cut_after": 3}], agent=ASKS_AGAIN),
    "cut before the first token, asked again": Case([{"turn": 1, "cut_after": 0}], agent=ASKS_AGAIN),
    "cut without streaming": Case([{"turn": 1, "cut_after": 3}], agent=UNARY),
    "an error before the agent has heard anything": Case([{"turn": 1, "error_chunk": "boom", "cut_after": 0}]),
    "an error in the stream": Case([{"turn": 1, "error_chunk": "boom", **LATE}], Outcome.MODEL, None),
    "an error in the stream, asked again": Case([{"turn": 1, "error_chunk": "boom", **LATE}], agent=ASKS_AGAIN),
    "silence": Case([{"turn": 1, "hang": 30}], Outcome.MODEL, None, seconds=1.5),
    "silence in the middle": Case([{"turn": 1, "per_token_delay": 30}], Outcome.MODEL, None, seconds=1.5),
    "no JSON": Case([{"turn": 1, "malformed": True}]),
    "no JSON without streaming": Case([{"turn": 1, "malformed": True}], agent=UNARY),
    "a closed socket": Case([{"turn": 1, "close": True, "times": 2}]),
    "a closed socket for ever": Case([{"close": True, "times": 99}], Outcome.MODEL, None),
    "slow tokens": Case([{"per_token_delay": 0.01}]),
    "a slow first token": Case([{"delay": 0.5}]),
    "too long a prompt": Case([], Outcome.MODEL, None, options={"max_context": 60}),
    "a call cut short": Case([], Outcome.OK, 0.0, budget=Budget(max_tokens_per_call=6, calls=8)),
}


def is_whole(served: ServedRequest) -> bool:
    slowed = served.fault is None or not served.fault.breaks
    return served.status == 200 and slowed and not served.aborted


async def play(store: Store, case: Case) -> Story:
    script = {"turns": WORK, "faults": case.faults, **case.options}
    async with ReplayServer(script) as server:
        timeouts = RolloutTimeouts(agent=40, verifier=10, model_call=case.seconds)
        endpoint = Endpoint(server.url, "replay", engine="vllm")
        options: dict[str, Any] = {"agent": speaker(case.agent), "budget": case.budget, "retries": 0}
        record = await run_rollout(a_task(timeouts=timeouts), model=endpoint, store=store, **options)
        return Story(record, store.calls(record.rollout_id), list(server.log))


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    """All of them at the same time: most of it is waiting."""
    with Store.open(tmp_path_factory.mktemp("faults") / "store") as store:

        async def play_all() -> dict[str, Story]:
            return dict(
                zip(CASES, await asyncio.gather(*(play(store, case) for case in CASES.values())), strict=True)
            )

        reply = run(play_all(), 80)
        assert own_children() == []
        assert store.count(finished=False) == 0
        yield reply


@pytest.mark.parametrize("name", CASES)
def test_a_fault_has_one_outcome(stories: dict[str, Story], name: str) -> None:
    record, case = stories[name].record, CASES[name]
    assert record.outcome is case.outcome, (record.outcome, record.error)
    if case.reward is not None or not case.outcome.keeps_reward:
        assert record.reward == case.reward


@pytest.mark.parametrize("name", CASES)
def test_what_was_captured_is_what_was_sent_token_by_token(stories: dict[str, Story], name: str) -> None:
    """Each call has its attempts in the server's log, in order; the last of them is what was kept."""
    story = stories[name]
    log = iter(story.log)
    for call in story.calls:
        tried = [next(log) for _ in range(len(call.attempts) + 1)]
        last = tried[-1]
        if is_whole(last):
            assert call.ok
            assert call.completion_token_ids == last.sampled_ids
            assert call.logprobs == pytest.approx(last.logprobs)
        else:
            assert call.completion_token_ids == last.sampled_ids[: len(call.completion_token_ids)]
        if call.ok:
            assert call.prompt_token_ids == last.prompt_ids
    assert next(log, None) is None


@pytest.mark.parametrize("name", CASES)
def test_no_half_answer_can_be_trained_on(stories: dict[str, Story], name: str) -> None:
    story = stories[name]
    whole = {tuple(served.sampled_ids) for served in story.log if is_whole(served)}
    for call in story.calls:
        if call.trainable:
            assert tuple(call.completion_token_ids) in whole
            assert call.finish_reason is not None
        else:
            assert call.untrainable_because
    assert story.record.trainable_calls == sum(call.trainable for call in story.calls)
    assert story.record.call_count == len(story.calls)
    assert not (story.record.trainable and story.record.reward is None)


def test_attempts_are_listed_with_their_status(stories: dict[str, Story]) -> None:
    reply = {
        name: [[each["status"] for each in call.attempts] for call in story.calls] for name, story in stories.items()
    }
    assert reply["429"] == [[], [429], []]
    assert reply["500 twice"] == [[], [500, 500], []]
    assert reply["500 for ever"] == [[], [500, 500, 500]]
    assert reply["401"] == [[]]
    assert len(reply["an error before the agent has heard anything"][1]) == 1
    assert len(reply["a closed socket"][1]) == 2
    assert len(reply["no JSON"][1]) == 1


def test_a_time_to_wait_is_kept_to(stories: dict[str, Story]) -> None:
    call = stories["429 with a time"].calls[1]
    assert call.attempts[0]["ended"] + 1.2 <= (call.ended or 0.0)
    assert call.ok


def test_an_answer_that_was_asked_for_again_is_marked(stories: dict[str, Story]) -> None:
    for name in ("cut, asked again", "an error in the stream, asked again"):
        roles = [(call.role, call.trainable) for call in stories[name].calls]
        assert roles == [("agent", True), ("retried", False), ("agent", True), ("agent", True)], name


def test_a_call_that_took_too_long_is_aborted(stories: dict[str, Story]) -> None:
    for name in ("silence", "silence in the middle"):
        last = stories[name].calls[-1]
        assert (last.aborted, last.ok, last.trainable) == (True, False, False), name
        assert stories[name].log[-1].aborted, name
        assert (last.ended or 0.0) - last.started < 8


def test_a_prompt_that_is_too_long_is_nobodys_breakdown(stories: dict[str, Story]) -> None:
    story = stories["too long a prompt"]
    assert story.calls[-1].status == 400
    assert story.calls[-1].error is not None
    assert "context" in story.calls[-1].error


def test_a_tool_call_that_was_cut_short_is_kept_as_it_was_sampled(stories: dict[str, Story]) -> None:
    first = stories["a call cut short"].calls[0]
    assert (first.finish_reason, len(first.completion_token_ids), first.trainable) == ("length", 6, True)
    with pytest.raises(json.JSONDecodeError):
        json.loads(first.message["tool_calls"][0]["function"]["arguments"])


# -- with real OpenCode -------------------------------------------------------------------------------

FOR_EVER = {"times": 10**6}
REAL = {
    "429": ([{"turn": 1, "status": 429}], Outcome.OK, 1.0),
    "cut": ([{"turn": 1, "cut_after": 3}], Outcome.OK, 1.0),
    "500 for ever": ([{"turn": 1, "status": 500, "times": 99}], Outcome.MODEL, None),
    "closed": ([{"turn": 1, "close": True}], Outcome.OK, 1.0),
    "never answers": ([{"hang": 600, **FOR_EVER}], Outcome.MODEL, None),
    "429 for ever": ([{"status": 429, "retry_after": 1, **FOR_EVER}], Outcome.MODEL, None),
    "stalls for ever": ([{"turn": 1, "stall_after": 3, **FOR_EVER}], Outcome.MODEL, None),
    "cut for ever": ([{"turn": 1, "cut_after": 3, **FOR_EVER}], Outcome.MODEL, None),
    "malformed for ever": ([{"turn": 1, "malformed": True, "cut_after": 3, **FOR_EVER}], Outcome.MODEL, None),
    "400 for ever": ([{"status": 400, **FOR_EVER}], Outcome.MODEL, None),
    "slow but steady": ([{"turn": 2, "per_token_delay": 6.0}], Outcome.TIMEOUT, 1.0),
}
"""With `REAL_SECONDS` for the agent, which needs 8 s of processor time for itself."""
REAL_SECONDS = 40


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Story]]:
    few = asyncio.Semaphore(3)

    async def play_real(store: Store, agent: Agent, faults: list[dict[str, Any]]) -> Story:
        turns = [
            {"tool": "bash", "arguments": {**turn["arguments"], "description": "do it"}} if "tool" in turn else turn
            for turn in WORK
        ]
        async with ReplayServer({"turns": turns, "faults": faults}) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            task = a_task(timeouts=RolloutTimeouts(agent=REAL_SECONDS, verifier=20), sandbox=SandboxLimits())
            async with few:
                record = await run_rollout(task, model=endpoint, agent=agent, store=store, retries=0)
            return Story(record, store.calls(record.rollout_id), list(server.log))

    with Store.open(tmp_path_factory.mktemp("real") / "store") as store:

        async def play_all() -> dict[str, Story]:
            agent = load_agent("opencode")
            played = await asyncio.gather(*(play_real(store, agent, faults) for faults, _, _ in REAL.values()))
            return dict(zip(REAL, played, strict=True))

        yield run(play_all(), 220)


@pytest.mark.parametrize("name", REAL)
def test_real_opencode_survives_or_the_model_is_blamed(real: dict[str, Story], name: str) -> None:
    story, (_, outcome, reward) = real[name], REAL[name]
    assert (story.record.outcome, story.record.reward) == (outcome, reward), story.record.error
    for call in story.calls:
        if call.trainable:
            assert any(served.sampled_ids == call.completion_token_ids and is_whole(served) for served in story.log)
    if outcome is Outcome.OK:
        assert [call.completion_token_ids for call in story.calls if call.trainable] == [
            served.sampled_ids for served in story.log if is_whole(served)
        ]
