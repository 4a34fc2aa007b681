"""Calls of any dialect as they are shown and played again."""

import asyncio
from typing import Any

import orjson
import pytest

from capture.dialects.replay_proxy import ReplayProxy, replay_proxy
from paddock.capture.trace import Call
from paddock.rollouts.rollout_json import call_to_json, rollout_to_json
from paddock.store.record import RolloutRecord
from paddock.testing.dialect_clients import CLIENTS
from paddock.testing.dialects import SCRIPT


async def converse(proxy: ReplayProxy, dialect: str) -> list[str]:
    subject = proxy.subject(dialect)
    conversation = subject.client.user_turn("many tools")
    first, document = await subject.send(conversation)
    conversation += subject.client.reply_turn(document) + subject.client.result_turn(first.calls, ["1", "2", "3"])
    last, _ = await subject.send(conversation, stream=True)
    return [call.arguments["command"] for call in first.calls] + [last.text]


@pytest.mark.parametrize("dialect", CLIENTS)
def test_a_recording_is_played_again_token_by_token(dialect: str) -> None:
    async def record(script: dict[str, Any]) -> tuple[list[str], list[Call]]:
        async with replay_proxy(script) as proxy:
            return await converse(proxy, dialect), list(proxy.capture.calls)

    async def body() -> None:
        reply, calls = await record(SCRIPT)
        recording = orjson.loads(orjson.dumps(rollout_to_json(RolloutRecord("r", "t"), calls)))
        again, played = await record(recording)
        assert again == reply == ["ls", "pwd", "id", "All seen."]
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
