"""The official clients of OpenAI, Anthropic and Google call the proxy, each in its own dialect."""

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from capture.dialects.replay_proxy import replay_proxy
from paddock.capture.dialects import chat_request
from paddock.capture.trace import Call, Level
from paddock.limits import Budget
from paddock.testing.dialects import SCRIPT

from .processes import run_client

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

DIALECTS = ("chat", "responses", "anthropic", "google")
ANSWERS = {"chat": "chat", "responses": "responses", "anthropic": "anthropic_messages", "google": "google_generate"}
CALLED = {"chat": "tool_calls", "responses": "completed", "anthropic": "tool_use", "google": "STOP"}
STOPPED = {"chat": "stop", "responses": "completed", "anthropic": "end_turn", "google": "STOP"}
TOO_LONG = {
    "chat": "maximum context length",
    "responses": "maximum context length",
    "anthropic": "prompt is too long: ",
    "google": "exceeds the maximum number of tokens allowed (3000)",
}


@dataclass
class Recorded:
    """What the clients printed, and what the proxy recorded."""

    answers: dict[str, Any]
    calls: list[Call]
    sampled: dict[tuple[int, ...], tuple[list[int], list[float]]]
    log: str


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    async def drive() -> Recorded:
        async with replay_proxy(SCRIPT) as unlimited, replay_proxy(SCRIPT, budget=Budget(calls=1)) as exhausted:
            exhausted.capture.secret = unlimited.capture.secret
            subject = exhausted.subject("chat")
            await subject.send(subject.client.user_turn("hello"))
            addresses = (unlimited.url, unlimited.capture.secret, exhausted.url)
            answers = await asyncio.to_thread(run_client, "vendors", "vendors_client.py", *addresses)
            sampled = {tuple(each.prompt_ids): (each.sampled_ids, each.logprobs) for each in unlimited.model.log}
            return Recorded(answers, list(unlimited.capture.calls), sampled, unlimited.capture.log_tail(100_000))

    return asyncio.run(drive())


def reply(reason: str, text: str = "", thinking: str = "", calls: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"text": text, "thinking": thinking, "calls": list(calls), "reason": reason, "counted": True}


@pytest.mark.parametrize("dialect", DIALECTS)
def test_tools_go_round_streamed_and_not(recorded: Recorded, dialect: str) -> None:
    answer = recorded.answers[ANSWERS[dialect]]
    first = reply(CALLED[dialect], thinking="All at once.", calls=("ls", "pwd", "id"))
    second = reply(STOPPED[dialect], "All seen.")
    assert answer["stream False"] == [first, second]
    assert answer["stream True"] == [first, second]


def test_a_response_is_continued_by_its_id(recorded: Recorded) -> None:
    answer = recorded.answers["responses"]
    for stream in (False, True):
        assert answer[f"remembered, stream {stream}"] == reply("completed", "All seen.")
    assert answer["retrieved"] is True
    assert recorded.answers["responses_unknown"] == [400, True]


@pytest.mark.parametrize("runner", ["anthropic_runner", "google_chat"])
def test_a_clients_own_loop_comes_to_its_end(recorded: Recorded, runner: str) -> None:
    assert recorded.answers[runner] == [["ls 'ä'"], "Seen."]


def test_models_and_token_counts_are_served(recorded: Recorded) -> None:
    listed = {name: recorded.answers[ANSWERS[name]].get("models") for name in DIALECTS}
    assert listed == {"chat": ["replay"], "responses": None, "anthropic": ["replay"], "google": ["models/replay"]}
    assert all(recorded.answers[ANSWERS[name]]["counted"] for name in DIALECTS[1:])


@pytest.mark.parametrize("dialect", DIALECTS)
def test_refusals_become_the_clients_own_errors(recorded: Recorded, dialect: str) -> None:
    name, status, message = recorded.answers["overflow"][dialect]
    assert (name, status) == ("ClientError" if dialect == "google" else "BadRequestError", 400)
    assert TOO_LONG[dialect] in message
    name, status, message = recorded.answers["refusal"][dialect]
    assert (name, status) == ("ClientError" if dialect == "google" else "UnprocessableEntityError", 422)
    assert "I take no such thing" in message
    name, status, _ = recorded.answers["wrong_key"][dialect]
    assert (name, status) == ("ClientError" if dialect == "google" else "AuthenticationError", 401)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_spent_budget_is_a_plain_answer(recorded: Recorded, dialect: str) -> None:
    answer = recorded.answers["budget"][dialect]
    text = "Budget reached: no model calls are left. Stopping here."
    assert answer == {**reply(STOPPED[dialect], text), "counted": False}


def test_every_answer_is_kept_token_by_token(recorded: Recorded) -> None:
    answered = [call for call in recorded.calls if call.ok]
    assert {call.dialect for call in answered} == set(DIALECTS)
    for call in answered:
        assert call.level is Level.TOKENS
        assert recorded.sampled[tuple(call.prompt_token_ids)] == (call.completion_token_ids, call.logprobs)


def test_what_comes_back_is_what_was_sampled(recorded: Recorded) -> None:
    """The second prompt begins with the whole first prompt and its answer, thoughts and calls included."""
    for dialect in DIALECTS:
        mine = [call for call in recorded.calls if call.dialect == dialect and call.ok]
        first = next(call for call in mine if call.message.get("reasoning_content") == "All at once.")
        later = [call for call in mine if call.message.get("content") == "All seen."]
        sampled = first.prompt_token_ids + first.completion_token_ids
        if dialect == "chat":
            sampled = first.prompt_token_ids  # this client drops thoughts, which are no part of the dialect
        assert all(call.prompt_token_ids[: len(sampled)] == sampled for call in later)


def test_pictures_and_tools_reach_the_engine_in_chat_form(recorded: Recorded) -> None:
    for dialect in ("responses", "anthropic", "google"):
        calls = [
            call for call in recorded.calls if call.dialect == dialect and call.message.get("content") == "All seen."
        ]
        chat = chat_request(calls[0])
        roles = [message["role"] for message in chat["messages"]]
        assert roles == ["user", "assistant", "tool", "tool", "tool", "user"]
        assert {part["type"] for part in chat["messages"][-1]["content"]} == {"image_url"}
        assert [tool["function"]["name"] for tool in chat["tools"]] == ["bash"]
    assert "'web_search' runs on OpenAI's servers and was left out" in recorded.log
    assert "'googleSearch' runs on Google's servers and was left out" in recorded.log
