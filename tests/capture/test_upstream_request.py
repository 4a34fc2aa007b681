"""What goes to the engine, and what an endpoint's refusals teach."""

from typing import Any

import pytest

from capture.harness import TOOLS, run, start_proxy
from capture.scripted_model import ScriptedModel, ok, refusing, refusing_unnamed, status
from paddock.capture.trace import Level
from paddock.capture.upstream import Upstream
from paddock.limits import Budget


def test_sampling_is_neutral_whatever_the_agent_asks() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), temperature=0.7) as proxy:
            bent = {"top_p": 0.5, "top_k": 5, "min_p": 0.2, "repetition_penalty": 1.3, "presence_penalty": 1, "n": 4}
            await proxy.chat(temperature=0.0, mirostat=2, best_of=3, **bent)
            sent = proxy.model.bodies[0]
            assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (1.0, -1, 0.0, 1.0)
            assert (sent["presence_penalty"], sent["frequency_penalty"], sent["temperature"]) == (0.0, 0.0, 0.7)
            assert sent["n"] == 1
            assert not {"mirostat", "best_of"} & sent.keys()
            assert (sent["logprobs"], sent["top_logprobs"], sent["return_token_ids"]) == (True, 1, True)
            call = await proxy.last_call()
            assert call.request["top_p"] == 0.5
            assert call.forwarded == {name: value for name, value in sent.items() if name != "messages"}

    run(body())


@pytest.mark.parametrize(
    ("request_body", "sent"),
    [
        ({}, {"max_tokens": 100}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"max_tokens": 5000}, {"max_tokens": 100}),
        ({"max_completion_tokens": 5000}, {"max_completion_tokens": 100}),
        ({"max_tokens": 200, "max_completion_tokens": 50}, {"max_tokens": 100, "max_completion_tokens": 50}),
        ({"max_tokens": -1}, {"max_tokens": 100}),
        ({"max_tokens": "many"}, {"max_tokens": 100}),
        ({"max_tokens": None}, {"max_tokens": 100}),
    ],
)
def test_the_limit_of_a_call_is_kept(request_body: dict[str, Any], sent: dict[str, int]) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), budget=Budget(max_tokens_per_call=100)) as proxy:
            await proxy.chat(**request_body)
            got = {
                name: value
                for name, value in proxy.model.bodies[0].items()
                if name.startswith("max_") and value is not None
            }
            assert got == sent

    run(body())


@pytest.mark.parametrize("thinking", [True, False, None])
def test_thinking_goes_to_the_template(thinking: bool | None) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), thinking=thinking) as proxy:
            await proxy.chat(chat_template_kwargs={"other": 1})
            expected = {"other": 1} if thinking is None else {"other": 1, "enable_thinking": thinking}
            assert proxy.model.bodies[0]["chat_template_kwargs"] == expected

    run(body())


@pytest.mark.parametrize(
    "constraint",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
        {"response_format": {"type": "json_object"}},
        {"logit_bias": {"5": 10}},
        {"guided_json": {"type": "object"}},
        {"function_call": {"name": "x"}},
    ],
)
def test_constrained_decoding_is_refused(constraint: dict[str, Any]) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(tools=TOOLS, **constraint)
            assert got.status == 400
            assert next(iter(constraint)) in got.error["message"]
            assert not proxy.model.bodies
            assert not proxy.capture.calls

    run(body())


def test_harmless_forms_of_the_same_fields_pass() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat(tools=TOOLS, tool_choice="auto", response_format={"type": "text"}, logit_bias={})
            assert got.status == 200

    run(body())


def test_openai_gets_standard_fields_only() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(engine="openai")) as proxy:
            await proxy.chat()
            sent = proxy.model.bodies[0]
            assert not {"top_k", "min_p", "repetition_penalty", "return_token_ids", "max_tokens"} & sent.keys()
            assert sent["max_completion_tokens"] == 4096
            assert (await proxy.last_call()).level is Level.LOGPROBS

    run(body())


# -- refusals -----------------------------------------------------------------------------------------


def test_a_field_that_is_refused_by_name_is_left_out_and_remembered() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(refusing("return_token_ids", "min_p"), engine="silent")) as proxy:
            assert (await proxy.chat("one")).status == 200
            call = await proxy.last_call()
            assert len(proxy.model.bodies) == 3
            assert [attempt["status"] for attempt in call.attempts] == [400, 400]
            assert call.level is Level.LOGPROBS
            assert proxy.model.bodies[-1]["top_k"] == -1
            await proxy.chat("two")
            assert len(proxy.model.bodies) == 4
            assert not (await proxy.last_call()).attempts

    run(body())


def test_an_unclear_refusal_gives_up_sampling_then_ids_then_logprobs() -> None:
    async def body() -> None:
        model = ScriptedModel(refusing_unnamed("top_k", "return_token_ids", "logprobs"), engine="silent")
        async with start_proxy(model) as proxy:
            assert (await proxy.chat()).status == 200
            steps = [{"top_k", "return_token_ids", "logprobs"} & sent.keys() for sent in model.bodies]
            everything = {"top_k", "return_token_ids", "logprobs"}
            assert steps == [everything, everything - {"top_k"}, {"logprobs"}, set()]
            assert (await proxy.last_call()).level is Level.TEXT

    run(body())


def test_a_refusal_that_nothing_helps_against_is_passed_on_and_teaches_nothing() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(status(400, "unsupported image"), engine="silent")) as proxy:
            got = await proxy.chat()
            assert (got.status, got.error["message"]) == (400, "unsupported image")
            proxy.model.script = [ok()]
            await proxy.chat("again")
            assert (await proxy.last_call()).level is Level.TOKENS

    run(body())


def test_an_engine_that_refuses_ids_in_a_stream_is_called_without_streaming() -> None:
    async def step(server: ScriptedModel, request: Any, request_body: dict[str, Any]) -> Any:
        refused = request_body.get("stream") and request_body.get("return_token_ids")
        reply = status(400, "return_token_ids is not supported with stream=true")
        return await (reply if refused else ok())(server, request, request_body)

    async def body() -> None:
        async with start_proxy(ScriptedModel(step, engine="silent")) as proxy:
            got = await proxy.chat(stream=True)
            assert got.content == "Hello."
            assert (await proxy.last_call()).level is Level.TOKENS
            await proxy.chat("two", stream=True)
            assert len(proxy.model.bodies) == 3

    run(body())


def test_the_other_name_of_the_limit_is_learned() -> None:
    async def body() -> None:
        message = "use max_completion_tokens instead, not"
        async with start_proxy(ScriptedModel(refusing("max_tokens", message=message))) as proxy:
            assert (await proxy.chat(max_tokens=9)).status == 200
            assert proxy.model.bodies[-1]["max_completion_tokens"] == 9
            assert "max_tokens" not in proxy.model.bodies[-1]

    run(body())


# -- which engine -------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_an_engine_is_found_once_and_without_a_completion(engine: str) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(engine=engine)) as proxy:
            await proxy.chat("one")
            await proxy.chat("two")
            assert (await proxy.last_call()).engine == engine
            assert proxy.model.paths.count("/v1/models") == 1
            assert len(proxy.model.bodies) == 2

    run(body())


def test_an_engine_is_found_by_a_path_of_its_own() -> None:
    class Props(ScriptedModel):
        def _tell(self, path: str) -> Any:
            from aiohttp import web

            return web.json_response({"default_generation_settings": {}} if path == "/props" else {})

    async def body() -> None:
        async with start_proxy(Props(engine="llamacpp")) as proxy:
            await proxy.chat()
            assert (await proxy.last_call()).engine == "llamacpp"

    run(body())


def test_a_known_engine_is_not_asked_for() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel(), engine="vllm") as proxy:
            await proxy.chat()
            assert proxy.model.paths == ["/v1/chat/completions"]

    run(body())


def test_rollouts_share_what_was_learned() -> None:
    async def body() -> None:
        async with ScriptedModel(refusing("min_p"), engine="silent") as model, Upstream() as way:
            for expected in (2, 3):
                async with rig_on(model, way) as proxy:
                    await proxy.chat()
                assert len(model.bodies) == expected

    run(body())


def rig_on(model: ScriptedModel, way: Upstream) -> Any:
    class Open:
        """Lets several rigs use one that is already open."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        async def __aenter__(self) -> Any:
            return self.inner

        async def __aexit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    return start_proxy(Open(model), upstream=Open(way))  # type: ignore[arg-type]
