"""Calls of any dialect as they are shown and played again."""

import asyncio
from typing import Any

import orjson
import pytest

from paddock.rollouts.record import RolloutRecord
from paddock.rollouts.shown import call_to_json, rollout_to_json
from paddock.rollouts.trace import Call
from paddock.testing.dialects import SCRIPT
from paddock.testing.speakers import SPEAKERS
from rollouts.capture.dialects.serving import Served, served


async def converse(s: Served, dialect: str) -> list[str]:
    subject = s.subject(dialect)
    conversation = subject.speaker.user("many tools")
    first, document = await subject.say(conversation)
    conversation += subject.speaker.said(document) + subject.speaker.results(first.calls, ["1", "2", "3"])
    last, _ = await subject.say(conversation, stream=True)
    return [call.arguments["command"] for call in first.calls] + [last.text]


@pytest.mark.parametrize("dialect", SPEAKERS)
def test_a_recording_is_played_again_token_by_token(dialect: str) -> None:
    async def record(script: dict[str, Any]) -> tuple[list[str], list[Call]]:
        async with served(script) as s:
            return await converse(s, dialect), list(s.capture.calls)

    async def body() -> None:
        heard, calls = await record(SCRIPT)
        recording = orjson.loads(orjson.dumps(rollout_to_json(RolloutRecord("r", "t"), calls)))
        again, played = await record(recording)
        assert again == heard == ["ls", "pwd", "id", "All seen."]
        for old, new in zip(calls, played, strict=True):
            assert (old.prompt_token_ids, old.completion_token_ids) == (
                new.prompt_token_ids,
                new.completion_token_ids,
            )
            assert old.logprobs == new.logprobs

    asyncio.run(asyncio.wait_for(body(), 30))


def test_other_dialects_are_shown_in_chat_form_too() -> None:
    spoken = Call("c0", 0, dialect="google", request={"contents": [{"parts": [{"text": "hi"}]}]})
    assert call_to_json(spoken)["chat"] == {"messages": [{"role": "user", "content": "hi"}]}
    assert call_to_json(spoken)["request"] == spoken.request
    assert "chat" not in call_to_json(Call("c0", 0, request={"messages": []}))
    assert "chat" not in call_to_json(Call("c0", 0, dialect="google", request={"contents": "broken"}))
