"""Pauses, seen by an agent and by the engine: who waits, what is asked again, and which version a call has."""

import asyncio
import json
import time
from typing import Any

import pytest

from capture.harness import ProxyUnderTest, run, start_proxy
from capture.scripted_model import ScriptedModel, answer_after, chunks, hang, ok, status
from capture.scripted_model import stream as write
from paddock.capture.gate import AttemptAborted, CallGate, PauseReport
from paddock.errors import ConfigError
from paddock.models.weight_version import Weights


async def until_waiting(proxy: ProxyUnderTest) -> None:
    await proxy.wait_until(lambda: proxy.capture.paused.is_paused)


def stream_in_two(release: asyncio.Event) -> Any:
    """The first half of a stream, and the rest after the event."""

    async def step(server: ScriptedModel, request: Any, body: dict[str, Any]) -> Any:
        pieces = chunks(body)
        response = await write(request, pieces[:3], done=False)
        server.waiting.set()
        await release.wait()
        for piece in pieces[3:]:
            await response.write(b"data: " + json.dumps(piece).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    return step


@pytest.mark.parametrize("stream", [False, True])
def test_a_new_call_waits_and_gets_the_new_version(stream: bool) -> None:
    async def body() -> None:
        gate, weights = CallGate(), Weights(1)
        async with start_proxy(ScriptedModel(), gate=gate, weights=weights) as proxy:
            assert await gate.pause() == PauseReport(in_flight=0)
            asking = asyncio.create_task(proxy.chat(stream=stream))
            await until_waiting(proxy)
            assert (proxy.model.paths, gate.in_flight) == ([], 0)
            weights.set(2)
            gate.resume()
            assert (await asking).status == 200
            call = await proxy.last_call()
            assert (call.admitted_version, call.weight_version, call.attempts) == ("2", "2", [])
            assert call.trainable
            assert 0 < call.paused_seconds == pytest.approx(proxy.capture.paused.seconds, abs=0.1)

    run(body())


def test_a_call_at_the_engine_finishes_before_the_pause_begins() -> None:
    async def body() -> None:
        gate, weights, release = CallGate(), Weights(1), asyncio.Event()
        async with start_proxy(ScriptedModel(answer_after(release)), gate=gate, weights=weights) as proxy:
            asking = asyncio.create_task(proxy.chat(stream=True))
            await proxy.model.waiting.wait()
            pausing = asyncio.create_task(gate.pause())
            await proxy.wait_until(lambda: gate.is_paused)
            assert not pausing.done()
            release.set()
            assert await pausing == PauseReport(in_flight=0, finished=1)
            weights.set(2)
            await asking
            call = await proxy.last_call()
            assert (call.weight_version, call.attempts, call.paused_seconds) == ("1", [], 0.0)

    run(body())


def test_a_stalled_call_is_reported_at_the_timeout_and_the_gate_stays_closed() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(hang()), gate=gate) as proxy:
            asking = asyncio.create_task(proxy.chat())
            await proxy.model.waiting.wait()
            assert await gate.pause(timeout=0.05) == PauseReport(in_flight=1)
            assert gate.is_paused
            asking.cancel()
            await proxy.wait_until(lambda: gate.in_flight == 0)

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_an_aborted_call_is_asked_again_and_the_agent_gets_one_answer(stream: bool) -> None:
    async def body() -> None:
        gate, weights = CallGate(), Weights(1)
        async with start_proxy(ScriptedModel(hang(), ok()), gate=gate, weights=weights) as proxy:
            asking = asyncio.create_task(proxy.chat(stream=stream))
            await proxy.model.waiting.wait()
            assert await gate.pause("abort") == PauseReport(in_flight=0, aborted=1)
            await proxy.model.disconnected.wait()
            await until_waiting(proxy)
            weights.set(2)
            gate.resume()
            answer = await asking
            assert answer.status == 200
            assert (answer.content if stream else answer.document["choices"][0]["message"]["content"]) == "Hello."
            call = await proxy.last_call()
            assert (call.admitted_version, call.weight_version, call.trainable) == ("2", "2", True)
            assert [attempt["status"] for attempt in call.attempts] == [None]
            assert "pause" in call.attempts[0]["error"]
            assert proxy.model.bodies[0] == proxy.model.bodies[1]
            assert len(proxy.capture.calls) == 1

    run(body())


def test_an_aborted_stream_that_has_reached_the_agent_finishes() -> None:
    async def body() -> None:
        gate, weights, release = CallGate(), Weights(1), asyncio.Event()
        async with start_proxy(ScriptedModel(stream_in_two(release)), gate=gate, weights=weights) as proxy:
            asking = asyncio.create_task(proxy.chat(stream=True))
            await proxy.wait_until(lambda: bool(proxy.capture.calls and proxy.capture.calls[0].first_token))
            pausing = asyncio.create_task(gate.pause("abort"))
            await proxy.wait_until(lambda: gate.is_paused)
            release.set()
            assert await pausing == PauseReport(in_flight=0, finished=1)
            assert (await asking).content == "Hello."
            call = await proxy.last_call()
            assert (call.weight_version, call.attempts) == ("1", [])

    run(body())


def test_a_pause_counts_for_no_timeout_and_not_as_the_endpoints_silence() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(hang(), ok()), gate=gate, call_timeout=10) as proxy:
            asking = asyncio.create_task(proxy.chat())
            await proxy.model.waiting.wait()
            await asyncio.sleep(1.0)
            await gate.pause("abort")
            gate.resume()
            await asking
            await proxy.last_call()
            (summary,) = proxy.capture.summaries()
            assert summary.attempt_began is not None
            assert summary.attempt_began - summary.began < 0.7
            assert proxy.capture.paused.seconds >= 1.0

    run(body())


def test_a_call_waits_longer_than_its_own_timeout() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(), gate=gate, call_timeout=1.5) as proxy:
            await gate.pause()
            asking = asyncio.create_task(proxy.chat())
            await until_waiting(proxy)
            await asyncio.sleep(1.7)
            gate.resume()
            assert (await asking).status == 200

    run(body())


def test_an_agent_that_waits_in_a_pause_gets_keep_alives() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(engine="sglang"), gate=gate, keep_alive=0.02) as proxy:
            await gate.pause()
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            url = f"{proxy.url}/v1/chat/completions"
            async with proxy.session.post(url, json=proxy.body(stream=True), headers=headers) as response:
                seen = b""
                while seen.count(b": keep-alive\n\n") < 3:
                    seen += await response.content.readany()
                gate.resume()
                assert b"[DONE]" in await response.content.read()
            assert (await proxy.last_call()).trainable

    run(body())


def test_a_pause_that_is_too_long_is_the_reason_of_the_failure() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(), gate=gate, unary_pause_timeout=0.05) as proxy:
            await gate.pause()
            answer = await proxy.chat()
            assert (answer.status, answer.error["type"]) == (400, "upstream_error")
            assert (await proxy.last_call()).error == "the model was paused for longer than 0.05 s"
            assert proxy.capture.last_failure == "the model was paused for longer than 0.05 s"
            assert proxy.model.paths == []

    run(body())


def test_a_count_of_tokens_waits_too() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(), gate=gate) as proxy:
            await gate.pause()
            raw = json.dumps({**proxy.body(), "max_tokens": 5}).encode()
            asking = asyncio.create_task(proxy.post(raw, "/v1/messages/count_tokens"))
            await until_waiting(proxy)
            assert proxy.model.paths == []
            gate.resume()
            assert (await asking).document["input_tokens"] > 0

    run(body())


def test_a_retry_waits_for_the_end_of_the_pause() -> None:
    async def body() -> None:
        gate, release = CallGate(), asyncio.Event()
        model = ScriptedModel(answer_after(release, status(500)), ok())
        async with start_proxy(model, gate=gate) as proxy:
            asking = asyncio.create_task(proxy.chat())
            await proxy.model.waiting.wait()
            pausing = asyncio.create_task(gate.pause())
            await proxy.wait_until(lambda: gate.is_paused)
            release.set()
            await pausing
            await until_waiting(proxy)
            assert len(proxy.model.bodies) == 1
            gate.resume()
            assert (await asking).status == 200

    run(body())


@pytest.mark.parametrize("in_flight", ["finish", "abort"])
def test_a_proxy_that_stops_during_a_pause_stops_at_once(in_flight: Any) -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(), gate=gate) as proxy:
            await gate.pause(in_flight)
            asking = asyncio.create_task(proxy.chat())
            await until_waiting(proxy)
            began = time.monotonic()
            await proxy.capture.stop()
            assert time.monotonic() - began < 4
            await asyncio.gather(asking, return_exceptions=True)
            assert proxy.capture.calls[0].aborted
            assert not proxy.capture.paused.is_paused

    run(body())


async def send_after_abort(gate: CallGate) -> None:
    async with gate.attempt() as attempt:
        assert attempt.abort()
        await attempt.commit()


def test_an_answer_that_arrives_after_the_abort_is_not_sent() -> None:
    async def body() -> None:
        gate = CallGate()
        async with gate.attempt() as attempt:
            await attempt.commit()
            assert not attempt.abort()
            await asyncio.sleep(0)
        with pytest.raises(AttemptAborted):
            await send_after_abort(gate)

    run(body())


def test_pauses_are_counted() -> None:
    async def body() -> None:
        gate = CallGate()
        await gate.pause()
        await gate.pause()
        gate.resume()
        assert gate.is_paused
        gate.resume()
        assert not gate.is_paused
        with pytest.raises(ConfigError, match="not paused"):
            gate.resume()
        with pytest.raises(ConfigError, match="in_flight"):
            await gate.pause("drop")  # type: ignore[arg-type]

    run(body())


def test_a_pause_that_is_cancelled_leaves_the_gate_open() -> None:
    async def body() -> None:
        gate = CallGate()
        async with start_proxy(ScriptedModel(hang()), gate=gate) as proxy:
            asking = asyncio.create_task(proxy.chat())
            await proxy.model.waiting.wait()
            pausing = asyncio.create_task(gate.pause())
            await proxy.wait_until(lambda: gate.is_paused)
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)
            assert not gate.is_paused
            asking.cancel()

    run(body())
