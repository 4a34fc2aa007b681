"""Steps: one at a time, each with a deadline, wherever they run."""

import asyncio
import logging
import sqlite3
import threading
import time
from contextlib import suppress
from typing import Any

import pytest

from environments import Add, Adder, AsyncKit, AsyncScripted, Did, InlineAdder, Kit, Script, Scripted, Total, Watched
from paddock import Environment, Observation, State, ToolEnvironment, tool
from paddock.errors import (
    EnvironmentFailure,
    InvalidToolArguments,
    NotSupported,
    PaddockError,
    SessionBusy,
    SessionNotFound,
    StepTimeout,
    ToolFailure,
    ToolNotFound,
)
from paddock.protocol.episode import CallTool, GetState, ListTools, Reset, Step
from paddock.sessions.session import Origin
from paddock.sessions.spec import Where
from paddock.types import CallToolAction, ListToolsAction

from .conftest import settled, until

pytestmark = pytest.mark.anyio


# -- one at a time --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Adder, InlineAdder])
async def test_parallel_steps_do_not_interleave(harness: Any, make: Any) -> None:
    one = harness(make)
    session = await one.manager.open(Origin.SOCKET)
    answers = await asyncio.gather(*(one.execute(session, Step(Add(amount=1))) for _ in range(20)))
    assert [answer.total for answer in answers] == list(range(1, 21))


@pytest.mark.parametrize("make", [Kit, AsyncKit])
async def test_parallel_tool_calls_do_not_interleave(harness: Any, make: Any) -> None:
    one = harness(make)
    session = await one.manager.open(Origin.CREATED)
    answers = await asyncio.gather(*(one.execute(session, CallTool("add", {"amount": 1})) for _ in range(10)))
    assert [answer["data"] for answer in answers] == list(range(1, 11))


async def test_sessions_run_side_by_side(harness: Any) -> None:
    one = harness(Scripted)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(4)]
    started = time.monotonic()
    await asyncio.gather(*(one.execute(session, Step(Script(sleep=0.1))) for session in sessions))
    assert time.monotonic() - started < 0.3


async def test_a_thousand_requests_at_once_are_refused_not_kept(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    asks = [asyncio.create_task(one.execute(session, Step(Script(hang=n == 0)))) for n in range(1000)]
    await until(lambda: lives[0].steps)
    lives[0].release.set()
    answers = await asyncio.gather(*asks, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, SessionBusy)]
    assert len(refused) > 100
    assert len(answers) - len(refused) == lives[0].steps


async def test_threads_are_bounded(harness: Any) -> None:
    one = harness(Scripted, threads=3, max_sessions=10)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(10)]
    await asyncio.gather(*(one.execute(session, Step(Script(sleep=0.02))) for session in sessions))
    assert one.manager.threads.count <= 3


async def test_hung_steps_do_not_starve_the_others(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, threads=2, max_sessions=4)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(3)]
    hung = [asyncio.create_task(one.execute(session, Step(Script(hang=True)))) for session in sessions[:2]]
    await until(lambda: lives[0].steps and lives[1].steps)
    free = asyncio.create_task(one.execute(sessions[2], Step(Script(value="free"))))
    async with asyncio.timeout(5):
        while not free.done():
            one.manager.tick()
            await asyncio.sleep(0.02)
    assert (await free).value == "free"
    for life in lives:
        life.release.set()
    await asyncio.gather(*hung)


# -- deadlines ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [Scripted, AsyncScripted])
async def test_a_step_over_its_deadline_is_answered(harness: Any, make: Any, lives: list[Watched]) -> None:
    one = harness(make, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(9.9)
    assert not step.done()
    await one.pass_time(0.2)
    with pytest.raises(StepTimeout) as late:
        await step
    assert "10" in late.value.message
    assert late.value.hint


async def test_an_async_step_over_its_deadline_is_cancelled(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await step
    assert lives[0].cancelled == 1
    assert (await one.execute(session, Step(Script(value=1)))).value == 1
    assert one.manager.statistics().hung == 0


async def test_a_hung_thread_step_keeps_the_session_busy_until_it_returns(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await step
    with pytest.raises(SessionBusy):
        await one.execute(session, Step(Script(value=1)))
    assert one.manager.statistics().hung == 1
    lives[0].release.set()
    await until(lambda: not session.is_running)
    assert one.manager.statistics().hung == 0
    assert (await one.execute(session, Step(Script(value=2)))).value == 2


async def test_requests_behind_a_hung_step_are_answered_too(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    asks = [asyncio.create_task(one.execute(session, Step(Script(hang=n == 0)))) for n in range(3)]
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    answers = await asyncio.wait_for(asyncio.gather(*asks, return_exceptions=True), 2)
    assert isinstance(answers[0], StepTimeout)
    assert all(isinstance(answer, SessionBusy) for answer in answers[1:])


async def test_a_request_may_ask_for_less_time(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted, step_timeout=100)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True)), timeout=2))
    await until(lambda: lives[0].steps)
    await one.pass_time(2.1)
    with pytest.raises(StepTimeout):
        await step


async def test_a_request_may_not_ask_for_more_time(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncScripted, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True)), timeout=600))
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await asyncio.wait_for(step, 1)


async def test_a_class_may_say_how_long_its_steps_take(harness: Any, lives: list[Watched]) -> None:
    class SseKeepAlive(AsyncScripted):
        step_timeout = 100

    one = harness(SseKeepAlive, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    await one.pass_time(50)
    assert not step.done()
    await one.pass_time(51)
    with pytest.raises(StepTimeout):
        await step


async def test_a_hung_step_whose_client_left_is_still_counted(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, step_timeout=10)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    session.close("its client left")
    await asyncio.gather(step, return_exceptions=True)
    await one.pass_time(11)
    assert one.manager.statistics().hung == 1
    lives[0].release.set()
    await session.ended
    assert one.manager.statistics().hung == 0


async def test_the_next_request_waits_for_a_cancelled_thread_step(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    step = asyncio.create_task(one.execute(session, Step(Script(sleep=0.1))))
    await until(lambda: lives[0].steps)
    step.cancel()
    await asyncio.gather(step, return_exceptions=True)
    assert (await one.execute(session, Step(Script(value=2)))).value == 2


async def test_a_slow_state_has_a_deadline_and_blocks_no_other_session(harness: Any, lives: list[Watched]) -> None:
    class SlowState(Adder):
        @property
        def state(self) -> Any:
            self.noted()
            self.release.wait(5)
            return State()

    one = harness(SlowState, step_timeout=10)
    session, other = await one.manager.open(Origin.SOCKET), await one.manager.open(Origin.SOCKET)
    slow = asyncio.create_task(one.execute(session, GetState()))
    await until(lambda: lives[0].steps)
    assert (await one.execute(other, Step(Add(amount=1)))).total == 1
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await slow


# -- failing --------------------------------------------------------------------------------------


class InlineScripted(Scripted):
    inline = True


@pytest.mark.parametrize("make", [Scripted, AsyncScripted, InlineScripted])
async def test_an_exception_reaches_the_caller_as_type_and_text(harness: Any, make: Any, caplog: Any) -> None:
    one = harness(make)
    session = await one.manager.open(Origin.SOCKET)
    with caplog.at_level(logging.ERROR), pytest.raises(EnvironmentFailure) as failure:
        await one.execute(session, Step(Script(fail="password=hunter2 is wrong")))
    assert failure.value.message == "RuntimeError: password=*** is wrong"
    assert failure.value.data["error_type"] == "RuntimeError"
    assert "Traceback" in caplog.text
    assert (await one.execute(session, Step(Script(value=1)))).value == 1


@pytest.mark.parametrize("make", [Scripted, AsyncScripted, InlineScripted])
async def test_system_exit_in_a_step_ends_nothing(harness: Any, make: Any) -> None:
    one = harness(make)
    session = await one.manager.open(Origin.SOCKET)
    with pytest.raises(EnvironmentFailure, match="SystemExit"):
        await one.execute(session, Step(Script(exit=True)))
    assert (await one.execute(session, Step(Script(value=1)))).value == 1


async def test_a_cancelled_error_of_the_environments_own_is_a_failure(harness: Any) -> None:
    class Odd(AsyncScripted):
        async def step(self, action: Script) -> Did:
            raise asyncio.CancelledError

    one = harness(Odd)
    session = await one.manager.open(Origin.SOCKET)
    with pytest.raises(EnvironmentFailure, match="CancelledError"):
        await one.execute(session, Step(Script()))


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_reset_that_lacks_an_argument_is_a_failure(harness: Any, is_async: bool) -> None:
    class Plain(Adder):
        def reset(self, *, level: int) -> Any:  # type: ignore[override]
            return super().reset()

    class Async(Adder):
        async def reset(self, *, level: int) -> Any:  # type: ignore[override]
            return super().reset()

    one = harness(Async if is_async else Plain)
    session = await one.manager.open(Origin.SOCKET)
    with pytest.raises(EnvironmentFailure, match="level"):
        await asyncio.wait_for(one.execute(session, Reset()), 1)
    assert not session.is_running
    assert (await one.execute(session, Reset({"level": 1}))).total == 0


async def test_a_step_that_returns_nothing_is_a_clear_failure(harness: Any) -> None:
    class Forgetful(Adder):
        def step(self, action: Add) -> Any:
            return None

    one = harness(Forgetful)
    session = await one.manager.open(Origin.SOCKET)
    with pytest.raises(EnvironmentFailure, match="NoneType") as failure:
        await one.execute(session, Step(Add(amount=1)))
    assert "attribute" not in failure.value.message


async def test_a_dict_will_do_for_an_observation(harness: Any) -> None:
    class Loose(Adder):
        def step(self, action: Add) -> Any:
            return {"total": 3, "done": True}

    one = harness(Loose)
    session = await one.manager.open(Origin.SOCKET)
    assert (await one.execute(session, Step(Add(amount=1)))) == {"total": 3, "done": True}


async def test_unknown_reset_arguments_are_dropped(harness: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.SOCKET)
    arguments = {
        "seed": 3,
        "self": 1,
        "session_id": "x",
        "func": 2,
        "environment": 3,
        "arguments": 4,
        "sede": 5,
    }
    assert (await one.execute(session, Reset(arguments))).total == 3


async def test_a_reset_with_keywords_gets_all_arguments(harness: Any) -> None:
    class Greedy(Adder):
        def reset(self, **keywords: Any) -> Any:
            return Did(value=sorted(keywords))

    one = harness(Greedy)
    session = await one.manager.open(Origin.SOCKET)
    arguments = {"self": 1, "session_id": "x", "func": 2, "environment": 3}
    assert (await one.execute(session, Reset(arguments))).value == ["environment", "func", "session_id"]


async def test_an_environment_without_state_is_described_by_what_was_counted(harness: Any) -> None:
    one = harness(Scripted)
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Reset({"episode_id": "mine"}))
    await one.execute(session, Step(Script()))
    state = await one.execute(session, GetState())
    assert (state.episode_id, state.step_count) == ("mine", 1)


async def test_a_request_that_waits_for_its_turn_has_a_deadline_too(harness: Any, lives: list[Watched]) -> None:
    one = harness(Scripted, step_timeout=100)
    session = await one.manager.open(Origin.CREATED)
    slow = asyncio.create_task(one.execute(session, Step(Script(hang=True))))
    await until(lambda: lives[0].steps)
    waiting = asyncio.create_task(one.execute(session, GetState(), timeout=2))
    await settled()
    await one.pass_time(2.1)
    with pytest.raises(StepTimeout):
        await asyncio.wait_for(waiting, 1)
    lives[0].release.set()
    await slow


async def test_requests_behind_a_step_that_ignores_its_cancellation_are_answered(
    harness: Any, lives: list[Watched]
) -> None:
    class Stubborn(AsyncScripted):
        async def step(self, action: Script) -> Did:
            self.noted()
            while not self.release.is_set():
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)
            return Did()

    one = harness(Stubborn, step_timeout=10)
    session = await one.manager.open(Origin.CREATED)
    stuck = asyncio.create_task(one.execute(session, Step(Script())))
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await stuck
    behind = asyncio.create_task(one.execute(session, Step(Script())))
    await settled()
    await one.pass_time(11)
    with pytest.raises((SessionBusy, StepTimeout)):
        await asyncio.wait_for(behind, 1)


@pytest.mark.parametrize("kind", ["method", "async method", "async property"])
async def test_state_may_be_a_method_or_async(harness: Any, kind: str) -> None:
    class WithMethod(Adder):
        def state(self) -> Any:  # type: ignore[override]
            return State(step_count=7)

    class WithAsync(Adder):
        async def state(self) -> Any:  # type: ignore[override]
            return State(step_count=7)

    class WithAsyncProperty(Adder):
        @property
        async def state(self) -> Any:  # type: ignore[override]
            return State(step_count=7)

    one = harness({"method": WithMethod, "async method": WithAsync, "async property": WithAsyncProperty}[kind])
    session = await one.manager.open(Origin.SOCKET)
    assert (await one.execute(session, GetState())).step_count == 7


# -- where a step runs ----------------------------------------------------------------------------


async def test_a_plain_step_runs_on_a_thread(harness: Any, lives: list[Watched]) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Step(Add(amount=1)))
    assert lives[0].threads[1].startswith("paddock")


@pytest.mark.parametrize("make", [InlineAdder, AsyncScripted])
async def test_an_inline_or_async_step_runs_on_the_loop(harness: Any, make: Any, lives: list[Watched]) -> None:
    one = harness(make)
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Step(Add(amount=1) if make is InlineAdder else Script()))
    assert lives[0].threads[1] == threading.current_thread().name


class Sluggish(InlineAdder):
    """Inline, but slow by the fake clock."""

    clock: Any = None
    seconds = 0.0

    def step(self, action: Add) -> Any:
        self.clock.advance(self.seconds)
        return super().step(action)


async def test_a_slow_inline_step_is_moved_to_threads(
    harness: Any, clock: Any, lives: list[Watched], caplog: Any
) -> None:
    Sluggish.clock, Sluggish.seconds = clock, 0.02
    one = harness(Sluggish)
    session = await one.manager.open(Origin.SOCKET)
    with caplog.at_level(logging.WARNING):
        for _ in range(6):
            await one.execute(session, Step(Add(amount=1)))
    assert "declared inline" in caplog.text
    assert lives[0].threads[-1].startswith("paddock")
    assert one.spec.step.where is Where.THREAD


async def test_one_very_slow_call_is_enough(harness: Any, clock: Any) -> None:
    Sluggish.clock, Sluggish.seconds = clock, 0.5
    one = harness(Sluggish)
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Step(Add(amount=1)))
    assert one.spec.step.where is Where.THREAD


async def test_a_hiccup_is_forgiven(harness: Any, clock: Any) -> None:
    Sluggish.clock = clock
    one = harness(Sluggish)
    session = await one.manager.open(Origin.SOCKET)
    for n in range(1000):
        Sluggish.seconds = 0.02 if n in (10, 400, 800) else 0.0001
        await one.execute(session, Step(Add(amount=1)))
    assert one.spec.step.where is Where.INLINE


async def test_a_step_that_moves_to_a_thread_keeps_its_order(harness: Any, clock: Any) -> None:
    Sluggish.clock, Sluggish.seconds = clock, 0.5
    one = harness(Sluggish)
    session = await one.manager.open(Origin.SOCKET)
    answers = await asyncio.gather(*(one.execute(session, Step(Add(amount=1))) for _ in range(10)))
    assert [answer.total for answer in answers] == list(range(1, 11))


class Affine(Adder):
    """Holds something that only its own thread may touch."""

    thread_affine = True

    def __init__(self) -> None:
        super().__init__()
        self.database = sqlite3.connect(":memory:")

    def step(self, action: Add) -> Any:
        self.database.execute("select 1")
        return super().step(action)

    def close(self) -> None:
        self.database.close()
        super().close()


class OneThread(Affine):
    REQUIRES_SINGLE_THREAD_EXECUTOR = True


async def test_a_session_with_a_thread_of_its_own_never_leaves_it(harness: Any, lives: list[Watched]) -> None:
    one = harness(Affine)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(2)]
    for session in sessions * 3:
        await one.execute(session, Step(Add(amount=1)))
    for session in sessions:
        session.close("test")
        await session.ended
    threads = [set(life.threads) for life in lives]
    assert [len(names) for names in threads] == [1, 1]


@pytest.mark.parametrize("make", [Affine, OneThread])
async def test_an_abandoned_build_is_closed_on_its_own_thread(
    harness: Any, lives: list[Watched], make: type[Affine]
) -> None:
    class Slow(make):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            time.sleep(0.1)

    one = harness(Slow)
    opening = asyncio.create_task(one.manager.open(Origin.SOCKET))
    await until(lambda: lives)
    opening.cancel()
    await until(lambda: lives[0].closes)
    assert len(set(lives[0].threads)) == 1


async def test_a_thread_of_ones_own_ends_with_the_session(harness: Any) -> None:
    one = harness(Affine)
    session = await one.manager.open(Origin.SOCKET)
    await one.execute(session, Step(Add(amount=1)))
    before = threading.active_count()
    session.close("test")
    await session.ended
    await until(lambda: threading.active_count() < before)


async def test_one_thread_may_serve_all_sessions(harness: Any, lives: list[Watched]) -> None:
    one = harness(OneThread)
    sessions = [await one.manager.open(Origin.SOCKET) for _ in range(3)]
    await asyncio.gather(*(one.execute(session, Step(Add(amount=1))) for session in sessions))
    for session in sessions:
        session.close("test")
        await session.ended
    assert len({name for life in lives for name in life.threads}) == 1


# -- tools ----------------------------------------------------------------------------------------


async def test_a_tool_call_counts_as_a_step(harness: Any) -> None:
    one = harness(Kit)
    session = await one.manager.open(Origin.CREATED)
    await one.execute(session, Reset())
    await one.execute(session, CallTool("add", {"amount": 1}))
    assert (await one.execute(session, GetState())).step_count == 1


async def test_a_tool_call_need_not_count(harness: Any) -> None:
    class Uncounted(Kit):
        mcp_calls_are_steps = False

    one = harness(Uncounted)
    session = await one.manager.open(Origin.CREATED)
    answer = await one.execute(session, CallTool("add", {"amount": 1}))
    assert answer["data"] == 1
    assert (await one.execute(session, GetState())).step_count == 0


@pytest.mark.parametrize("counted", [True, False])
@pytest.mark.parametrize(
    ("name", "arguments", "kind"),
    [
        ("nope", {}, ToolNotFound),
        ("add", {}, InvalidToolArguments),
        ("add", {"amount": "x"}, InvalidToolArguments),
        ("add", {"amount": 1, "more": 2}, InvalidToolArguments),
        ("fail", {"text": "file not found"}, ToolFailure),
        ("fail", {"text": "invalid argument"}, ToolFailure),
    ],
)
async def test_a_failing_tool_says_what_kind_of_failure(
    harness: Any, counted: bool, name: str, arguments: dict[str, Any], kind: type
) -> None:
    make = type("Some", (Kit,), {"mcp_calls_are_steps": counted})
    one = harness(make)
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(ToolFailure) as failure:
        await one.execute(session, CallTool(name, arguments))
    assert type(failure.value) is kind


@pytest.mark.parametrize("counted", [True, False])
async def test_an_unknown_tool_is_reported_with_the_tools_there_are(harness: Any, counted: bool) -> None:
    one = harness(type("Some", (Kit,), {"mcp_calls_are_steps": counted}))
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(ToolNotFound, match="Unknown tool: 'nope'") as failure:
        await one.execute(session, CallTool("nope", {}))
    assert failure.value.hint == f"tools here: {', '.join(Kit.tools)}"


async def test_a_call_that_did_not_run_is_no_step(harness: Any) -> None:
    one = harness(Kit)
    session = await one.manager.open(Origin.CREATED)
    for name in ("nope", "add"):
        with pytest.raises(PaddockError):
            await one.execute(session, CallTool(name, {}))
    assert (await one.execute(session, GetState())).step_count == 0


@pytest.mark.parametrize("counted", [True, False])
async def test_a_tool_may_score_and_end_the_episode(harness: Any, counted: bool) -> None:
    one = harness(type("Some", (Kit,), {"mcp_calls_are_steps": counted}))
    session = await one.manager.open(Origin.CREATED)
    answer = await one.execute(session, CallTool("win", {"points": 2.5}))
    assert answer["_meta"] == {"paddock/reward": 2.5, "paddock/done": True}
    assert answer["data"] == "won"


async def test_tools_go_through_step_as_actions_too(harness: Any) -> None:
    one = harness(Kit)
    session = await one.manager.open(Origin.SOCKET)
    listing = await one.execute(session, Step(ListToolsAction()))
    assert [tool["name"] for tool in listing.tools] == ["add", "pause", "fail", "win", "look"]
    called = await one.execute(session, Step(CallToolAction(tool_name="win", arguments={"points": 1})))
    assert (called.reward, called.done, called.result["data"]) == (1, True, "won")
    failed = await one.execute(session, Step(CallToolAction(tool_name="fail", arguments={"text": "token=abcdef"})))
    assert (failed.error.error_type, failed.error.message) == ("execution_error", "RuntimeError: token=***")


async def test_async_tools_run_on_the_loop_and_plain_ones_beside_them_on_threads(harness: Any) -> None:
    one = harness(AsyncKit)
    session = await one.manager.open(Origin.CREATED)
    name = (await one.execute(session, CallTool("plain", {})))["data"]
    assert name != threading.current_thread().name
    assert (await one.execute(session, CallTool("add", {"amount": 2})))["data"] == 2


@pytest.mark.parametrize(
    "ask", [CallTool("plain", {"hang": True}), Step(CallToolAction(tool_name="plain", arguments={"hang": True}))]
)
async def test_a_plain_tool_beside_async_ones_that_hangs_is_counted_and_keeps_others_out(
    harness: Any, ask: Any, lives: list[Watched]
) -> None:
    one = harness(AsyncKit, step_timeout=10)
    session = await one.manager.open(Origin.CREATED)
    call = asyncio.create_task(one.execute(session, ask))
    await until(lambda: lives[0].steps)
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await call
    assert one.manager.statistics().hung == 1
    with pytest.raises(SessionBusy):
        await one.execute(session, CallTool("plain", {}))
    lives[0].release.set()
    await until(lambda: not session.is_running)
    assert (one.manager.statistics().hung, lives[0].steps) == (0, 1)


async def test_an_error_of_another_session_is_a_failure_of_the_environment(harness: Any) -> None:
    class Nested(Adder):
        def step(self, action: Add) -> Total:
            raise SessionNotFound("Unknown session_id: inner, token=abcdef")

    one = harness(Nested)
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(EnvironmentFailure) as failure:
        await one.execute(session, Step(Add(amount=1)))
    assert failure.value.message == "SessionNotFound: Unknown session_id: inner, token=***"


async def test_what_a_tool_says_of_its_failure_is_masked(harness: Any) -> None:
    class Leaky(ToolEnvironment):
        concurrent_sessions = True

        @tool
        def open(self) -> str:
            raise ToolFailure("password=hunter2")

    one = harness(Leaky)
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(ToolFailure, match=r"password=\*\*\*"):
        await one.execute(session, CallTool("open", {}))
    reply = await one.execute(session, Step(CallToolAction(tool_name="open")))
    assert reply.error.message == "password=***"


async def test_a_hung_async_tool_is_cancelled_at_its_deadline(harness: Any, lives: list[Watched]) -> None:
    one = harness(AsyncKit, step_timeout=10)
    session = await one.manager.open(Origin.CREATED)
    call = asyncio.create_task(one.execute(session, CallTool("hang", {})))
    await settled()
    await one.pass_time(11)
    with pytest.raises(StepTimeout):
        await call
    assert lives[0].cancelled == 1


@pytest.mark.parametrize("request_", [ListTools(), CallTool("t")])
async def test_an_environment_without_tools_says_so(harness: Any, request_: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(NotSupported):
        await one.execute(session, request_)


async def test_a_refused_call_does_not_move_the_episode(harness: Any) -> None:
    one = harness(Adder)
    session = await one.manager.open(Origin.CREATED)
    with pytest.raises(NotSupported):
        await one.execute(session, CallTool("t"))
    assert session.info().phase == "new"


@pytest.mark.parametrize("name", ["step", "step_async"])
async def test_a_tool_environment_may_have_an_async_step_of_its_own(harness: Any, name: str) -> None:
    async def own(self: Any, action: Any) -> Any:
        return Observation(metadata={"mine": True})

    @tool
    def look(self: Any) -> str:
        return "plain"

    make = type("Own", (ToolEnvironment,), {name: own, "look": look, "concurrent_sessions": True})
    one = harness(make)
    session = await one.manager.open(Origin.SOCKET)
    answer = await one.execute(session, Step(CallToolAction(tool_name="look")))
    assert answer.metadata == {"mine": True}


async def test_a_tool_environment_with_async_tools_may_have_a_step_of_its_own(harness: Any) -> None:
    class Own(AsyncKit):
        def step(self, action: Any) -> Any:
            return Observation(metadata={"mine": True})

    one = harness(Own)
    session = await one.manager.open(Origin.SOCKET)
    answer = await one.execute(session, Step(CallToolAction(tool_name="add", arguments={"amount": 1})))
    assert answer.metadata == {"mine": True}


async def test_step_async_wins_over_step_as_in_openenv(harness: Any) -> None:
    class Both(Environment[Script, Did, State]):
        concurrent_sessions = True

        def reset(self, **keywords: Any) -> Did:
            return Did()

        def step(self, action: Script) -> Did:
            return Did(value="sync")

        async def step_async(self, action: Script) -> Did:
            return Did(value="async")

    one = harness(Both)
    session = await one.manager.open(Origin.SOCKET)
    assert (await one.execute(session, Step(Script()))).value == "async"
