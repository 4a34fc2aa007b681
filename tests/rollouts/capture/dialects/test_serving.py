"""What holds for every dialect at the proxy: keys, faults, keep-alive, roles, secrets, and what is kept."""

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest

from paddock.rollouts.capture.dialects import chat_request
from paddock.rollouts.trace import Level, Role
from paddock.testing.dialects import LONG, SCRIPT, events_of
from paddock.testing.speakers import SPEAKERS, Ask
from rollouts.capture.dialects.serving import Served, served

NOT_CHAT = [name for name in SPEAKERS if name != "chat"]


def run(body: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(body, 30))


def faulty(**fault: Any) -> dict[str, Any]:
    return {**SCRIPT, "faults": [fault]}


def ends(dialect: str, text: str) -> dict[str, Any]:
    """The last thing that a stream says."""
    events = [line[6:] for line in text.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
    found: dict[str, Any] = json.loads(events[-1])
    return found


@pytest.mark.parametrize("dialect", SPEAKERS)
@pytest.mark.parametrize("way", ["bearer", "x-api-key", "x-goog-api-key", "query"])
def test_a_key_may_be_shown_in_four_ways(dialect: str, way: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            ask = SPEAKERS[dialect].ask(SPEAKERS[dialect].user("hello"))
            for key, status in ((s.capture.secret, 200), ("wrong", 401), ("", 401)):
                headers = {"Authorization": f"Bearer {key}"} if way == "bearer" else {way: key}
                query = f"?key={key}" if way == "query" else ""
                async with s.session.post(
                    s.url + ask.path + query, json=ask.body, headers={} if query else headers
                ) as response:
                    assert response.status == status
                    assert s.capture.secret not in await response.text()
            assert len(s.capture.calls) == 1
            assert s.capture.secret not in s.capture.log_tail()

    run(body())


@pytest.mark.parametrize("dialect", SPEAKERS)
def test_a_request_is_kept_as_it_was_sent_and_told_in_chat_form(dialect: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            subject = s.subject(dialect)
            ask = subject.speaker.ask(subject.speaker.user("one tool"))
            await subject.post(ask)
            (call,) = s.capture.calls
            assert (call.dialect, call.request) == (dialect, ask.body)
            assert call.message["tool_calls"][0]["function"]["name"] == "bash"
            chat = chat_request(call)
            sent = s.model.log[0].request
            assert (chat["messages"], chat["tools"]) == (sent["messages"], sent["tools"])
            assert sent["model"] == "replay"
            assert call.trainable

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", SPEAKERS)
def test_an_endpoint_that_stumbles_is_asked_again_unseen(dialect: str, stream: bool) -> None:
    async def body() -> None:
        for fault in ({"status": 500}, {"close": True}, {"cut_after": 0}, {"malformed": True}):
            async with served(faulty(**fault, times=2)) as s:
                subject = s.subject(dialect)
                heard, _ = await subject.say(subject.speaker.user("many tools"), stream=stream)
                assert len(heard.calls) == 3
                (call,) = s.capture.calls
                assert call.level is Level.TOKENS
                assert len(call.attempts) == 2

    run(body())


@pytest.mark.parametrize("dialect", SPEAKERS)
def test_a_stream_that_breaks_off_asks_for_another_try(dialect: str) -> None:
    async def body() -> None:
        for words in ("hello", "many tools"):
            async with served(faulty(cut_after=16 if words == "many tools" else 3, times=9)) as s:
                subject = s.subject(dialect)
                status, text = await subject.post(subject.speaker.ask(subject.speaker.user(words), stream=True))
                last = ends(dialect, text)
                assert status == 200
                if dialect == "responses":
                    assert last["response"]["error"]["code"] == "server_error"
                elif dialect == "google":
                    assert last["error"]["code"] == 500
                else:
                    kind = {"chat": "server_error", "anthropic": "api_error"}[dialect]
                    assert last["error"]["type"] == kind
                (call,) = s.capture.calls
                assert not call.trainable

    run(body())


@pytest.mark.parametrize("dialect", SPEAKERS)
def test_half_a_call_is_never_part_of_the_next_answer(dialect: str) -> None:
    async def body() -> None:
        turns = [{"tool": "bash", "arguments": {"command": "ls"}}, {"text": "Seen."}]
        async with served({"turns": turns, "faults": [{"cut_after": 6}]}) as s:
            subject = s.subject(dialect)
            _, text = await subject.post(subject.speaker.ask(subject.speaker.user("x"), stream=True))
            assert "server error" in text
            heard, _ = await subject.say(subject.speaker.user("x"), stream=True)
            assert [call.arguments for call in heard.calls] == [{"command": "ls"}]
            assert [call.role for call in s.capture.calls] == [Role.RETRIED, Role.AGENT]

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", SPEAKERS)
def test_an_endpoint_that_stays_broken_is_a_final_refusal(dialect: str, stream: bool) -> None:
    async def body() -> None:
        async with served(faulty(status=503, times=99), attempts=2) as s:
            subject = s.subject(dialect)
            status, document = await subject.refused(
                subject.speaker.ask(subject.speaker.user("hello"), stream=stream)
            )
            assert status == 400
            assert "does not work" in subject.speaker.error(document)
            assert s.capture.last_failure is not None

    run(body())


def test_codex_hears_of_an_overflow_inside_a_stream() -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            subject = s.subject("responses")
            status, text = await subject.post(subject.speaker.ask(subject.speaker.user(LONG), stream=True))
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
        async with served(faulty(delay=0.3), keep_alive=0.05) as s:
            subject = s.subject(dialect)
            status, text = await subject.post(subject.speaker.ask(subject.speaker.user("hello"), stream=True))
            assert status == 200
            assert sign in text
            whole = subject.speaker.hear(subject.speaker.gather(heard_events(dialect, text)))
            assert whole.text == "Hello there, ünïcode."

    run(body())


def heard_events(dialect: str, text: str) -> list[tuple[str, dict[str, Any]]]:
    """The events without what keeps alive, numbered anew where they have numbers."""
    found = events_of(text)
    if dialect == "responses":
        for number, (_, data) in enumerate(found):
            data["sequence_number"] = number
    return found


def test_a_failure_after_a_sign_of_life_is_told_in_the_stream() -> None:
    async def body() -> None:
        for dialect in SPEAKERS:
            async with served(faulty(hang=0.2, status=400, message="I take no such thing"), keep_alive=0.05) as s:
                subject = s.subject(dialect)
                status, text = await subject.post(subject.speaker.ask(subject.speaker.user("hello"), stream=True))
                assert status == 200
                assert "I take no such thing" in json.dumps(ends(dialect, text))

    run(body())


@pytest.mark.parametrize("dialect", NOT_CHAT)
def test_the_same_again_leaves_a_complete_answer_used(dialect: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            subject = s.subject(dialect)
            await subject.say(subject.speaker.user("one tool"))
            await subject.say(subject.speaker.user("one tool"), stream=True)
            assert [call.role for call in s.capture.calls] == [Role.AGENT, Role.AGENT]

    run(body())


@pytest.mark.parametrize("dialect", NOT_CHAT)
def test_titles_are_known_by_their_system_prompt(dialect: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            subject = s.subject(dialect)
            ask = subject.speaker.ask(subject.speaker.user("hello"), tools=False)
            name = {"responses": "instructions", "anthropic": "system", "google": "systemInstruction"}[dialect]
            ask.body[name] = "You are a title generator. Output only a title."
            await subject.post(ask)
            await subject.say(subject.speaker.user("one tool"))
            assert [call.role for call in s.capture.calls] == [Role.TITLE, Role.AGENT]

    run(body())


@pytest.mark.parametrize("header", ["thread-id", "X-Claude-Code-Session-Id", "x-session-id"])
def test_programs_name_their_session_in_their_own_way(header: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            for session in ("a", "b"):
                await post(s, "responses", session, **{header: session})
            assert [(call.session, call.role) for call in s.capture.calls] == [
                ("a", Role.AGENT),
                ("b", Role.SUBAGENT),
            ]

    run(body())


async def post(s: Served, dialect: str, words: str, **headers: str) -> None:
    speaker = SPEAKERS[dialect]
    ask: Ask = speaker.ask(speaker.user(words))
    shown = {**speaker.key(s.capture.secret), **headers}
    async with s.session.post(s.url + ask.path, json=ask.body, headers=shown) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize("dialect", NOT_CHAT)
def test_no_secret_is_kept(dialect: str) -> None:
    async def body() -> None:
        async with served(SCRIPT) as s:
            await post(s, dialect, f"my key is {s.capture.secret}")
            (call,) = s.capture.calls
            assert s.capture.secret not in json.dumps(call.request)
            assert "***" in json.dumps(call.request)
            assert s.capture.secret in json.dumps(s.model.log[0].request)

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
        async with served(SCRIPT) as s:
            shown = {"Authorization": f"Bearer {s.capture.secret}", **headers}
            async with s.session.post(s.url + path, json={}, headers=shown) as response:
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
            async with served({**SCRIPT, "engine": engine}) as s:
                for dialect in NOT_CHAT:
                    subject = s.subject(dialect)
                    ask = subject.speaker.count(subject.speaker.ask(subject.speaker.user("hello")))
                    status, text = await subject.post(ask)
                    assert status == 200
                    assert 10 < subject.speaker.counted(json.loads(text)) < 200
                assert not s.capture.calls
                assert not s.model.log

    run(body())
