"""Every form of a model, and every way to write one wrong."""

import asyncio
import json
from base64 import b64encode
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from paddock.errors import ConfigError, ModelError, PaddockError
from paddock.models import Endpoint, open_model
from paddock.models.endpoint import parse_model_url
from paddock.models.replay import ReplayServer

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PADDOCK_MODEL_API_KEY", "OPENAI_API_KEY", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def opened(spec: str, **options: Any) -> Endpoint:
    async def run() -> Endpoint:
        async with open_model(spec, **options) as endpoint:
            return endpoint

    return asyncio.run(asyncio.wait_for(run(), 20))


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "url"),
    [
        ("http://host", "http://host/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/v1", "https://host/v1"),
        ("https://host/api/v3/", "https://host/api/v3"),
        ("http://host/v1/chat/completions", "http://host/v1"),
        ("http://[::1]:8000", "http://[::1]:8000/v1"),
    ],
)
def test_an_address_becomes_a_base(written: str, url: str) -> None:
    endpoint = opened(written, name="m")
    assert (endpoint.url, endpoint.name, endpoint.label) == (url, "m", written)


def test_a_user_and_password_become_a_header_and_are_masked() -> None:
    endpoint = opened(f"http://me:{SECRET}%21@host:8000", name="m")
    assert endpoint.url == "http://host:8000/v1"
    assert endpoint.headers == {"Authorization": f"Basic {b64encode(b'me:s3cr3t!').decode()}"}
    assert endpoint.label == "http://***@host:8000"
    assert SECRET not in repr(endpoint)
    assert SECRET not in repr(parse_model_url(f"http://me:{SECRET}@host"))


def test_a_user_leaves_no_room_for_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PADDOCK_MODEL_API_KEY", SECRET)
    assert opened("http://me:pass@host", name="m").api_key is None
    with pytest.raises(ConfigError, match="a user and a key"):
        opened("http://me:pass@host", name="m", api_key="k")


# -- keys ------------------------------------------------------------------------------------------


def test_an_explicit_key_comes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "openai")
    assert opened("https://api.openai.com", name="m").api_key == "openai"
    monkeypatch.setenv("PADDOCK_MODEL_API_KEY", "ours")
    assert opened("https://api.openai.com", name="m").api_key == "ours"
    assert opened("http://127.0.0.1:8000", name="m").api_key == "ours"
    assert opened("http://127.0.0.1:8000", name="m", api_key="given").api_key == "given"


@pytest.mark.parametrize("near", ["http://127.0.0.1:8000", "http://localhost:8000", "https://gateway.example"])
def test_the_usual_variable_is_read_too(near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert opened(near, name="m").api_key == SECRET


@pytest.mark.parametrize("far", ["http://host:8000", "http://api.openai.com", "http://127.0.0.1.example"])
def test_the_usual_key_is_not_sent_in_the_clear(far: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    assert opened(far, name="m").api_key is None


# -- names -----------------------------------------------------------------------------------------


@asynccontextmanager
async def listing(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> Any:
    """A server that answers every GET."""
    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def ask_for_name(answer: Any, status: int = 200, **options: Any) -> tuple[Endpoint, list[str]]:
    collected: list[str] = []

    async def reply(_: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    async def run() -> Endpoint:
        async with listing(reply) as url, open_model(url, log=collected.append, **options) as endpoint:
            return endpoint

    return asyncio.run(asyncio.wait_for(run(), 20)), collected


def test_the_first_listed_model_is_used_and_named() -> None:
    endpoint, reply = ask_for_name({"data": [{"id": "org/a"}, {"id": "org/b"}]})
    assert endpoint.name == "org/a"
    assert "org/a" in reply[0]
    assert "first of 2" in reply[0]


def test_the_key_is_sent_when_names_are_asked_for() -> None:
    async def run() -> str:
        async with (
            ReplayServer({"model": "toy", "turns": [{"text": "x"}]}, api_key=SECRET) as server,
            open_model(server.url, api_key=SECRET) as endpoint,
        ):
            return endpoint.name

    assert asyncio.run(run()) == "toy"


@pytest.mark.parametrize(
    ("answer", "status", "expected"),
    [
        ({"data": []}, 200, "lists no models"),
        ([1], 200, "lists no models"),
        ({"error": "who"}, 401, "another key"),
        ({}, 404, "status 404"),
    ],
)
def test_an_endpoint_without_a_model_name_is_a_model_error(answer: Any, status: int, expected: str) -> None:
    with pytest.raises(ModelError, match=expected) as caught:
        ask_for_name(answer, status, api_key=SECRET)
    assert caught.value.hint
    assert SECRET not in str(caught.value) + caught.value.hint


MODELS = {"data": [{"id": "m"}]}


@pytest.mark.parametrize(
    ("path", "pages", "message", "hint"),
    [
        ("/api", {"/v1/models": MODELS}, "wrong path", "/v1"),
        ("/v1", {"/metadata": {"name": "echo", "description": "d"}}, "environment server", "--agent loop --env"),
        ("/v1", {"/": "<html></html>"}, "web page", "base URL"),
        ("/v1", {"/v1/models": "<html></html>"}, "web page", "base URL"),
    ],
    ids=["wrong path", "environment", "web page", "web page for models"],
)
def test_an_error_says_what_answers_there(path: str, pages: dict[str, Any], message: str, hint: str) -> None:
    async def reply(request: web.Request) -> web.Response:
        page = pages.get(request.path)
        if isinstance(page, str):
            return web.Response(text=page, content_type="text/html")
        return web.json_response(page, status=200 if page else 404)

    async def run() -> None:
        async with listing(reply) as url, open_model(url.removesuffix("/v1") + path):
            pass

    with pytest.raises(ModelError, match=message) as raised:
        asyncio.run(run())
    assert hint in str(raised.value.hint)


def test_an_unreachable_endpoint_is_a_model_error_without_secrets() -> None:
    with pytest.raises(ModelError, match="does not answer") as caught:
        opened(f"http://me:{SECRET}@127.0.0.1:1")
    assert "***@127.0.0.1:1" in str(caught.value)
    assert SECRET not in str(caught.value)


# -- other forms -----------------------------------------------------------------------------------


def test_a_model_of_a_vllm_server() -> None:
    endpoint = opened("vllm://org/repo", vllm_url="http://gpu:8000", api_key="k")
    assert (endpoint.url, endpoint.name, endpoint.engine) == ("http://gpu:8000/v1", "org/repo", "vllm")
    assert (endpoint.label, endpoint.api_key) == ("vllm://org/repo", "k")
    assert opened("vllm://org/repo", vllm_url="http://gpu:8000", name="lora").name == "lora"


def test_a_model_of_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    endpoint = opened("hf-router://org/repo:provider")
    assert (endpoint.url, endpoint.name) == ("https://router.huggingface.co/v1", "org/repo:provider")
    assert endpoint.api_key == SECRET
    assert SECRET not in repr(endpoint)
    assert opened("hf-router://org/repo", hf_token="other").api_key == "other"


def test_the_demo_needs_no_file() -> None:
    endpoint = opened("demo")
    assert endpoint.label == "demo"
    assert endpoint.url.startswith("http://127.0.0.1:")


def test_a_replay_is_served_while_it_is_open(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps({"model": "toy", "engine": "sglang", "turns": [{"text": "Hello."}]}))

    async def run() -> None:
        async with aiohttp.ClientSession() as session:
            async with open_model(f"replay:{file}") as endpoint:
                assert (endpoint.name, endpoint.label, endpoint.engine) == ("toy", f"replay:{file}", "sglang")
                body = {"messages": [{"role": "user", "content": "hi"}]}
                async with session.post(f"{endpoint.url}/chat/completions", json=body) as answer:
                    assert (await answer.json())["choices"][0]["message"]["content"] == "Hello."
            with pytest.raises(aiohttp.ClientConnectionError):
                await session.get(f"{endpoint.url}/models")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        ("gpt-4", {}, "gpt-4"),
        ("", {}, "''"),
        ("ftp://host", {}, "ftp://host"),
        ("http://", {}, "http://"),
        ("http://host:port", {"name": "m"}, "host:port"),
        ("http://ho st", {"name": "m"}, "ho st"),
        (f"http://host/v1?key={SECRET}", {"name": "m"}, "more than a path"),
        (f"http://me:{SECRET}/x@host", {"name": "m"}, r"http://\*\*\*@host"),
        (f"htp://me:{SECRET}@host", {}, r"htp://\*\*\*@host"),
        (f"me:{SECRET}@host", {}, r"\*\*\*@host"),
        (f"htp://me:{SECRET}://x@host", {}, r"\*\*\*@host"),
        ("vllm://", {"vllm_url": "http://h"}, "vllm://"),
        ("vllm://a b", {"vllm_url": "http://h"}, "a b"),
        (f"vllm://me:{SECRET}@host/x", {"vllm_url": "http://h"}, "vllm"),
        ("vllm://org/repo", {}, "address of a vLLM server"),
        ("vllm://org/repo", {"vllm_url": f"gpu:{SECRET}@x"}, "not a model address"),
        ("hf-router://org/repo", {}, "token"),
        ("hf-router://", {"hf_token": SECRET}, "hf-router://"),
        ("replay:", {}, "names no file"),
        ("replay:/nowhere.json", {}, "/nowhere"),
        ("local:", {}, "names no file"),
        ("local:/nowhere.gguf", {}, "/nowhere"),
    ],
)
def test_a_wrong_form_is_named_with_a_hint_and_without_secrets(
    spec: str, options: dict[str, Any], expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected) as caught:
        opened(spec, **options)
    assert caught.value.hint
    assert SECRET not in f"{caught.value} {caught.value.hint} {caught.value.data}"


def test_an_unknown_form_is_shown_all_forms() -> None:
    with pytest.raises(PaddockError) as caught:
        opened("gpt-4")
    hint = caught.value.hint or ""
    assert all(form in hint for form in ("http", "vllm://", "hf-router://", "replay:", "local", ".gguf"))
