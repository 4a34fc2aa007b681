"""Rollouts of the loop: what the model is told, how they end, what is kept."""

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Role
from paddock.capture.upstream import Upstream
from paddock.errors import EnvironmentFailure
from paddock.limits import Budget, RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.loop.session import ToolResult
from paddock.store import Store
from paddock.store.outcome import Outcome, Reward
from paddock.store.record import RolloutRecord
from rollouts.loop.fake_session import PIXEL, FakeSession, a_rollout, hang, played, turns
from rollouts.played import run

SAYS = {"tool": "say", "arguments": {"word": "hello"}}
DONE = {"text": "Done."}


def rolled(folder: Path, scene: FakeSession, *script: dict[str, Any], **options: Any) -> RolloutRecord:
    extras = {name: options.pop(name) for name in ("faults", "max_context") if name in options}
    record, _, store = run(played(folder, scene, turns(*script, **extras), **options))
    store.close()
    return record


def test_the_model_gets_the_result_of_its_call(tmp_path: Path) -> None:
    scene = FakeSession()
    record, server, store = run(played(tmp_path, scene, turns(SAYS, DONE)))
    with closing(store):
        assert (record.outcome, record.reward, scene.story) == (Outcome.OK, 1.0, ["open", "score", "close"])
        assert [message["role"] for message in record.transcript] == [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
        ]
        assert server.log[1].request["messages"][-1]["content"] == "heard hello"
        assert (record.agent, record.sandbox, record.task_id) == ("loop", "fake", "do-it")
        assert list(record.stages) == ["provision", "tools", "agent", "verifier"]
        assert record.metadata["place"] == "stage 1"
        assert "so" in record.verifier_stdout
        stored = store.get(record.rollout_id)
        assert stored is not None
        assert (stored.outcome, stored.reward, stored.transcript) == (
            record.outcome,
            record.reward,
            record.transcript,
        )


def test_every_token_is_captured_and_each_call_continues_the_one_before(tmp_path: Path) -> None:
    record, server, store = run(played(tmp_path, FakeSession(), turns(SAYS, {**SAYS, "thinking": "Again."}, DONE)))
    with closing(store):
        calls = store.calls(record.rollout_id)
    assert [call.completion_token_ids for call in calls] == [served.sampled_ids for served in server.log]
    assert [call.parent for call in calls] == [None, "c0", "c1"]
    assert [call.shared_tokens for call in calls[1:]] == [
        len(call.prompt_token_ids) + len(call.completion_token_ids) for call in calls[:-1]
    ]
    assert all(call.trainable and call.role is Role.AGENT for call in calls)
    assert (record.trainable, record.level, record.call_count) == (True, "tokens", 3)


def test_several_calls_in_one_answer_are_done_in_their_order(tmp_path: Path) -> None:
    scene = FakeSession()
    several = {"tools": [{"tool": "say", "arguments": {"word": word}} for word in ("a", "b")]}
    record = rolled(tmp_path, scene, several, DONE)
    assert [arguments["word"] for _, arguments in scene.called] == ["a", "b"]
    reply = [message for message in record.transcript if message["role"] == "tool"]
    assert [message["content"] for message in reply] == ["heard a", "heard b"]
    request = [call["id"] for message in record.transcript for call in message.get("tool_calls", ())]
    assert [message["tool_call_id"] for message in reply] == request


def test_the_model_gets_an_error_for_an_unknown_tool(tmp_path: Path) -> None:
    scene = FakeSession()
    record = rolled(tmp_path, scene, {"tool": "fly"}, DONE)
    assert (record.outcome, scene.called) == (Outcome.OK, [])
    assert "no tool 'fly'" in record.transcript[3]["content"]


def test_images_reach_the_model_after_the_tool_messages(tmp_path: Path) -> None:
    async def look(_: dict[str, Any]) -> ToolResult:
        return ToolResult(({"type": "text", "text": "a picture"}, PIXEL))

    twice = {"tools": [{"tool": "look"}, {"tool": "say"}]}
    _, server, store = run(
        played(
            tmp_path, FakeSession(look=look, prompt=[{"type": "text", "text": "Look."}, PIXEL]), turns(twice, DONE)
        )
    )
    store.close()
    sent = server.log[1].request["messages"]
    assert [message["role"] for message in sent[-3:]] == ["tool", "tool", "user"]
    assert sent[-1]["content"] == [PIXEL]
    assert sent[-3]["content"].startswith("a picture")
    assert sent[1]["content"][1] == PIXEL


def test_a_long_result_keeps_its_beginning_and_its_end(tmp_path: Path) -> None:
    async def long(_: dict[str, Any]) -> ToolResult:
        return ToolResult.of_text("first " + "x" * 100_000 + " last")

    record = rolled(tmp_path, FakeSession(long=long), {"tool": "long"}, DONE)
    text = record.transcript[3]["content"]
    assert len(text) < 21_000
    assert text.startswith("first ")
    assert text.endswith(" last")


def test_a_place_that_is_done_ends_the_loop_at_once(tmp_path: Path) -> None:
    async def leave(_: dict[str, Any]) -> ToolResult:
        return ToolResult.of_text("bye", done=True)

    scene = FakeSession(leave=leave)
    record = rolled(tmp_path, scene, {"tools": [{"tool": "leave"}, {"tool": "say"}]}, DONE)
    assert (record.outcome, record.call_count, [name for name, _ in scene.called]) == (Outcome.OK, 1, ["leave"])


def test_steps_are_limited_and_the_work_still_counts(tmp_path: Path) -> None:
    scene = FakeSession()
    several = {"tools": [{"tool": "say"}, {"tool": "say"}]}
    record = rolled(tmp_path, scene, several, several, several, DONE, steps=3)
    assert (record.outcome, record.reward, len(scene.called)) == (Outcome.BUDGET, 3.0, 3)


def test_calls_are_limited_and_the_last_word_is_the_models(tmp_path: Path) -> None:
    record = rolled(tmp_path, FakeSession(), *[SAYS] * 5, budget=Budget(calls=2))
    assert (record.outcome, record.call_count, record.reward) == (Outcome.BUDGET, 2, 2.0)
    assert record.transcript[-1]["role"] == "tool"


def test_a_full_context_ends_the_loop_and_the_work_still_counts(tmp_path: Path) -> None:
    async def much(_: dict[str, Any]) -> ToolResult:
        return ToolResult.of_text("word " * 2000)

    record = rolled(tmp_path, FakeSession(much=much), {"tool": "much"}, DONE, max_context=2000)
    assert (record.outcome, record.reward) == (Outcome.BUDGET, 1.0)
    assert "context" in (record.error or "")


def test_a_tool_that_hangs_is_left_at_the_deadline(tmp_path: Path) -> None:
    scene = FakeSession(hang=hang)
    record = rolled(tmp_path, scene, {"tool": "hang"}, DONE, agent_timeout=0.5)
    assert (record.outcome, scene.story) == (Outcome.TIMEOUT, ["open", "score", "close"])
    assert record.stages["agent"] < 2


def test_a_model_that_hangs_is_left_at_the_deadline_and_to_blame(tmp_path: Path) -> None:
    record = rolled(tmp_path, FakeSession(), SAYS, DONE, agent_timeout=0.5, faults=[{"turn": 1, "hang": 30}])
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)
    assert record.stages["agent"] < 2


def test_failures_of_the_model_are_retried_unseen(tmp_path: Path) -> None:
    faults = [{"turn": 0, "status": 503}, {"turn": 1, "cut_after": 2}]
    record = rolled(tmp_path, FakeSession(), SAYS, DONE, faults=faults)
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)


def test_a_model_that_is_gone_is_to_blame(tmp_path: Path) -> None:
    record = rolled(tmp_path, FakeSession(), SAYS, DONE, faults=[{"turn": 1, "status": 401}])
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)


def test_a_request_that_is_refused_for_what_it_says_is_the_agents_fault(tmp_path: Path) -> None:
    record = rolled(
        tmp_path, FakeSession(), SAYS, DONE, faults=[{"turn": 1, "status": 422, "message": "a bad message"}]
    )
    assert record.outcome is Outcome.AGENT
    assert "a bad message" in (record.error or "")


@pytest.mark.parametrize("broken", ["open", "tools", "call_tool", "score"])
def test_a_broken_place_is_to_blame_and_is_closed(tmp_path: Path, broken: str) -> None:
    scene = FakeSession()

    async def fail(*_: Any) -> Any:
        raise EnvironmentFailure(f"{broken} broke")

    setattr(scene, broken, fail)
    record = rolled(tmp_path, scene, SAYS, DONE)
    assert (record.outcome, record.error, record.reward) == (Outcome.ENVIRONMENT, f"{broken} broke", None)
    assert scene.story[-1] == "close"


def test_a_place_that_does_not_open_in_time_is_to_blame(tmp_path: Path) -> None:
    scene = FakeSession()

    async def forever() -> None:
        await asyncio.Event().wait()

    scene.open = forever  # type: ignore[method-assign]
    record = rolled(tmp_path, scene, DONE, timeouts=RolloutTimeouts(install=0.2))
    assert (record.outcome, scene.story) == (Outcome.ENVIRONMENT, ["close"])


def test_an_unknown_grade_is_no_zero(tmp_path: Path) -> None:
    record = rolled(tmp_path, FakeSession(reward=Reward.unknown("the judge was away")), SAYS, DONE)
    assert (record.outcome, record.reward, record.reward_reason) == (Outcome.VERIFIER, None, "the judge was away")


@pytest.mark.parametrize("how", ["cancel", "abort"])
def test_stopping_it_is_immediate_and_recorded(tmp_path: Path, how: str) -> None:
    scene = FakeSession(hang=hang)

    async def stopped() -> tuple[RolloutRecord, float]:
        async with Upstream() as upstream, ReplayServer(turns({"tool": "hang"}, DONE)) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            rollout = a_rollout(scene, store, upstream, endpoint)
            work = asyncio.create_task(rollout.run())
            while not scene.called:
                await asyncio.sleep(0.01)
            began = asyncio.get_running_loop().time()
            if how == "abort":
                await rollout.abort("no longer wanted")
            else:
                work.cancel()
            await asyncio.wait([work])
            assert work.cancelled() is (how == "cancel")
            return rollout.record, asyncio.get_running_loop().time() - began

    with closing(Store.open(tmp_path)) as store:
        record, seconds = run(stopped())
        stored = store.get(record.rollout_id)
    assert stored is not None
    assert (stored.outcome, scene.story) == (Outcome.CANCELLED, ["open", "close"])
    assert seconds < 2


def test_a_pause_longer_than_the_agents_time_does_not_end_the_loop(tmp_path: Path) -> None:
    async def body() -> RolloutRecord:
        limits = RolloutTimeouts(install=5, setup=5, agent=2, verifier=5, model_call=2)
        with closing(Store.open(tmp_path)) as store:
            async with Upstream() as upstream, ReplayServer(turns(SAYS, DONE)) as server:
                endpoint = Endpoint(server.url, "replay", engine="vllm")
                rollout = a_rollout(FakeSession(), store, upstream, endpoint, timeouts=limits)
                await rollout.context.gate.pause()
                running = asyncio.create_task(rollout.run())
                while rollout.record.stage != "paused":
                    await asyncio.sleep(0.01)
                await asyncio.sleep(2.5)
                rollout.context.gate.resume()
                return await running

    record = run(body())
    assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 1.0, 2)
    assert record.pauses["seconds"] >= 2.5
