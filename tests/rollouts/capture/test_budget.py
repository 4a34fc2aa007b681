"""When the agent must stop, and how it is told."""

import asyncio
import time

import pytest

from paddock.rollouts.limits import Budget
from rollouts.capture.rig import TOOLS, rig, run
from rollouts.capture.scripted import Scripted, hang, held, ok, status


@pytest.mark.parametrize("stream", [False, True])
def test_calls_beyond_the_budget_get_a_plain_stop(stream: bool) -> None:
    async def body() -> None:
        async with rig(Scripted(), budget=Budget(calls=2)) as r:
            await r.ask("one")
            await r.ask("two")
            assert r.capture.exhausted is None
            got = await r.ask("three", stream=stream)
            assert got.status == 200
            if stream:
                assert got.said.startswith("Budget reached")
                assert got.events[-1] == "[DONE]"
                assert any(choice["finish_reason"] == "stop" for chunk in got.chunks for choice in chunk["choices"])
            else:
                choice = got.document["choices"][0]
                assert choice["message"]["content"].startswith("Budget reached")
                assert choice["finish_reason"] == "stop"
            assert r.capture.exhausted == "calls"
            assert len(r.capture.calls) == len(r.model.bodies) == 2

    run(body())


def test_failed_calls_and_titles_do_not_count() -> None:
    async def body() -> None:
        title = [{"role": "system", "content": "You are a title generator. Output only a title."}]
        async with rig(Scripted(status(400, "no"), ok()), budget=Budget(calls=1)) as r:
            assert (await r.ask("one", tools=TOOLS)).status == 400
            await r.ask(messages=title)
            assert (await r.ask("two", tools=TOOLS)).document["choices"][0]["message"]["content"] == "Hello."
            await r.ask(messages=title)
            assert r.capture.exhausted is None
            await r.ask("three", tools=TOOLS)
            assert r.capture.exhausted == "calls"

    run(body())


def test_side_calls_are_free_but_not_without_end() -> None:
    async def body() -> None:
        title = [{"role": "system", "content": "You are a title generator."}]
        async with rig(Scripted(), budget=Budget(calls=1)) as r:
            for _ in range(12):
                await r.ask(messages=title)
            assert len(r.model.bodies) == 8
            assert r.capture.exhausted is None

    run(body())


def test_a_running_call_counts() -> None:
    async def body() -> None:
        release = asyncio.Event()
        async with rig(Scripted(held(release)), budget=Budget(calls=1)) as r:
            first = asyncio.create_task(r.ask("one"))
            await r.model.waiting.wait()
            assert "Budget reached" in (await r.ask("two")).text
            release.set()
            assert "Hello." in (await first).text

    run(body())


def test_asking_the_same_again_is_not_a_way_around_the_budget() -> None:
    async def body() -> None:
        async with rig(Scripted(), budget=Budget(calls=2)) as r:
            for _ in range(4):
                await r.ask("same")
            assert len(r.model.bodies) == 2

    run(body())


def test_tokens_are_counted_and_clamp_the_next_call() -> None:
    async def body() -> None:
        async with rig(Scripted(), budget=Budget(completion_tokens=6, max_tokens_per_call=5)) as r:
            for text in ("one", "two", "three"):
                await r.ask(text)
            assert [sent["max_tokens"] for sent in r.model.bodies] == [5, 2]
            assert r.capture.exhausted == "tokens"

    run(body())


def test_past_the_deadline_the_agent_is_told_to_stop() -> None:
    async def body() -> None:
        async with rig(Scripted(), deadline=time.monotonic() - 1) as r:
            assert "Budget reached" in (await r.ask()).text
            assert r.capture.exhausted == "time"
            assert not r.model.paths

    run(body())


def test_a_call_that_runs_into_the_deadline_is_cut_off() -> None:
    async def body() -> None:
        async with rig(Scripted(hang()), deadline=time.monotonic() + 0.1) as r:
            await r.ask()
            assert (await r.last()).aborted
            assert r.capture.exhausted == "time"

    run(body())
