"""Whatever happens, each rollout that starts completes once with one reason, and no instance is left running."""

import asyncio
import contextlib
import gc
import random
import threading
from typing import Any

import pytest

from paddock.fleet import FleetTaskEnv, close_all
from paddock.fleet.client.errors import EpisodeState, PaddockError

from .episodes import EventRecorder, env_on, task
from .plane import COMPUTER, LabPlane, lab

FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "create 400": ("POST", "/v1/env/instances$", {"status": 400}),
    "create 502": ("POST", "/v1/env/instances$", {"status": 502}),
    "create lost": ("POST", "/v1/env/instances$", {"drop": True, "after": True}),
    "reset 500": ("POST", "/reset$", {"status": 500}),
    "list 502": ("POST", "mcp$", {"status": 502, "rpc": "tools/list"}),
    "list 401": ("POST", "mcp$", {"status": 401, "rpc": "tools/list", "times": -1}),
    "call lost": ("POST", "mcp$", {"drop": True, "after": True, "rpc": "tools/call"}),
    "call 500": ("POST", "mcp$", {"status": 500, "rpc": "tools/call"}),
    "verify 500": ("POST", "/v1/verifiers/execute$", {"status": 500}),
    "verify 400": ("POST", "/v1/verifiers/execute$", {"status": 400, "times": -1}),
    "verify lost": ("POST", "/v1/verifiers/execute$", {"drop": True, "after": True}),
    "close 502": ("DELETE", "/v1/env/instances/", {"status": 502}),
    "close 404": ("DELETE", "/v1/env/instances/", {"status": 404}),
    "close lost": ("DELETE", "/v1/env/instances/", {"drop": True, "after": True}),
}


def settled(plane: LabPlane, recorder: EventRecorder) -> None:
    assert recorder.is_balanced, recorder.names
    assert all(isinstance(event.reason, str) and event.reason for event in recorder.completed)
    assert plane.running == []


async def episode(env: FleetTaskEnv, steps: int = 2) -> None:
    try:
        await env.reset_async()
        for _ in range(steps):
            await env.step_async({"tool": "add", "params": {"text": "hello"}})
        await env.step_async({"done": True})
    finally:
        await env.close_async()


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_ends_in_one_completion(name: str) -> None:
    method, path, how = FAULTS[name]
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        with contextlib.suppress(PaddockError):
            await episode(env_on(plane, recorder))
        await close_all()

    with lab() as plane:
        plane.fail(method, path, **how)
        asyncio.run(main(plane))
        if name == "close 404":
            plane.box.status = "stopped"
        settled(plane, recorder)


def test_a_cancellation_at_any_moment_ends_in_one_completion() -> None:
    recorder = EventRecorder()

    async def cancelled(plane: LabPlane, seconds: float) -> None:
        running = asyncio.ensure_future(episode(env_on(plane, recorder), 4))
        await asyncio.sleep(seconds)
        running.cancel()
        await asyncio.wait([running])

    async def main(plane: LabPlane) -> None:
        await asyncio.gather(*(cancelled(plane, number * 0.004) for number in range(60)))
        await close_all()

    with lab(create_seconds=0.03) as plane:
        asyncio.run(main(plane))
        settled(plane, recorder)
    reasons = {event.reason for event in recorder.completed}
    assert "cancelled" in reasons


def test_an_environment_that_is_garbage_collected_abandons_its_episode() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        env = env_on(plane, recorder)
        await env.reset_async()
        del env
        gc.collect()
        assert [event.reason for event in recorder.completed] == ["abandoned"]
        await close_all()

    with lab() as plane:
        asyncio.run(main(plane))
        settled(plane, recorder)


def test_closing_grades_an_unfinished_episode() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> float | None:
        env = env_on(plane, recorder)
        await env.reset_async()
        await env.step_async({"tool": "add", "params": {"text": "hello"}})
        await env.close_async()
        await env.close_async()
        return env.final_reward

    with lab() as plane:
        assert asyncio.run(main(plane)) == 1.0
        settled(plane, recorder)
    assert recorder.completed[0].reward == 1.0


def test_an_environment_can_be_used_again_after_it_was_closed() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        env = env_on(plane, recorder)
        await episode(env)
        with pytest.raises(EpisodeState):
            await env.step_async({"tool": "show"})
        await episode(env)

    with lab() as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 2
        settled(plane, recorder)


def test_a_used_instance_that_cannot_be_reset_is_replaced() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder) as env:
            await env.reset_async()
            await env.step_async({"tool": "add", "params": {"text": "dirt"}})
            plane.fail("POST", "/reset", 500, times=3)
            await env.reset_async()
            _, _, _, info = await env.step_async({"tool": "show"})
            assert info["tool_result"] == []
            assert "env_reset_failed" not in info

    with lab() as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 2
        settled(plane, recorder)


def test_each_call_may_have_a_loop_of_its_own() -> None:
    recorder = EventRecorder()
    with lab() as plane:
        env = env_on(plane, recorder)
        asyncio.run(env.reset_async())
        asyncio.run(env.step_async({"tool": "add", "params": {"text": "hello"}}))
        _, reward, _, _ = asyncio.run(env.step_async({"done": True}))
        asyncio.run(env.close_async())
        assert reward == 1.0
        settled(plane, recorder)


def test_the_sync_methods_play_a_whole_episode() -> None:
    recorder = EventRecorder()
    with lab() as plane:
        with env_on(plane, recorder) as env:
            assert env.reset()["step"] == 0
            observation, reward, done, info = env.step({"tool": "add", "params": {"text": "hello"}})
            assert (observation["observation"], reward, done, info["step"]) == ({"rows": 1}, 0.0, False, 1)
            assert env.step({"done": True})[1:3] == (1.0, True)
        settled(plane, recorder)


def test_the_last_step_is_graded() -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane, None, None, max_steps=1) as env:
            await env.reset_async()
            _, reward, done, info = await env.step_async({"tool": "add", "params": {"text": "hello"}})
            assert (reward, done, info["done_reason"]) == (1.0, True, "max_steps")

    with lab() as plane:
        asyncio.run(main(plane))


def test_an_answer_that_is_submitted_reaches_the_verifier() -> None:
    source = (
        "def verify(env, final_answer=None, conversation=None):\n    return {'score': float(len(final_answer))}\n"
    )

    async def main(plane: LabPlane) -> None:
        config = task(prompt="use submit_final_answer", verifier_code=source)
        async with env_on(plane, None, config) as env:
            tools = (await env.reset_async())["tools"]
            assert tools[-1]["function"]["name"] == "submit_final_answer"
            env.conversation_messages = [{"role": "user", "content": "x"}]
            answer = {"tool": "submit_final_answer", "params": {"answer": "four"}}
            _, reward, done, info = await env.step_async(answer)
            assert (reward, done, info["submitted_answer"]) == (4.0, True, "four")
            assert env._last_verifier_execution_id == "exec-1"

    with lab() as plane:
        asyncio.run(main(plane))


def test_log_lines_name_the_environment_and_the_step(caplog: pytest.LogCaptureFixture) -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane, None, task(env_version="v2")) as env:
            await env.reset_async()
            await env.step_async({"tool": "fail"})

    with lab() as plane:
        asyncio.run(main(plane))
    assert any(record.getMessage().startswith("[env=notes:v2] step 1/50") for record in caplog.records)


def test_many_episodes_with_faults_of_every_kind_leave_nothing_behind() -> None:
    """Two hundred at once, and one request in twenty goes wrong in some way."""
    chance = random.Random(7)
    recorder = EventRecorder()
    outcomes: list[str] = []

    async def one(plane: LabPlane) -> None:
        try:
            await episode(env_on(plane, recorder, verifier_timeout_s=20.0))
            outcomes.append("played")
        except PaddockError as error:
            outcomes.append(type(error).__name__)

    async def main(plane: LabPlane) -> None:
        await asyncio.gather(*(one(plane) for _ in range(200)))
        await close_all()

    threads = threading.active_count()
    with lab(aggregator_tools=[COMPUTER]) as plane:
        kinds = list(FAULTS.values())
        for method, path, how in kinds:
            plane.fail(method, path, **{**how, "times": 10})
        chance.shuffle(plane.faults)
        asyncio.run(main(plane))
        for box in plane.running:
            # A DELETE that was answered with 404 on purpose ends nothing.
            box.status = "stopped"
        settled(plane, recorder)
    assert len(outcomes) == 200
    assert outcomes.count("played") > 150
    assert threading.active_count() == threads
