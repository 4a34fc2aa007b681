"""Endpoints that break, agents that leave, and what is kept of it."""

import asyncio
import time
from typing import Any

import aiohttp
import pytest

from paddock.rollouts.capture import Upstream
from paddock.rollouts.capture.upstream import Failure, pause
from paddock.rollouts.trace import Level, Role
from rollouts.capture.rig import KEY, rig, run
from rollouts.capture.scripted import Scripted, chunks, cut, hang, held, ok, status, stream_of


@pytest.mark.parametrize("code", [408, 409, 429, 500, 502, 503, 504])
def test_a_passing_failure_is_tried_again_here(code: int) -> None:
    async def body() -> None:
        async with rig(Scripted(status(code, **{"Retry-After": "0"}), ok())) as r:
            got = await r.ask(stream=True)
            call = await r.last()
            assert (got.status, got.said) == (200, "Hello.")
            assert "Retry-After" not in got.headers
            assert [attempt["status"] for attempt in call.attempts] == [code]
            assert call.attempts[0]["ended"] >= call.attempts[0]["started"]
            assert (call.ok, call.level) == (True, Level.TOKENS)
            assert len(r.capture.calls) == 1

    run(body())


def test_a_failure_without_end_is_told_once_in_a_form_that_no_agent_repeats() -> None:
    async def body() -> None:
        async with rig(Scripted(status(500, f"boom {KEY}"))) as r:
            got = await r.ask(stream=True)
            call = await r.last()
            assert got.status == 400
            assert got.error["type"] == "upstream_error"
            assert not any(word in got.text for word in ("boom", "500", "server", "again"))
            assert len(r.model.bodies) == 4
            assert len(call.attempts) == 3
            assert call.error == "boom ***"
            assert r.capture.last_failure == "boom ***"
            r.model.script = [ok()]
            await r.ask("again")
            await r.last()
            assert r.capture.last_failure is None

    run(body())


def test_an_endpoint_that_is_not_there_is_a_failure() -> None:
    async def body() -> None:
        async with rig(Scripted(), attempts=2) as r:
            await r.model._runner.cleanup()
            got = await r.ask()
            call = await r.last()
            assert got.error["type"] == "upstream_error"
            assert call.status is None
            assert len(call.attempts) == 1
            assert r.capture.last_failure

    run(body())


@pytest.mark.parametrize("code", [400, 401, 403, 404, 413, 422])
def test_other_refusals_are_passed_on_at_once(code: int) -> None:
    async def body() -> None:
        async with rig(Scripted(status(code, "no"))) as r:
            got = await r.ask()
            assert (got.status, got.error["message"]) == (code, "no")
            assert len(r.model.bodies) == 1
            assert (await r.last()).error == "no"

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
        async with rig(Scripted(status(400, error))) as r:
            got = await r.ask(stream=True)
            assert (got.status, got.error["code"]) == (400, "context_length_exceeded")
            assert len(r.model.bodies) == 1
            await r.last()
            assert r.capture.last_failure is None

    run(body())


def test_pauses_grow_with_jitter_and_believe_retry_after_up_to_a_cap() -> None:
    from paddock.rollouts.capture import CaptureSettings

    settings = CaptureSettings()
    for failed, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (9, 8.0)):
        assert longest / 2 <= pause(settings, failed, Failure("x")) <= longest
    assert pause(settings, 1, Failure("x", retry_after=3.0)) == 3.0
    assert pause(settings, 1, Failure("x", retry_after=9e9)) == 30.0


def test_a_pause_longer_than_the_call_may_take_is_not_begun() -> None:
    async def body() -> None:
        async with rig(Scripted(status(429, **{"Retry-After": "20"})), call_timeout=5) as r:
            before = time.monotonic()
            assert (await r.ask()).status == 400
            assert time.monotonic() - before < 3

    run(body())


# -- streams that break off ---------------------------------------------------------------------------


@pytest.mark.parametrize("rudely", [False, True])
def test_a_stream_cut_in_the_middle_is_told_as_an_error(rudely: bool) -> None:
    async def body() -> None:
        async with rig(Scripted(cut(3, rudely=rudely))) as r:
            got = await r.ask(stream=True)
            call = await r.last()
            assert "error" in got.chunks[-1]
            assert got.chunks[-1]["error"]["message"].startswith("server error: ")
            assert "[DONE]" not in got.events
            assert call.error is not None
            assert not call.trainable
            assert call.message["content"] == "Hello"
            assert len(r.model.bodies) == 1

    run(body())


def test_a_stream_cut_before_its_first_chunk_is_tried_again() -> None:
    async def body() -> None:
        async with rig(Scripted(cut(0), cut(0, rudely=True), ok())) as r:
            got = await r.ask(stream=True)
            assert got.said == "Hello."
            assert len((await r.last()).attempts) == 2

    run(body())


def test_a_stream_that_is_done_without_a_finish_reason_is_cut() -> None:
    async def body() -> None:
        async with rig(Scripted(stream_of(lambda asked: chunks(asked, finish=None)))) as r:
            got = await r.ask(stream=True)
            assert "error" in got.chunks[-1]
            assert (await r.last()).error

    run(body())


def test_a_finished_stream_without_done_is_complete() -> None:
    async def body() -> None:
        async with rig(Scripted(stream_of(chunks, done=False))) as r:
            got = await r.ask(stream=True)
            assert got.events[-1] == "[DONE]"
            assert (await r.last()).trainable

    run(body())


def test_an_error_in_the_stream_is_tried_again_if_nothing_was_passed() -> None:
    async def body() -> None:
        broken = stream_of(lambda asked: [{"error": {"message": "engine died", "code": 500}}])
        async with rig(Scripted(broken, ok())) as r:
            got = await r.ask(stream=True)
            assert got.said == "Hello."
            assert (await r.last()).attempts[0]["error"] == "engine died"

    run(body())


def test_an_error_in_a_stream_is_passed_on_masked() -> None:
    async def body() -> None:
        error = {"error": {"message": f"died with {KEY}", "code": 500}}
        async with rig(Scripted(stream_of(lambda asked: [*chunks(asked)[:2], error]))) as r:
            got = await r.ask(stream=True)
            call = await r.last()
            assert KEY not in got.text
            assert call.error == "died with ***"

    run(body())


def test_an_agent_that_asks_again_after_a_cut_makes_the_first_call_retried() -> None:
    async def body() -> None:
        async with rig(Scripted(cut(3), ok())) as r:
            await r.ask(stream=True)
            await r.last()
            await r.ask(stream=True)
            await r.last()
            first, second = r.capture.calls
            assert (first.role, second.role) == (Role.RETRIED, Role.AGENT)
            assert r.kept.count(first) == 2
            assert second.trainable

    run(body())


@pytest.mark.parametrize(
    "change", [{"logprobs": "odd"}, {"token_ids": 5}, {"delta": "text"}, {"delta": {"tool_calls": [3]}}]
)
def test_an_answer_of_no_known_shape_is_a_failure(change: dict[str, Any]) -> None:
    def odd(asked: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(asked)
        made[0]["choices"][0] |= change
        return made

    async def body() -> None:
        async with rig(Scripted(stream_of(odd), ok())) as r:
            got = await r.ask(stream=True)
            assert got.said == "Hello."
            assert "shape" in (await r.last()).attempts[0]["error"]

    run(body())


# -- silence ------------------------------------------------------------------------------------------


def test_an_endpoint_that_falls_silent_has_failed() -> None:
    async def body() -> None:
        async with rig(Scripted(hang(), ok()), idle_timeout=0.1) as r:
            got = await r.ask(stream=True)
            assert got.said == "Hello."
            assert "nothing in time" in (await r.last()).attempts[0]["error"]

    run(body())


def test_an_endpoint_that_falls_silent_in_the_middle_ends_the_stream_with_an_error() -> None:
    async def body() -> None:
        async with rig(Scripted(hang(after=2)), idle_timeout=0.1) as r:
            got = await r.ask(stream=True)
            assert "nothing in time" in got.chunks[-1]["error"]["message"]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_takes_too_long_is_ended(stream: bool) -> None:
    async def body() -> None:
        async with rig(Scripted(hang()), call_timeout=0.1) as r:
            got = await r.ask(stream=stream)
            call = await r.last()
            assert got.error["type"] == "upstream_error"
            assert "too long" in (call.error or "")
            assert not call.ok

    run(body())


def test_an_agent_that_waits_for_a_stream_hears_comments() -> None:
    async def body() -> None:
        release = asyncio.Event()
        async with rig(Scripted(held(release), engine="sglang"), keep_alive=0.02) as r:
            headers = {"Authorization": f"Bearer {r.capture.secret}"}
            url = f"{r.url}/v1/chat/completions"
            async with r.session.post(url, json=r.body(stream=True), headers=headers) as response:
                seen = b""
                while seen.count(b": keep-alive\n\n") < 3:
                    seen += await response.content.readany()
                release.set()
                assert b"[DONE]" in await response.content.read()
            assert (await r.last()).trainable

    run(body())


def test_an_agent_that_already_hears_a_stream_gets_its_failure_there() -> None:
    async def body() -> None:
        release = asyncio.Event()
        model = Scripted(held(release, status(500, "boom")), engine="sglang")
        async with rig(model, keep_alive=0.02, attempts=1) as r:
            headers = {"Authorization": f"Bearer {r.capture.secret}"}
            url = f"{r.url}/v1/chat/completions"
            async with r.session.post(url, json=r.body(stream=True), headers=headers) as response:
                await response.content.readany()
                release.set()
                rest = await response.content.read()
            assert b"upstream_error" in rest
            assert b"boom" not in rest
            assert (await r.last()).error == "boom"

    run(body())


# -- leaving ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [hang(), hang(after=2)])
@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_that_leaves_closes_the_call_upstream(step: Any, stream: bool) -> None:
    async def body() -> None:
        async with rig(Scripted(step)) as r:
            asking = asyncio.create_task(r.ask(stream=stream))
            await r.model.waiting.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await r.model.gone.wait()
            call = await r.last()
            assert call.aborted
            assert not call.trainable
            assert r.capture.last_failure is None

    run(body())


def test_an_agent_that_leaves_after_the_end_got_a_whole_answer() -> None:
    async def body() -> None:
        release = asyncio.Event()

        async def step(server: Scripted, request: Any, asked: dict[str, Any]) -> Any:
            from rollouts.capture.scripted import stream as write

            response = await write(request, chunks(asked)[:-1], done=False)
            await release.wait()
            return response

        async with rig(Scripted(step)) as r:
            headers = {"Authorization": f"Bearer {r.capture.secret}"}
            async with r.session.post(
                f"{r.url}/v1/chat/completions", json=r.body(stream=True), headers=headers
            ) as response:
                seen = b""
                while b'"stop"' not in seen:
                    seen += await response.content.readany()
                response.close()
            call = await r.last()
            release.set()
            assert call.ok
            assert call.trainable

    run(body())


def test_stop_cuts_everything_off_and_keeps_every_call() -> None:
    async def body() -> None:
        async with rig(Scripted(hang())) as r:
            asking = [asyncio.create_task(r.ask(str(number), stream=number % 2 == 0)) for number in range(6)]
            await r.until(lambda: len(r.model.bodies) == 6)
            before = time.monotonic()
            await r.capture.stop()
            assert time.monotonic() - before < 1.0
            await r.model.gone.wait()
            assert len(r.kept) == 6
            assert all(call.aborted for call in r.kept)
            results = await asyncio.gather(*asking, return_exceptions=True)
            assert all(isinstance(result, Exception) for result in results)
            with pytest.raises(aiohttp.ClientConnectionError):
                await r.ask()

    run(body())


def test_a_call_that_cannot_be_kept_stops_nothing() -> None:
    async def full(call: Any) -> None:
        raise OSError("no space left")

    async def body() -> None:
        async with rig(Scripted(), on_call=full) as r:
            assert (await r.ask("one")).status == 200
            assert (await r.ask("two")).status == 200
            await r.until(lambda: r.capture.lost is not None)
            assert "no space left" in (r.capture.lost or "")
            assert "no space left" in r.capture.log_tail()

    run(body())


def test_a_slow_keeper_is_waited_for_at_the_end() -> None:
    async def body() -> None:
        release = asyncio.Event()
        kept: list[Any] = []

        async def slow(call: Any) -> None:
            await release.wait()
            kept.append(call)

        async with rig(Scripted(), on_call=slow) as r:
            assert (await r.ask()).status == 200
            stopping = asyncio.create_task(r.capture.stop())
            done, _ = await asyncio.wait({stopping}, timeout=0.3)
            assert not done
            release.set()
            await stopping
            assert len(kept) == 1

    run(body())


def test_a_closed_way_upstream_is_named() -> None:
    from paddock.errors import ModelError
    from paddock.rollouts.models.endpoint import Endpoint

    async def body() -> None:
        with pytest.raises(ModelError, match="closed"):
            await Upstream().engine(Endpoint("http://127.0.0.1:1/v1", "x"))

    run(body())
