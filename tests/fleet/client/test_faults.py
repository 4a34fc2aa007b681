"""Every fault that Fleet rollouts are known to meet, injected, and what must come of it."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from paddock.fleet import ContextManager, FleetEnvClient, FleetMCPTools
from paddock.fleet.client import jobs
from paddock.fleet.client.errors import (
    FleetTimeout,
    ProvisioningFailed,
    ToolCallFailed,
    ToolOutcomeUnknown,
    ToolsUnavailable,
)
from paddock.fleet.client.tasks import ComputerToolMissing

from .episodes import VERIFIER, EventRecorder, env_on, play, task
from .plane import COMPUTER, KEY, SHOW, LabPlane, lab

DETERMINISTIC = "def verify(env):\n    raise KeyError('rows')\n"


async def made(plane: LabPlane, **options: Any) -> tuple[FleetEnvClient, FleetMCPTools]:
    return await FleetEnvClient.from_fleet_async(KEY, "notes", base_url=plane.url, **options)


def with_tools(plane: LabPlane, work: Callable[[FleetMCPTools], Awaitable[Any]], **settings: Any) -> Any:
    """Run `work` on the tools of a fresh instance."""

    async def main() -> Any:
        orchestrator, tools = await made(plane)
        for name, value in settings.items():
            setattr(tools, name, value)
        try:
            return await work(tools)
        finally:
            plane.heal()
            await orchestrator.close_async()

    return asyncio.run(main())


def graded(plane: LabPlane, source: str | None, **more: Any) -> tuple[float | None, dict[str, Any], EventRecorder]:
    recorder = EventRecorder()

    async def main() -> tuple[float | None, dict[str, Any]]:
        async with env_on(plane, recorder, task(verifier_code=source, **more), verifier_timeout_s=5.0) as env:
            return await play(env, "hello")

    reward, info = asyncio.run(main())
    return reward, info, recorder


def test_01_every_instance_is_ended_exactly_once() -> None:
    async def episode(plane: LabPlane, number: int) -> None:
        async with env_on(plane) as env:
            await env.reset_async()
            if number % 3 == 1:
                raise RuntimeError("the trainer broke")
            if number % 3 == 2:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(1)
            await env.step_async({"done": True})

    async def main(plane: LabPlane) -> None:
        await asyncio.gather(*(episode(plane, number) for number in range(12)), return_exceptions=True)

    with lab() as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 12
        assert plane.running == []
        assert plane.count("DELETE", "/v1/env/instances/") == 12


def test_02_cancellation_passes_at_once() -> None:
    async def work(tools: FleetMCPTools) -> None:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(tools.list_tools(), 1)
        assert time.monotonic() - began < 1.3
        seen = len(plane.seen)
        await asyncio.sleep(0.3)
        assert len(plane.seen) == seen

    with lab() as plane:
        plane.fail("POST", "mcp", hang=True, times=-1)
        with_tools(plane, work)


@pytest.mark.parametrize("lost", [{"drop": True}, {"status": 502}], ids=["dropped", "502"])
def test_03_a_call_that_may_have_run_is_not_repeated(lost: dict[str, Any]) -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", rpc="tools/call", after=True, times=2, **lost)
        with pytest.raises(ToolOutcomeUnknown, match="outcome unknown"):
            await tools.call_tool("add", {"text": "once"})
        assert plane.box.rows == ["once"]

    with lab() as plane:
        with_tools(plane, work)


@pytest.mark.parametrize("name", ["show", "put"])
def test_03_an_idempotent_call_is_repeated(name: str) -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", rpc="tools/call", after=True, drop=True, times=2)
        await tools.call_tool(name, {"text": "x"})
        assert plane.rpc.count("tools/call") == 3

    with lab() as plane:
        with_tools(plane, work)


def test_03_a_server_that_recognizes_the_call_runs_it_once() -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", rpc="tools/call", after=True, drop=True, times=2)
        assert await tools.call_tool("add", {"text": "once"}) == {"rows": 1}
        assert plane.box.rows == ["once"]

    with lab(repeats_safely=True) as plane:
        with_tools(plane, work)


def test_03_a_call_that_was_refused_is_repeated() -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", 429, rpc="tools/call", headers={"Retry-After": "0.05"})
        assert await tools.call_tool("add", {"text": "once"}) == {"rows": 1}

    with lab() as plane:
        with_tools(plane, work)


@pytest.mark.parametrize("how", ["hang", "stall", "dribble"])
def test_04_a_silent_endpoint_costs_no_more_than_its_deadline(how: str) -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", rpc="tools/call", times=-1, **{how: True})
        began = time.monotonic()
        with pytest.raises(ToolCallFailed):
            await tools.call_tool("add", {})
        assert time.monotonic() - began < 0.8

    with lab() as plane:
        with_tools(plane, work, call_deadline_s=0.4)


def test_04_a_stream_that_ends_without_an_answer_is_a_lost_answer() -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        plane.fail("POST", "mcp", rpc="tools/call", cut_stream=True)
        with pytest.raises(ToolOutcomeUnknown):
            await tools.call_tool("add", {})

    with lab() as plane:
        with_tools(plane, work)


def test_05_a_body_sent_byte_by_byte_does_not_extend_the_deadline() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane, request_timeout_s=0.3)
        began = time.monotonic()
        with pytest.raises(FleetTimeout):
            await orchestrator.reset_async()
        assert time.monotonic() - began < 0.6
        await orchestrator.close_async()

    with lab() as plane:
        plane.fail("POST", "/reset", dribble=True, times=-1)
        asyncio.run(main(plane))


def test_06_a_hanging_endpoint_does_not_block_the_other() -> None:
    async def work(tools: FleetMCPTools) -> None:
        began = time.monotonic()
        listed = await tools.list_tools()
        assert time.monotonic() - began < 0.6
        assert len(listed.tools) == 4

    with lab(aggregator_tools=[COMPUTER]) as plane:
        plane.fail("POST", "api/v1/mcp", hang=True, times=-1)
        with_tools(plane, work, partial_wait_s=0.2)


def test_06_listing_has_one_deadline_for_all_endpoints() -> None:
    async def work(tools: FleetMCPTools) -> None:
        began = time.monotonic()
        with pytest.raises(ToolsUnavailable):
            await tools.list_tools()
        assert time.monotonic() - began < 0.8

    with lab(aggregator_tools=[COMPUTER]) as plane:
        plane.fail("POST", "mcp", hang=True, times=-1)
        with_tools(plane, work, list_deadline_s=0.4)


def test_07_a_healthy_endpoint_is_not_waited_for() -> None:
    async def work(tools: FleetMCPTools) -> None:
        began = time.monotonic()
        await tools.list_tools()
        first = time.monotonic()
        await tools.list_tools()
        assert first - began < 0.1
        assert time.monotonic() - first < 0.1
        assert plane.rpc.count("initialize") == 1

    with lab() as plane:
        with_tools(plane, work)


@pytest.mark.parametrize("status", [502, 404])
def test_07_an_endpoint_that_is_still_starting_is_polled(status: int) -> None:
    async def work(tools: FleetMCPTools) -> None:
        asyncio.get_running_loop().call_later(0.5, plane.heal)
        began = time.monotonic()
        await tools.list_tools()
        assert 0.4 < time.monotonic() - began < 1.5

    with lab() as plane:
        plane.fail("POST", "mcp", status, times=-1)
        with_tools(plane, work)


def test_08_making_an_instance_does_not_block_the_loop() -> None:
    async def main(plane: LabPlane) -> float:
        worst = 0.0

        async def tick() -> None:
            nonlocal worst
            while True:
                began = time.monotonic()
                await asyncio.sleep(0.005)
                worst = max(worst, time.monotonic() - began - 0.005)

        ticking = asyncio.ensure_future(tick())
        orchestrator, _ = await made(plane)
        ticking.cancel()
        await orchestrator.close_async()
        return worst

    with lab(create_seconds=0.5) as plane:
        assert asyncio.run(main(plane)) < 0.05


@pytest.mark.parametrize(
    ("fault", "creates"),
    [
        ({"status": 502}, 3),
        ({"status": 503, "headers": {"Retry-After": "0.05"}}, 3),
        ({"status": 429, "headers": {"Retry-After": "0.05"}}, 3),
        ({"status": 400, "body": {"detail": {"message": "still warming", "retryable": True}}}, 3),
        ({"status": 400, "body": {"detail": "still warming", "retryable": True}}, 3),
        ({"status": 403, "body": {"detail": 'no capacity, "retryable": true'}}, 3),
        ({"status": 400, "body": {"detail": {"error": {"message": "busy", "retryable": True}}}}, 3),
        ({"status": 403, "body": {"detail": "Rate limit exceeded"}}, 3),
        ({"status": 400, "body": {"detail": "Instance health check failed"}}, 3),
        ({"status": 200, "body": {"success": False, "message": "try later", "retryable": True}}, 3),
        ({"drop": True}, 3),
    ],
)
def test_09_a_transient_create_failure_is_retried(fault: dict[str, Any], creates: int) -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane, bus=recorder.bus)
        await orchestrator.close_async()

    recorder = EventRecorder()
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", times=2, **fault)
        asyncio.run(main(plane))
        assert plane.count("POST", "/v1/env/instances$") == creates
        assert recorder.count("fleet_make_retry") == 2


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, {"detail": "Environment 'connection' not found"}),
        (400, {"detail": {"message": "health check failed for good", "retryable": False}}),
        (404, {"detail": "rate limit"}),
        (200, {"success": False, "message": "not for you"}),
        (400, {"detail": [{"loc": ["body"], "msg": "wrong"}]}),
        (503, {"detail": {"message": "never", "retryable": False}}),
        (401, {"detail": "no"}),
    ],
)
def test_09_a_final_create_failure_is_not_retried(status: int, body: Any) -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", status, times=-1, body=body)
        with pytest.raises(ProvisioningFailed):
            asyncio.run(made(plane))
        assert plane.count("POST", "/v1/env/instances$") == 1


def test_09_retry_after_is_respected() -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", 429, headers={"Retry-After": "1"})
        began = time.monotonic()
        asyncio.run(ended(plane))
        assert time.monotonic() - began >= 1.0


async def ended(plane: LabPlane) -> None:
    orchestrator, _ = await made(plane)
    await orchestrator.close_async()


@pytest.mark.parametrize("lost", [{"drop": True}, {"status": 503}], ids=["dropped", "503"])
@pytest.mark.parametrize("pending", [0.0, 0.4], ids=["running", "pending"])
def test_10_a_lost_answer_to_a_create_makes_no_second_instance(lost: dict[str, Any], pending: float) -> None:
    with lab(pending_seconds=pending) as plane:
        plane.fail("POST", "/v1/env/instances", after=True, times=2, **lost)
        asyncio.run(ended(plane))
        assert len(plane.boxes) == 1
        assert plane.running == []


def test_10_an_instance_that_ended_before_it_ran_is_replaced() -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", after=True, drop=True)

        def kill() -> None:
            for box in plane.boxes.values():
                box.status = "error"

        async def main() -> None:
            making = asyncio.ensure_future(made(plane))
            while not plane.boxes:
                await asyncio.sleep(0.005)
            kill()
            orchestrator, _ = await making
            await orchestrator.close_async()

        asyncio.run(main())
        assert [box.status for box in plane.boxes.values()] == ["error", "stopped"]


def test_11_retries_do_not_multiply() -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", 502, times=-1)
        began = time.monotonic()
        with pytest.raises(ProvisioningFailed):
            asyncio.run(made(plane, create_timeout_s=1.0))
        assert time.monotonic() - began < 1.5
        assert 2 <= plane.count("POST", "/v1/env/instances$") <= 6


def test_12_an_empty_list_is_retried_and_then_fatal() -> None:
    async def work(tools: FleetMCPTools) -> None:
        with pytest.raises(ToolsUnavailable, match="without a tool"):
            await tools.list_tools()
        assert plane.rpc.count("tools/list") == 3

    with lab(api_tools=[]) as plane:
        with_tools(plane, work, max_retries=3, initial_wait=0.0)


def test_12_a_list_that_is_empty_at_first_is_waited_for() -> None:
    async def work(tools: FleetMCPTools) -> None:
        asyncio.get_running_loop().call_later(0.3, setattr, plane, "api_tools", [SHOW])
        assert len((await tools.list_tools()).tools) == 1

    with lab(api_tools=[]) as plane:
        with_tools(plane, work)


def test_12_a_failed_endpoint_is_retried_while_another_has_tools() -> None:
    async def work(tools: FleetMCPTools) -> None:
        names = [tool["function"]["name"] for tool in (await tools.list_tools()).tools]
        assert names == ["add", "show", "fail", "put", "computer"]

    with lab(aggregator_tools=[COMPUTER]) as plane:
        plane.fail("POST", r"/\w+-\w+/mcp", 502, times=2)
        with_tools(plane, work)


def test_12_tools_that_are_incomplete_are_reported_or_refused() -> None:
    recorder = EventRecorder()

    async def work(tools: FleetMCPTools) -> None:
        tools.bus = recorder.bus
        assert len((await tools.list_tools()).tools) == 1
        tools.on_partial = "error"
        with pytest.raises(ToolsUnavailable, match="incomplete"):
            await tools.list_tools()

    with lab(aggregator_tools=[COMPUTER]) as plane:
        plane.fail("POST", r"/\w+-\w+/mcp", 502, times=-1)
        with_tools(plane, work, partial_wait_s=0.2)
    assert recorder.count("fleet_list_tools_partial") == 2


def test_12_the_tools_that_are_wanted_are_waited_for() -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane) as env:
            asyncio.get_running_loop().call_later(0.5, plane.heal)
            observation = await env.reset_async()
            assert len(observation["tools"]) == 4

    with lab(aggregator_tools=[COMPUTER]) as plane:
        plane.fail("POST", r"/\w+-\w+/mcp", 502, times=-1)
        asyncio.run(main(plane))


@pytest.mark.parametrize(
    ("source", "fault", "reason"),
    [
        (DETERMINISTIC, None, "verifier_failed"),
        ("def verify(env):\n    print('JUDGE ERROR: overloaded')\n    return 0.0\n", None, "judge_error"),
        (VERIFIER, 400, "verifier_exception"),
        (None, None, "no_verifier"),
    ],
    ids=["raises", "judge", "refused", "none"],
)
def test_13_an_unknown_grade_is_none_with_its_reason(source: str | None, fault: int | None, reason: str) -> None:
    with lab() as plane:
        if fault is not None:
            plane.fail("POST", "/v1/verifiers/execute", fault, times=-1)
        reward, info, recorder = graded(plane, source)
    assert reward is None
    assert info["failure_reason"] == reason
    assert [event.failure_reason for event in recorder.completed] == [reason]


def test_13_a_real_zero_stays_zero() -> None:
    with lab() as plane:
        reward, info, recorder = graded(plane, "def verify(env):\n    return 0\n")
    assert reward == 0.0
    assert info["failure_reason"] is None
    assert recorder.completed[0].reward == 0.0


def test_14_a_verifier_with_a_bug_runs_once() -> None:
    with lab() as plane:
        _, info, _ = graded(plane, DETERMINISTIC)
        assert plane.verifier_runs == 1
    assert "KeyError" in info["verifier_error"]


def test_14_a_verifier_that_could_not_be_reached_is_tried_again() -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/verifiers/execute", 502, times=2)
        reward, _, _ = graded(plane, VERIFIER)
        assert (reward, plane.verifier_runs) == (1.0, 1)


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        ("0.5", 0.5),
        ("True", 1.0),
        ("{'score': 0.25}", 0.25),
        ("{'score': None}", None),
        ("None", None),
        ("'1.0'", None),
        ("float('nan')", None),
        ("[]", None),
    ],
)
def test_15_results_are_scored_as_they_are_meant(returned: str, reward: float | None) -> None:
    with lab() as plane:
        values, info, _ = graded(plane, f"def verify(env):\n    return {returned}\n")
    assert values == reward
    assert (info["failure_reason"] is None) == (reward is not None)


def test_16_the_verifier_is_called_and_not_its_helper() -> None:
    source = "def helper(env):\n    return 0.25\n\ndef verify(env):\n    return helper(env) * 4\n"
    with lab() as plane:
        assert graded(plane, source)[0] == 1.0


def test_16_the_source_does_not_run_in_this_process() -> None:
    source = f"import builtins\nbuiltins.ran_in = {threading.get_native_id.__name__!r}\nraise SystemExit\n"
    with lab() as plane:
        reward, info, _ = graded(plane, f"{source}def verify(env):\n    return 1\n", verifier_function="missing")
    assert reward is None
    assert info["failure_reason"] == "verifier_invalid"
    assert not hasattr(__import__("builtins"), "ran_in")


def test_16_an_ambiguous_verifier_is_refused_with_the_names() -> None:
    with lab() as plane:
        _, info, _ = graded(plane, "def one(env): ...\ndef two(env): ...\n")
        assert plane.verifier_runs == 0
    assert "one, two" in info["verifier_error"]


def test_17_the_sync_methods_work_from_several_threads_and_inside_a_loop() -> None:
    with lab() as plane:
        orchestrator, tools = FleetEnvClient.from_fleet(KEY, "notes", base_url=plane.url)
        before = threading.active_count()
        answers: list[Any] = []
        threads = [threading.Thread(target=lambda: answers.append(orchestrator.query_db("select"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(answers) == 8
        assert all(answer["success"] for answer in answers)

        async def inside() -> None:
            orchestrator.reset()
            await orchestrator.reset_async()
            assert (await tools.call_tool("add", {"text": "x"})) == {"rows": 1}

        asyncio.run(inside())
        asyncio.run(inside())
        assert threading.active_count() == before
        orchestrator.close()
        assert threading.active_count() == before - 1
        assert plane.running == []


def test_18_a_reset_that_hangs_is_not_fatal_and_not_silent() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> dict[str, Any]:
        async with env_on(plane, recorder, reset_timeout_s=0.2) as env:
            began = time.monotonic()
            await env.reset_async()
            assert time.monotonic() - began < 0.8
            return (await env.step_async({"tool": "show"}))[3]

    with lab() as plane:
        plane.fail("POST", "/reset", hang=True, times=-1)
        assert "env_reset_failed" in asyncio.run(main(plane))
    assert recorder.count("fleet_env_reset_failed") == 1


def test_18_a_gated_instance_is_opened_with_the_runner_token() -> None:
    async def main(plane: LabPlane) -> None:
        async with env_on(plane) as env:
            await env.reset_async()
            assert env.reset_error is None

    with lab(gated=True) as plane:
        asyncio.run(main(plane))
        assert plane.box.resets == 1


def test_19_an_instance_that_ends_mid_episode_ends_the_episode() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder) as env:
            await env.reset_async()
            plane.box.status = "stopped"
            began = time.monotonic()
            _, reward, done, info = await env.step_async({"tool": "show"})
            assert time.monotonic() - began < 1.0
            assert (reward, done, info["done_reason"]) == (None, True, "instance_expired")
            assert info["failure_reason"] == "instance_expired"

    with lab() as plane:
        asyncio.run(main(plane))
        assert plane.verifier_runs == 0
    assert [event.reason for event in recorder.completed] == ["instance_expired"]


def test_19_heartbeats_are_sent_where_the_plane_asks_for_them() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        deadline = time.monotonic() + 5
        while plane.box.beats < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        await orchestrator.close_async()

    with lab(heartbeat_interval=1) as plane:
        asyncio.run(main(plane))


@pytest.mark.parametrize("ended_before", [False, True])
def test_20_closing_twice_or_too_late_is_no_error(ended_before: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        if ended_before:
            plane.box.status = "stopped"
        await asyncio.gather(orchestrator.close_async(), orchestrator.close_async())
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))
        assert plane.count("DELETE", "/v1/env/instances/") == 1
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []


def test_21_resetting_twice_completes_both_rollouts() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder) as env:
            await env.reset_async()
            await env.reset_async()

    with lab() as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 1
    assert recorder.is_balanced
    assert [event.reason for event in recorder.completed] == ["abandoned", "closed"]


def test_22_two_environments_do_not_mix_their_attributes() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        envs = [env_on(plane, recorder, task(task_key=key, env_key=key)) for key in ("one", "two")]
        for env in envs:
            await env.reset_async()
        await envs[0].close_async()
        await envs[1].step_async({"tool": "fail"})
        await envs[1].close_async()

    with lab() as plane:
        asyncio.run(main(plane))
    reply = [(event.name, event.context.task_key) for event in recorder.events]
    assert ("fleet_mcp_tool_error", "two") in reply
    assert all(event.context.task_key == event.context.env_key for event in recorder.events)
    assert len([name for name in reply if name == ("fleet_rollout_completed", "one")]) == 1


def test_23_a_failure_to_make_is_a_rollout_that_failed() -> None:
    recorder = EventRecorder()
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", 400, times=-1)
        with pytest.raises(ProvisioningFailed):
            asyncio.run(env_on(plane, recorder).reset_async())
    names = [event.name for event in recorder.events]
    assert names == ["fleet_rollout_started", "fleet_make_failed", "fleet_rollout_completed"]
    assert recorder.completed[0].failure_reason == "init_error"
    assert recorder.completed[0].reward is None


def test_24_a_screen_task_without_a_screen_fails_with_the_names() -> None:
    recorder = EventRecorder()
    with lab(aggregator_tools=[SHOW]) as plane:
        with pytest.raises(ComputerToolMissing, match="show"):
            asyncio.run(env_on(plane, recorder, task(task_modality="computer_use")).reset_async())
        assert plane.running == []
    assert [event.reason for event in recorder.completed] == ["computer_tool_missing"]


@pytest.mark.parametrize(
    ("modality", "names"), [("tool_use", {"add", "show", "fail", "put"}), ("computer_use", {"computer"})]
)
def test_24_each_modality_gets_its_own_tools(modality: str, names: set[str]) -> None:
    async def main(plane: LabPlane) -> set[str]:
        async with env_on(plane, None, task(task_modality=modality)) as env:
            return {tool["function"]["name"] for tool in (await env.reset_async())["tools"]}

    with lab(aggregator_tools=[COMPUTER]) as plane:
        assert asyncio.run(main(plane)) == names


@pytest.mark.parametrize("how", ["null", "500", "fine"])
def test_25_a_screenshot_that_fails_is_a_notice(how: str) -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> list[dict[str, Any]]:
        async with env_on(plane, recorder, task(task_modality="computer_use")) as env:
            return list((await env.reset_async())["initial_screenshot"])

    with lab(aggregator_tools=[COMPUTER], image=None if how == "null" else "AAAA") as plane:
        if how == "500":
            plane.fail("POST", "mcp", 500, rpc="tools/call")
        kinds = [part["type"] for part in asyncio.run(main(plane))]
    assert kinds == (["text", "image_url"] if how == "fine" else ["text"])
    assert recorder.count("fleet_screenshot_failed") == (how != "fine")


def test_26_parallel_creates_are_limited() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        result = await asyncio.gather(*(made(plane, bus=recorder.bus) for _ in range(96)))
        await asyncio.gather(*(orchestrator.close_async() for orchestrator, _ in result))

    with lab(create_seconds=0.1) as plane:
        asyncio.run(main(plane))
        assert len(plane.boxes) == 96
        assert plane.most_creates <= 64
        assert plane.running == []
    assert recorder.count("fleet_provisioning_completed") == 96


def test_27_a_whole_episode_runs() -> None:
    with lab() as plane:
        assert graded(plane, VERIFIER)[0] == 1.0


def test_28_failing_once_and_then_not_works_everywhere() -> None:
    with lab() as plane:
        plane.fail("POST", "/v1/env/instances", 502)
        plane.fail("POST", "mcp", 502, rpc="initialize")
        plane.fail("POST", "mcp", 502, rpc="tools/list")
        plane.fail("POST", "/v1/verifiers/execute", 502)
        plane.fail("DELETE", "/v1/env/instances/", 502)
        assert graded(plane, VERIFIER)[0] == 1.0
        assert plane.running == []


def test_29_nothing_is_imported_that_is_not_installed() -> None:
    code = (
        "import sys\n"
        "for name in ('mcp', 'fleet', 'httpx', 'logfire', 'opentelemetry'): sys.modules[name] = None\n"
        "import paddock.fleet\n"
        "for name in paddock.fleet.__all__: getattr(paddock.fleet, name)\n"
        "paddock.fleet.configure_fleet_telemetry(token='t')\n"
        "paddock.fleet.configure_fleet_telemetry()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr.count("logfire is not installed (pip install logfire)") == 2


def test_30_the_trajectory_has_a_deadline() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder, trajectory_timeout_s=0.4) as env:
            await env.reset_async()
            plane.fail("POST", "mcp", hang=True, times=-1)
            began = time.monotonic()
            _, reward, done, info = await env.step_async({"tool": "add"})
            assert time.monotonic() - began < 1.0
            assert (reward, done, info["done_reason"]) == (0.0, True, "trajectory_timeout")

    with lab() as plane:
        asyncio.run(main(plane))
        assert plane.running == []
    assert [event.reason for event in recorder.completed] == ["trajectory_timeout"]


def test_30_an_exception_mid_episode_still_closes() -> None:
    recorder = EventRecorder()

    async def main(plane: LabPlane) -> None:
        async with env_on(plane, recorder) as env:
            await env.reset_async()
            raise RuntimeError("the model broke")

    with lab() as plane:
        with pytest.raises(RuntimeError, match="the model broke"):
            asyncio.run(main(plane))
        assert plane.running == []
    assert recorder.is_balanced


def test_31_the_task_stays_when_old_turns_are_dropped() -> None:
    history = [{"role": "system", "content": "s"}, {"role": "user", "content": "the task"}]
    for turn in range(4):
        history += [{"role": "assistant", "content": f"a{turn}"}, {"role": "tool", "content": f"r{turn}"}]
    _, remaining = ContextManager().execute_tool("manage_context", {"keep_recent_turns": 1}, history)
    assert [message["content"] for message in remaining] == ["s", "the task", "a3", "r3"]


def test_32_a_connection_that_the_server_closed_while_idle_is_replaced() -> None:
    async def work(tools: FleetMCPTools) -> None:
        await tools.list_tools()
        for number in range(1, 4):
            await asyncio.sleep(0.25)
            assert await tools.call_tool("add", {"text": "x"}) == {"rows": number}

    with lab(keepalive=0.1) as plane:
        with_tools(plane, work)


def test_33_a_database_can_be_queried_first() -> None:
    async def main(plane: LabPlane) -> None:
        orchestrator, _ = await made(plane)
        assert (await orchestrator.query_db_async("select count(*) from notes"))["rows"] == [[0]]
        await orchestrator.close_async()

    with lab() as plane:
        asyncio.run(main(plane))


def test_34_a_trace_that_cannot_be_sent_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "failures", type(jobs.failures)())
    with lab() as plane:
        monkeypatch.setenv("FLEET_TRACE_BASE_URL", plane.url)
        assert asyncio.run(jobs.create_trace_job(KEY, "run")) == "job-1"
        plane.fail("POST", "/v1/traces/jobs", 404)
        assert asyncio.run(jobs.create_trace_job(KEY, "run")) is None
    assert jobs.failures == {"create_trace_job": 1}


def test_35_no_thread_outlives_a_close() -> None:
    before = threading.active_count()
    with lab() as plane:
        plane.fail("POST", "/reset", hang=True, times=-1)
        env = env_on(plane, reset_timeout_s=0.1)
        env.reset()
        assert threading.active_count() == before + 2
        env.close()
        assert threading.active_count() == before + 1
        with contextlib.closing(env_on(plane, reset_timeout_s=0.1)) as again:
            again.reset()
        assert plane.running == []
    assert threading.active_count() == before
