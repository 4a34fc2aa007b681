"""When the agent must stop, and how it is told."""

import asyncio
import time

import pytest

from capture.harness import TOOLS, run, start_proxy
from capture.scripted_model import ScriptedModel, answer_after, hang, ok, status
from paddock.limits import Budget


@pytest.mark.parametrize("stream", [False, True])
def test_calls_beyond_the_budget_get_a_plain_stop(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), budget=Budget(calls=2)) as proxy:
            await proxy.chat("one")
            await proxy.chat("two")
            assert proxy.capture.exhausted is None
            got = await proxy.chat("three", stream=stream)
            assert got.status == 200
            if stream:
                assert got.content.startswith("Budget reached")
                assert got.events[-1] == "[DONE]"
                assert any(choice["finish_reason"] == "stop" for chunk in got.chunks for choice in chunk["choices"])
            else:
                choice = got.document["choices"][0]
                assert choice["message"]["content"].startswith("Budget reached")
                assert choice["finish_reason"] == "stop"
            assert proxy.capture.exhausted == "calls"
            assert len(proxy.capture.calls) == len(proxy.model.bodies) == 2

    run(body())


def test_failed_calls_and_titles_do_not_count() -> None:
    async def body() -> None:
        title = [{"role": "system", "content": "You are a title generator. Output only a title."}]
        async with start_proxy(ScriptedModel(status(400, "no"), ok()), budget=Budget(calls=1)) as proxy:
            assert (await proxy.chat("one", tools=TOOLS)).status == 400
            await proxy.chat(messages=title)
            assert (await proxy.chat("two", tools=TOOLS)).document["choices"][0]["message"]["content"] == "Hello."
            await proxy.chat(messages=title)
            assert proxy.capture.exhausted is None
            await proxy.chat("three", tools=TOOLS)
            assert proxy.capture.exhausted == "calls"

    run(body())


def test_side_calls_are_free_but_not_without_end() -> None:
    async def body() -> None:
        title = [{"role": "system", "content": "You are a title generator."}]
        async with start_proxy(ScriptedModel(), budget=Budget(calls=1)) as proxy:
            for _ in range(12):
                await proxy.chat(messages=title)
            assert len(proxy.model.bodies) == 8
            assert proxy.capture.exhausted is None

    run(body())


def test_a_running_call_counts() -> None:
    async def body() -> None:
        release = asyncio.Event()
        async with start_proxy(ScriptedModel(answer_after(release)), budget=Budget(calls=1)) as proxy:
            first = asyncio.create_task(proxy.chat("one"))
            await proxy.model.waiting.wait()
            assert "Budget reached" in (await proxy.chat("two")).text
            release.set()
            assert "Hello." in (await first).text

    run(body())


def test_asking_the_same_again_is_not_a_way_around_the_budget() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), budget=Budget(calls=2)) as proxy:
            for _ in range(4):
                await proxy.chat("same")
            assert len(proxy.model.bodies) == 2

    run(body())


def test_tokens_are_counted_and_clamp_the_next_call() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), budget=Budget(completion_tokens=6, max_tokens_per_call=5)) as proxy:
            for text in ("one", "two", "three"):
                await proxy.chat(text)
            assert [sent["max_tokens"] for sent in proxy.model.bodies] == [5, 2]
            assert proxy.capture.exhausted == "tokens"

    run(body())


def test_past_the_deadline_the_agent_gets_a_stop() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), deadline=time.monotonic() - 1) as proxy:
            assert "Budget reached" in (await proxy.chat()).text
            assert proxy.capture.exhausted == "time"
            assert not proxy.model.paths

    run(body())


def test_a_call_that_runs_into_the_deadline_is_cut_off() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(hang()), deadline=time.monotonic() + 0.1) as proxy:
            await proxy.chat()
            assert (await proxy.last_call()).aborted
            assert proxy.capture.exhausted == "time"

    run(body())
