"""Endpoints that break, agents that leave, and what is kept of it."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from capture.harness import KEY, run, start_proxy
from capture.scripted_model import ScriptedModel, answer_after, chunks, cut, hang, ok, status, stream_of
from paddock.capture.errors import UpstreamFailure
from paddock.capture.trace import Level, Role
from paddock.capture.upstream import Upstream, retry_pause


@pytest.mark.parametrize("code", [408, 409, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again_here(code: int) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(code, **{"Retry-After": "0"}), ok())) as proxy:
            got = await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert (got.status, got.content) == (200, "Hello.")
            assert "Retry-After" not in got.headers
            assert [attempt["status"] for attempt in call.attempts] == [code]
            assert call.attempts[0]["ended"] >= call.attempts[0]["started"]
            assert (call.ok, call.level) == (True, Level.TOKENS)
            assert len(proxy.capture.calls) == 1

    run(body())


def test_a_lasting_failure_is_sent_once_in_a_form_that_no_agent_retries() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(500, f"boom {KEY}"))) as proxy:
            got = await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert got.status == 400
            assert got.error["type"] == "upstream_error"
            assert not any(word in got.text for word in ("boom", "500", "server", "again"))
            assert len(proxy.model.bodies) == 4
            assert len(call.attempts) == 3
            assert call.error == "boom ***"
            assert proxy.capture.last_failure == "boom ***"
            proxy.model.script = [ok()]
            await proxy.chat("again")
            await proxy.last_call()
            assert proxy.capture.last_failure is None

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_the_engine_gave_up_is_no_answer(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(ok(finish="abort"), ok())) as proxy:
            got = await proxy.chat(stream=stream)
            call = await proxy.last_call()
            if stream:
                assert "the endpoint cut the answer off" in got.text
                assert not call.trainable
                await proxy.chat("hello", stream=True)
                call = await proxy.last_call()
            assert (call.finish_reason, call.trainable) == ("stop", True)
            assert len(call.attempts) == (0 if stream else 1)

    run(body())


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), attempts=2) as proxy:
            await proxy.model._runner.cleanup()
            got = await proxy.chat()
            call = await proxy.last_call()
            assert got.error["type"] == "upstream_error"
            assert call.status is None
            assert len(call.attempts) == 1
            assert proxy.capture.last_failure

    run(body())


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
def test_other_refusals_are_passed_on_at_once(code: int) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(code, "no"))) as proxy:
            got = await proxy.chat()
            assert (got.status, got.error["message"]) == (code, "no")
            assert len(proxy.model.bodies) == 1
            assert (await proxy.last_call()).error == "no"

    run(body())


@pytest.mark.parametrize(
    "error",
    [
        {"message": "too long", "type": "invalid_request_error", "code": "context_length_exceeded"},
        {"message": "request (9 tokens) exceeds", "type": "exceed_context_size_error", "code": 400},
        {"message": "This model's maximum context length is 8 tokens.", "type": "BadRequestError", "code": 400},
    ],
)
def test_a_full_context_arrives_with_its_code(error: dict[str, Any]) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(400, error))) as proxy:
            got = await proxy.chat(stream=True)
            assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
            assert len(proxy.model.bodies) == 1
            await proxy.last_call()
            assert proxy.capture.last_failure is None

    run(body())


def test_pauses_grow_with_jitter_and_follow_retry_after_up_to_a_limit() -> None:
    from paddock.capture.settings import CaptureSettings

    settings = CaptureSettings()
    for failures, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (9, 8.0)):
        assert 0.0 <= retry_pause(settings, failures, UpstreamFailure("x")) <= longest
    assert retry_pause(settings, 1, UpstreamFailure("x", retry_after=3.0)) == 3.0
    assert retry_pause(settings, 1, UpstreamFailure("x", retry_after=9e9)) == 30.0


def test_a_pause_longer_than_the_call_may_take_is_not_begun() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(429, **{"Retry-After": "20"})), call_timeout=5) as proxy:
            before = time.monotonic()
            assert (await proxy.chat()).status == 400
            assert time.monotonic() - before < 3

    run(body())


# -- streams that break off ---------------------------------------------------------------------------


@pytest.mark.parametrize("abort", [False, True])
def test_a_stream_cut_in_the_middle_ends_with_an_error(abort: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(cut(3, abort=abort))) as proxy:
            got = await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert "error" in got.chunks[-1]
            assert got.chunks[-1]["error"]["message"].startswith("server error: ")
            assert "[DONE]" not in got.events
            assert call.error is not None
            assert not call.trainable
            assert call.message["content"] == "Hello"
            assert len(proxy.model.bodies) == 1

    run(body())


def test_a_stream_cut_before_its_first_chunk_is_tried_again() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(cut(0), cut(0, abort=True), ok())) as proxy:
            got = await proxy.chat(stream=True)
            assert got.content == "Hello."
            assert len((await proxy.last_call()).attempts) == 2

    run(body())


def test_a_stream_that_is_done_without_a_finish_reason_is_cut() -> None:
    async def body() -> None:
        async with start_proxy(
            ScriptedModel(stream_of(lambda request_body: chunks(request_body, finish=None)))
        ) as proxy:
            got = await proxy.chat(stream=True)
            assert "error" in got.chunks[-1]
            assert (await proxy.last_call()).error

    run(body())


def test_a_finished_stream_without_done_is_complete() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(chunks, done=False))) as proxy:
            got = await proxy.chat(stream=True)
            assert got.events[-1] == "[DONE]"
            assert (await proxy.last_call()).trainable

    run(body())


def test_an_error_in_the_stream_is_tried_again_if_nothing_was_passed() -> None:
    async def body() -> None:
        broken = stream_of(lambda request_body: [{"error": {"message": "engine died", "code": 500}}])
        async with start_proxy(ScriptedModel(broken, ok())) as proxy:
            got = await proxy.chat(stream=True)
            assert got.content == "Hello."
            assert (await proxy.last_call()).attempts[0]["error"] == "engine died"

    run(body())


def test_an_error_in_a_stream_is_passed_on_masked() -> None:
    async def body() -> None:
        error = {"error": {"message": f"died with {KEY}", "code": 500}}
        async with start_proxy(
            ScriptedModel(stream_of(lambda request_body: [*chunks(request_body)[:2], error]))
        ) as proxy:
            got = await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert KEY not in got.text
            assert call.error == "died with ***"

    run(body())


def test_an_agent_that_asks_again_after_a_cut_makes_the_first_call_retried() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(cut(3), ok())) as proxy:
            await proxy.chat(stream=True)
            await proxy.last_call()
            await proxy.chat(stream=True)
            await proxy.last_call()
            first, second = proxy.capture.calls
            assert (first.role, second.role) == (Role.RETRIED, Role.AGENT)
            assert proxy.recorded.count(first) == 2
            assert second.trainable

    run(body())


@pytest.mark.parametrize(
    "change", [{"logprobs": "odd"}, {"token_ids": 5}, {"delta": "text"}, {"delta": {"tool_calls": [3]}}]
)
def test_an_answer_of_no_known_shape_is_a_failure(change: dict[str, Any]) -> None:
    def odd(request_body: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(request_body)
        made[0]["choices"][0] |= change
        return made

    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(odd), ok())) as proxy:
            got = await proxy.chat(stream=True)
            assert got.content == "Hello."
            assert "unexpected form" in (await proxy.last_call()).attempts[0]["error"]

    run(body())


# -- silence ------------------------------------------------------------------------------------------


def test_an_endpoint_that_falls_silent_has_failed() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(hang(), ok()), idle_timeout=0.1) as proxy:
            got = await proxy.chat(stream=True)
            assert got.content == "Hello."
            assert "nothing in time" in (await proxy.last_call()).attempts[0]["error"]

    run(body())


def test_an_endpoint_that_falls_silent_in_the_middle_ends_the_stream_with_an_error() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(hang(after=2)), idle_timeout=0.1) as proxy:
            got = await proxy.chat(stream=True)
            assert "nothing in time" in got.chunks[-1]["error"]["message"]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_takes_too_long_is_ended(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(hang()), call_timeout=0.1) as proxy:
            got = await proxy.chat(stream=stream)
            call = await proxy.last_call()
            assert got.error["type"] == "upstream_error"
            assert "too long" in (call.error or "")
            assert not call.ok

    run(body())


def test_an_agent_that_waits_for_a_stream_gets_comments() -> None:
    async def body() -> None:
        release = asyncio.Event()
        async with start_proxy(ScriptedModel(answer_after(release), engine="sglang"), keep_alive=0.02) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            url = f"{proxy.url}/v1/chat/completions"
            async with proxy.session.post(url, json=proxy.body(stream=True), headers=headers) as response:
                seen = b""
                while seen.count(b": keep-alive\n\n") < 3:
                    seen += await response.content.readany()
                release.set()
                assert b"[DONE]" in await response.content.read()
            assert (await proxy.last_call()).trainable

    run(body())


def test_a_failure_after_the_stream_began_is_sent_in_it() -> None:
    async def body() -> None:
        release = asyncio.Event()
        model = ScriptedModel(answer_after(release, status(500, "boom")), engine="sglang")
        async with start_proxy(model, keep_alive=0.02, attempts=1) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            url = f"{proxy.url}/v1/chat/completions"
            async with proxy.session.post(url, json=proxy.body(stream=True), headers=headers) as response:
                await response.content.readany()
                release.set()
                rest = await response.content.read()
            assert b"upstream_error" in rest
            assert b"boom" not in rest
            assert (await proxy.last_call()).error == "boom"

    run(body())


# -- leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [hang(), hang(after=2)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_leaves_closes_the_call_upstream(step: Any, stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(step)) as proxy:
            asking = asyncio.create_task(proxy.chat(stream=stream))
            await proxy.model.waiting.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await proxy.model.disconnected.wait()
            call = await proxy.last_call()
            assert call.aborted
            assert not call.trainable
            assert proxy.capture.last_failure is None

    run(body())


def test_an_agent_that_leaves_after_the_end_got_a_whole_answer() -> None:
    async def body() -> None:
        release = asyncio.Event()

        async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
            from capture.scripted_model import stream as write

            response = await write(request, chunks(request_body)[:-1], done=False)
            await release.wait()
            return response

        async with start_proxy(ScriptedModel(step)) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            async with proxy.session.post(
                f"{proxy.url}/v1/chat/completions", json=proxy.body(stream=True), headers=headers
            ) as response:
                seen = b""
                while b'"stop"' not in seen:
                    seen += await response.content.readany()
                response.close()
            call = await proxy.last_call()
            release.set()
            assert call.ok
            assert call.trainable

    run(body())


def test_stop_cuts_everything_off_and_keeps_every_call() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(hang())) as proxy:
            asking = [asyncio.create_task(proxy.chat(str(number), stream=number % 2 == 0)) for number in range(6)]
            await proxy.wait_until(lambda: len(proxy.model.bodies) == 6)
            before = time.monotonic()
            await proxy.capture.stop()
            assert time.monotonic() - before < 1.0
            await proxy.model.disconnected.wait()
            assert len(proxy.recorded) == 6
            assert all(call.aborted for call in proxy.recorded)
            results = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(result, Exception) for result in results)
            with pytest.raises(aiohttp.ClientConnectionError):
                await proxy.chat()

    run(body())


def test_a_call_that_cannot_be_kept_stops_nothing() -> None:
    async def full(call: Any) -> None:
        raise OSError("no space left")

    async def body() -> None:
        async with start_proxy(ScriptedModel(), on_call=full) as proxy:
            assert (await proxy.chat("one")).status == 200
            assert (await proxy.chat("two")).status == 200
            await proxy.wait_until(lambda: proxy.capture.storage_error is not None)
            assert "no space left" in (proxy.capture.storage_error or "")
            assert "no space left" in proxy.capture.log_tail()

    run(body())


def test_a_slow_keeper_is_waited_for_at_the_end() -> None:
    async def body() -> None:
        release = asyncio.Event()
        collected: list[Any] = []

        async def slow(call: Any) -> None:
            await release.wait()
            collected.append(call)

        async with start_proxy(ScriptedModel(), on_call=slow) as proxy:
            assert (await proxy.chat()).status == 200
            stopping = asyncio.create_task(proxy.capture.stop())
            done, _ = await asyncio.wait({stopping}, timeout=0.3)
            assert not done
            release.set()
            await stopping
            assert len(collected) == 1

    run(body())


def test_a_closed_way_upstream_is_named() -> None:
    from paddock.errors import ModelError
    from paddock.models.endpoint import Endpoint

    async def body() -> None:
        with pytest.raises(ModelError, match="closed"):
            await Upstream().detect_engine(Endpoint("http://127.0.0.1:1/v1", "x"))

    run(body())
