"""Routes, the agent's key, bad bodies, and secrets that leave no trace."""

import json
from dataclasses import asdict

import pytest

from capture.harness import KEY, run, start_proxy
from capture.scripted_model import ScriptedModel, ok, status
from paddock.capture import proxy
from paddock.capture.masking import Mask


@pytest.mark.parametrize("authorization", ["", "Bearer wrong", "Bearer ", f"Bearer {KEY}", "Bearer ümlaut"])
def test_a_wrong_key_is_refused(authorization: str) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.post(json.dumps(proxy.body()).encode(), headers={"Authorization": authorization})
            assert (got.status, got.error["code"]) == (401, "invalid_api_key")
            assert not proxy.model.paths

    run(body())


def test_the_model_list_has_one_model_and_needs_no_endpoint() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            async with proxy.session.get(f"{proxy.url}/v1/models", headers=headers) as response:
                assert [model["id"] for model in (await response.json())["data"]] == ["real"]
            assert not proxy.model.paths

    run(body())


@pytest.mark.parametrize("path", ["/v1/audio", "/v1/embeddings", "/", "/v1/chat/completions/x"])
def test_other_paths_are_refused_with_a_reason(path: str) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.post(b"{}", path)
            assert got.status == 404
            assert path in got.error["message"]

    run(body())


def test_completions_take_post_only() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            headers = {"Authorization": f"Bearer {proxy.capture.secret}"}
            async with proxy.session.get(f"{proxy.url}/v1/chat/completions", headers=headers) as response:
                assert response.status == 405

    run(body())


def test_the_version_prefix_may_be_missing() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            assert (await proxy.post(json.dumps(proxy.body()).encode(), "/chat/completions")).status == 200

    run(body())


@pytest.mark.parametrize(
    ("raw", "word"), [(b"{", "JSON"), (b"[]", "object"), (b"{}", "messages"), (b'{"messages": ["x"]}', "messages")]
)
def test_a_bad_body_is_named_and_is_no_call(raw: bytes, word: str) -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.post(raw)
            assert got.status == 400
            assert word in got.error["message"]
            assert not proxy.capture.calls

    run(body())


def test_a_body_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "LARGEST_BODY_BYTES", 1000)

    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            got = await proxy.chat("x" * 2000)
            assert got.status == 413
            assert not proxy.model.bodies

    run(body())


# -- secrets ------------------------------------------------------------------------------------------


def test_the_keys_stay_apart() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            await proxy.chat(headers={"X-Evil": "1", "Cookie": "a=b", "x-session-id": "s1"})
            sent = proxy.model.headers[0]
            assert sent["authorization"] == f"Bearer {KEY}"
            assert sent["x-session-id"] == "s1"
            assert proxy.capture.secret not in str(sent)
            assert not {"x-evil", "cookie"} & sent.keys()

    run(body())


def test_no_secret_is_stored_logged_or_returned() -> None:
    async def body() -> None:
        extra = 'quo"ted\\secret-é'
        async with start_proxy(
            ScriptedModel(ok(f"I saw {KEY} and {extra}"), status(400, f"bad key {KEY}")), secrets=(extra,)
        ) as proxy:
            reply = f"env: {proxy.capture.secret} {KEY} {extra}"
            await proxy.chat(reply, stop=[extra])
            await proxy.last_call()
            got = await proxy.chat("two")
            await proxy.last_call()
            assert KEY not in got.text
            everything = str([asdict(call) for call in proxy.capture.calls]) + proxy.capture.log_tail()
            for secret in (KEY, proxy.capture.secret, extra):
                assert secret not in everything
                assert repr(secret)[1:-1] not in everything
            assert proxy.capture.calls[0].message["content"] == "I saw *** and ***"
            # What the model reads is what the agent wrote.
            assert proxy.model.bodies[0]["messages"][0]["content"] == reply

    run(body())


def test_a_placeholder_key_is_not_a_secret() -> None:
    assert Mask(["EMPTY", ""]).text("the list is EMPTY") == "the list is EMPTY"


def test_the_log_is_a_tail() -> None:
    async def body() -> None:
        async with start_proxy(ScriptedModel()) as proxy:
            for number in range(3):
                await proxy.chat(str(number))
            await proxy.last_call()
            assert "c2 agent: stop" in proxy.capture.log_tail()
            assert len(proxy.capture.log_tail(40)) == 40

    run(body())
