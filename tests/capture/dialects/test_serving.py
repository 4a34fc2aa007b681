"""What holds for every dialect at the proxy: keys, faults, keep-alive, roles, secrets, and what is kept."""

import asyncio
import json
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import pytest

from capture.dialects.replay_proxy import ReplayProxy, replay_proxy
from capture.dialects.replies import BLOCK_DIALECTS
from paddock.capture.dialects import chat_request
from paddock.capture.trace import Level, Role
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import LONG, SCRIPT, events_of

if TYPE_CHECKING:
    from paddock.testing.dialect_clients import ClientRequest


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


def faulty(**fault: Any) -> dict[str, Any]:
    return {**SCRIPT, "faults": [fault]}


def last_event(text: str) -> dict[str, Any]:
    return events_of(text)[-1][1]


@pytest.mark.parametrize("dialect", CLIENTS)
@pytest.mark.parametrize("way", ["bearer", "x-api-key", "x-goog-api-key", "query"])
def test_a_key_may_be_shown_in_four_ways(dialect: str, way: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            request = CLIENTS[dialect].request(CLIENTS[dialect].user_turn("hello"))
            for key, status in ((proxy.capture.secret, 200), ("wrong", 401), ("", 401)):
                headers = {"Authorization": f"Bearer {key}"} if way == "bearer" else {way: key}
                query = f"?key={key}" if way == "query" else ""
                async with proxy.session.post(
                    proxy.url + request.path + query, json=request.body, headers={} if query else headers
                ) as response:
                    assert response.status == status
                    assert proxy.capture.secret not in await response.text()
            assert len(proxy.capture.calls) == 1
            assert proxy.capture.secret not in proxy.capture.log_tail()

    run(body())


@pytest.mark.parametrize("dialect", CLIENTS)
def test_a_request_is_stored_as_sent_and_shown_in_chat_form(dialect: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            subject = proxy.subject(dialect)
            request = subject.request("one tool")
            await subject.post(request)
            (call,) = proxy.capture.calls
            assert (call.dialect, call.request) == (dialect, request.body)
            assert call.message["tool_calls"][0]["function"]["name"] == "bash"
            chat = chat_request(call)
            sent = proxy.model.log[0].request
            assert (chat["messages"], chat["tools"]) == (sent["messages"], sent["tools"])
            assert sent["model"] == "replay"
            assert call.trainable

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", CLIENTS)
def test_a_transient_failure_is_retried_without_the_agent_noticing(dialect: str, stream: bool) -> None:
    async def body() -> None:
        for fault in ({"status": 500}, {"close": True}, {"cut_after": 0}, {"malformed": True}):
            async with replay_proxy(faulty(**fault, times=2)) as proxy:
                subject = proxy.subject(dialect)
                reply, _ = await subject.send(subject.client.user_turn("many tools"), stream=stream)
                assert len(reply.calls) == 3
                (call,) = proxy.capture.calls
                assert call.level is Level.TOKENS
                assert len(call.attempts) == 2

    run(body())


@pytest.mark.parametrize("dialect", CLIENTS)
def test_a_stream_that_breaks_off_asks_for_another_try(dialect: str) -> None:
    async def body() -> None:
        for words in ("hello", "many tools"):
            async with replay_proxy(faulty(cut_after=16 if words == "many tools" else 3, times=9)) as proxy:
                subject = proxy.subject(dialect)
                status, text = await subject.post(subject.request(words, stream=True))
                last = last_event(text)
                assert status == 200
                if dialect == "responses":
                    assert last["response"]["error"]["code"] == "server_error"
                elif dialect == "google":
                    assert last["error"]["code"] == 500
                else:
                    assert last["error"]["type"] == {"anthropic": "api_error"}.get(dialect, "server_error")
                (call,) = proxy.capture.calls
                assert not call.trainable

    run(body())


@pytest.mark.parametrize("dialect", CLIENTS)
def test_half_a_call_is_never_part_of_the_next_answer(dialect: str) -> None:
    async def body() -> None:
        turns = [{"tool": "bash", "arguments": {"command": "ls"}}, {"text": "Seen."}]
        async with replay_proxy({"turns": turns, "faults": [{"cut_after": 6}]}) as proxy:
            subject = proxy.subject(dialect)
            _, text = await subject.post(subject.request("x", stream=True))
            assert "server error" in text
            reply, _ = await subject.send(subject.client.user_turn("x"), stream=True)
            assert [call.arguments for call in reply.calls] == [{"command": "ls"}]
            assert [call.role for call in proxy.capture.calls] == [Role.RETRIED, Role.AGENT]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", CLIENTS)
def test_an_endpoint_that_stays_broken_is_a_final_refusal(dialect: str, stream: bool) -> None:
    async def body() -> None:
        async with replay_proxy(faulty(status=503, times=99), attempts=2) as proxy:
            subject = proxy.subject(dialect)
            status, document = await subject.send_refused(subject.request("hello", stream=stream))
            assert status == 400
            assert "does not work" in subject.client.read_error(document)
            assert proxy.capture.last_failure is not None

    run(body())


def test_codex_gets_an_overflow_inside_a_stream() -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            subject = proxy.subject("responses")
            status, text = await subject.post(subject.request(LONG, stream=True))
            kind, last = events_of(text)[-1]
            assert (status, kind) == (200, "response.failed")
            assert last["response"]["error"]["code"] == "context_length_exceeded"

    run(body())


@pytest.mark.parametrize(
    ("dialect", "sign"),
    [
        ("chat", ": keep-alive"),
        ("responses", '"type":"keepalive"'),
        ("anthropic", "event: ping"),
        ("google", "\n\n\n\n"),
    ],
)
def test_a_waiting_program_is_kept_alive(dialect: str, sign: str) -> None:
    async def body() -> None:
        async with replay_proxy(faulty(delay=0.3), keep_alive=0.05) as proxy:
            subject = proxy.subject(dialect)
            status, text = await subject.post(subject.request("hello", stream=True))
            assert status == 200
            assert sign in text
            whole = subject.client.read_reply(subject.client.assemble(heard_events(dialect, text)))
            assert whole.text == "Hello there, ünïcode."

    run(body())


def heard_events(dialect: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events without what keeps alive, numbered anew where they have numbers."""
    written_events = events_of(text)
    if dialect == "responses":
        for number, (_, data) in enumerate(written_events):
            data["sequence_number"] = number
    return written_events


def test_a_failure_after_a_keep_alive_is_sent_in_the_stream() -> None:
    async def body() -> None:
        for dialect in CLIENTS:
            async with replay_proxy(
                faulty(hang=0.2, status=400, message="I take no such thing"), keep_alive=0.05
            ) as proxy:
                subject = proxy.subject(dialect)
                status, text = await subject.post(subject.request("hello", stream=True))
                assert status == 200
                assert "I take no such thing" in json.dumps(last_event(text))

    run(body())


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_the_same_again_leaves_a_complete_answer_used(dialect: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            subject = proxy.subject(dialect)
            await subject.send(subject.client.user_turn("one tool"))
            await subject.send(subject.client.user_turn("one tool"), stream=True)
            assert [call.role for call in proxy.capture.calls] == [Role.AGENT, Role.AGENT]

    run(body())


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_titles_are_known_by_their_system_prompt(dialect: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            subject = proxy.subject(dialect)
            request = subject.client.request(subject.client.user_turn("hello"), tools=False)
            assert subject.client.system_field is not None
            request.body[subject.client.system_field] = "You are a title generator. Output only a title."
            await subject.post(request)
            await subject.send(subject.client.user_turn("one tool"))
            assert [call.role for call in proxy.capture.calls] == [Role.TITLE, Role.AGENT]

    run(body())


@pytest.mark.parametrize("header", ["thread-id", "X-Claude-Code-Session-Id", "x-session-id"])
def test_programs_name_their_session_in_their_own_way(header: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            for session in ("a", "b"):
                await post(proxy, "responses", session, **{header: session})
            assert [(call.session, call.role) for call in proxy.capture.calls] == [
                ("a", Role.AGENT),
                ("b", Role.SUBAGENT),
            ]

    run(body())


async def post(proxy: ReplayProxy, dialect: str, words: str, **headers: str) -> None:
    client = CLIENTS[dialect]
    request: ClientRequest = client.request(client.user_turn(words))
    visible = {**client.auth_headers(proxy.capture.secret), **headers}
    async with proxy.session.post(proxy.url + request.path, json=request.body, headers=visible) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("dialect", BLOCK_DIALECTS)
def test_no_secret_is_kept(dialect: str) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            await post(proxy, dialect, f"my key is {proxy.capture.secret}")
            (call,) = proxy.capture.calls
            assert proxy.capture.secret not in json.dumps(call.request)
            assert "***" in json.dumps(call.request)
            assert proxy.capture.secret in json.dumps(proxy.model.log[0].request)

    run(body())


@pytest.mark.parametrize(
    ("path", "headers", "shape"),
    [
        ("/nowhere", {}, "type"),
        ("/nowhere", {"anthropic-version": "2023-06-01"}, "anthropic"),
        ("/nowhere", {"x-goog-api-client": "x"}, "google"),
        ("/v1/messages/batches", {"anthropic-version": "2023-06-01"}, "anthropic"),
        ("/v1beta/models/m:embedContent", {"x-goog-api-client": "x"}, "google"),
    ],
)
def test_what_is_not_served_is_refused_in_the_programs_own_shape(
    path: str, headers: dict[str, str], shape: str
) -> None:
    async def body() -> None:
        async with replay_proxy(SCRIPT) as proxy:
            visible = {"Authorization": f"Bearer {proxy.capture.secret}", **headers}
            async with proxy.session.post(proxy.url + path, json={}, headers=visible) as response:
                document = await response.json()
                assert response.status == 404
            if shape == "anthropic":
                assert document["type"] == "error"
            elif shape == "google":
                assert document["error"]["status"] == "NOT_FOUND"
            else:
                assert document["error"]["code"] == "not_found"

    run(body())


def test_counting_keeps_no_call_and_spends_no_budget() -> None:
    async def body() -> None:
        for engine in ("vllm", "openai"):
            async with replay_proxy({**SCRIPT, "engine": engine}) as proxy:
                for dialect in BLOCK_DIALECTS:
                    subject = proxy.subject(dialect)
                    request = subject.client.count_request(subject.request("hello"))
                    status, text = await subject.post(request)
                    assert status == 200
                    assert 10 < subject.client.read_count(json.loads(text)) < 200
                assert not proxy.capture.calls
                assert not proxy.model.log

    run(body())
