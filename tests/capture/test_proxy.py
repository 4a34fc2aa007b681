"""What is kept of a call, and what the agent sees of it."""

import asyncio
from typing import Any

import pytest

from capture.harness import TOOLS, run, start_proxy
from capture.scripted_model import CAPTURE_FIELDS, IDS, LOGPROBS, PROMPT_IDS, ScriptedModel, chunks, ok, stream_of
from paddock.capture.trace import Level
from paddock.limits import Budget


@pytest.mark.parametrize("stream", [False, True])
def test_a_vllm_call_is_kept_token_by_token(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(stream=stream)
            call = await proxy.last_call()
            assert got.status == 200
            assert (call.prompt_token_ids, call.completion_token_ids, call.logprobs) == (PROMPT_IDS, IDS, LOGPROBS)
            assert (call.level, call.engine, call.model, call.status) == (Level.TOKENS, "vllm", "real", 200)
            assert call.message == {"role": "assistant", "content": "Hello."}
            assert call.tokens == ["Hel", "lo", ".", ""]
            assert call.top_logprobs[0] == {"x": -2.0}
            assert (call.finish_reason, call.usage["completion_tokens"]) == ("stop", 4)
            assert call.trainable
            assert call.first_token is not None
            assert call.ended is not None
            assert call.started <= call.first_token <= call.ended

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_the_agent_sees_no_ids_no_logprobs_and_its_own_model_name(stream: bool) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(stream=stream)
            assert not any(word in got.text for word in CAPTURE_FIELDS)
            assert '"policy"' in got.text
            assert '"real"' not in got.text

    run(body())


def test_a_stream_passes_whole_and_in_order() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(stream=True, stream_options={"include_usage": True})
            assert got.content == "Hello."
            assert got.chunks[-1]["usage"]["total_tokens"] == 9
            assert got.events[-1] == "[DONE]"
            assert got.headers["Content-Type"].startswith("text/event-stream")

    run(body())


def test_usage_is_asked_of_the_engine_and_kept_from_an_agent_that_did_not_ask() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(stream=True)
            assert proxy.model.bodies[0]["stream_options"] == {"include_usage": True}
            assert all(chunk["choices"] for chunk in got.chunks)
            assert (await proxy.last_call()).usage["total_tokens"] == 9

    run(body())


def test_chunks_pass_before_the_answer_is_complete() -> None:
    async def body() -> None:
        release = asyncio.Event()

        async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
            from capture.scripted_model import stream as write

            response = await write(request, chunks(request_body)[:2], done=False)
            await release.wait()
            for piece in (b'{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}', b"[DONE]"):
                await response.write(b"data: " + piece + b"\n\n")
            return response

        async with start_proxy(ScriptedModel(step)) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            url = f"{proxy.url}/chat/completions"
            async with proxy.session.post(url, json=proxy.body(stream=True), headers=headers) as response:
                first = b""
                while b"Hel" not in first:
                    first += await response.content.readany()
                assert not proxy.recorded
                release.set()
                assert (await response.content.read()).endswith(b"data: [DONE]\n\n")

    run(body())


def test_sglang_is_called_without_streaming_and_answered_as_a_stream() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(ok(tool="bash"), engine="sglang")) as proxy:
            got = await proxy.chat(stream=True, tools=TOOLS, stream_options={"include_usage": True})
            call = await proxy.last_call()
            assert proxy.model.bodies[0]["stream"] is False
            assert "stream_options" not in proxy.model.bodies[0]
            assert got.content == "Hello."
            calls = [
                each for chunk in got.chunks for c in chunk["choices"] for each in c["delta"].get("tool_calls", ())
            ]
            assert calls[0]["index"] == 0
            assert calls[0]["function"]["name"] == "bash"
            assert got.chunks[-2]["choices"][0]["finish_reason"] == "stop"
            assert got.chunks[-1]["usage"]["total_tokens"] == 9
            assert got.events[-1] == "[DONE]"
            assert (call.level, call.weight_version) == (Level.TOKENS, "step-7")
            assert call.message["tool_calls"][0]["function"]["arguments"] == '{"command":"ls"}'

    run(body())


def test_llamacpp_prompt_ids_come_from_its_own_tokenizer() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(engine="llamacpp")) as proxy:
            got = await proxy.chat(stream=True, tools=TOOLS)
            call = await proxy.last_call()
            assert got.content == "Hello."
            assert {"/apply-template", "/tokenize"} <= set(proxy.model.paths)
            assert (call.prompt_token_ids, call.completion_token_ids) == (PROMPT_IDS, IDS)
            assert call.level is Level.TOKENS
            assert proxy.model.bodies[0]["top_logprobs"] == 1
            assert "return_token_ids" not in proxy.model.bodies[0]

    run(body())


def test_prompt_ids_that_the_engine_did_not_count_are_not_believed() -> None:
    async def body() -> None:
        usage = {"prompt_tokens": 6, "completion_tokens": 4}
        async with start_proxy(ScriptedModel(ok(usage=usage), engine="llamacpp")) as proxy:
            await proxy.chat()
            call = await proxy.last_call()
            assert call.prompt_token_ids == []
            assert call.level is Level.LOGPROBS
            assert not call.trainable

    run(body())


def test_a_missing_logprob_makes_a_call_untrainable() -> None:
    def missing(request_body: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(request_body)
        made[2]["choices"][0]["logprobs"]["content"][0]["logprob"] = -9999.0
        return made

    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(missing))) as proxy:
            await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert len(call.logprobs) == len(IDS) - 1
            assert call.level is Level.LOGPROBS
            assert not call.trainable

    run(body())


def test_ids_fewer_than_the_engine_counted_are_not_kept_as_the_answer() -> None:
    def short(request_body: dict[str, Any]) -> list[dict[str, Any]]:
        made = chunks(request_body)
        del made[4]["choices"][0]["token_ids"], made[4]["choices"][0]["logprobs"]
        return made

    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(short))) as proxy:
            await proxy.chat(stream=True)
            call = await proxy.last_call()
            assert call.level is Level.LOGPROBS
            assert not call.trainable

    run(body())


def test_a_streamed_tool_call_is_put_together() -> None:
    def pieces(request_body: dict[str, Any]) -> list[dict[str, Any]]:
        def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}

        first = {"index": 0, "id": "c", "type": "function", "function": {"name": "bash", "arguments": ""}}
        second = {"index": 0, "function": {"arguments": '{"command":'}}
        third = {"index": 0, "function": {"arguments": '"ls"}'}}
        made = [
            chunk({"role": "assistant", "reasoning": "thinking"}),
            *(chunk({"tool_calls": [x]}) for x in (first, second, third)),
        ]
        return [*made, chunk({}, "tool_calls")]

    async def body() -> None:
        async with start_proxy(ScriptedModel(stream_of(pieces))) as proxy:
            await proxy.chat(stream=True)
            message = (await proxy.last_call()).message
            assert message["tool_calls"][0]["function"] == {"name": "bash", "arguments": '{"command":"ls"}'}
            assert message["tool_calls"][0]["id"] == "c"
            assert message["reasoning_content"] == "thinking"

    run(body())


def test_a_black_box_changes_only_the_name_and_the_limit() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), mode="black_box", budget=Budget(max_tokens_per_call=50)) as proxy:
            values = {"top_p": 0.5, "max_tokens": 900, "tool_choice": "required", "tools": TOOLS, "logprobs": True}
            got = await proxy.chat(**values)
            call = await proxy.last_call()
            assert proxy.model.bodies[0] == {**proxy.body(), **values, "model": "real", "max_tokens": 50}
            assert call.level is Level.TEXT
            assert "logprobs" in got.text
            assert not call.trainable

    run(body())


def test_the_weight_version_may_come_in_a_header() -> None:
    async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
        response = await ok()(server, request, request_body)
        response.headers["x-weight-version"] = "41"
        return response

    async def body() -> None:
        async with start_proxy(ScriptedModel(step)) as proxy:
            await proxy.chat()
            assert (await proxy.last_call()).weight_version == "41"

    run(body())


def test_a_call_is_linked_to_the_one_it_continues() -> None:
    async def body() -> None:
        longer = [*PROMPT_IDS, *IDS, 77]
        async with start_proxy(
            ScriptedModel(ok(), ok(prompt_token_ids=longer), ok(prompt_token_ids=[9, 9]))
        ) as proxy:
            for text in ("one", "two", "three"):
                await proxy.chat(text)
                await proxy.last_call()
            first, second, third = proxy.capture.calls
            assert (first.parent, second.parent, second.shared_tokens) == (None, "c0", len(PROMPT_IDS) + len(IDS))
            assert third.parent is None

    run(body())


def test_a_large_body_passes() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat("x" * 3_000_000)
            assert got.status == 200
            assert len(proxy.model.bodies[0]["messages"][0]["content"]) == 3_000_000

    run(body())


@pytest.mark.parametrize(
    ("engine", "kind"), [("vllm", "raw"), ("sglang", "processed"), ("llamacpp", "raw"), ("x", "unknown")]
)
def test_the_temperature_and_the_kind_of_logprobs_are_kept(engine: str, kind: str) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(engine=engine), temperature=0.5) as proxy:
            await proxy.chat(temperature=0.9)
            call = await proxy.last_call()
            assert proxy.model.bodies[0]["temperature"] == 0.5
            assert (call.temperature, call.logprobs_kind) == (0.5, kind)

    run(body())


def test_a_temperature_that_is_left_to_the_endpoint_is_none() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), temperature=None) as proxy:
            await proxy.chat()
            assert (await proxy.last_call()).temperature is None

    run(body())
