"""Forks and resumed rollouts in token mode: recorded answers are sent again, and their ids are continued."""

import asyncio
from typing import Any

import pytest

from capture.harness import TOOLS, run
from capture.token_engine import tool_call
from capture.tokens.harness import LISTING, SYSTEM, continues, send, token_proxy
from paddock.capture.recorded.replay import Edit, Replay
from paddock.capture.trace import Call
from paddock.rollouts.fork import read_messages

USER = {"role": "user", "content": "List the rollouts."}


def listing(prompt: str, calls: int) -> str:
    return LISTING + tool_call("bash", command=f"ls {calls}")


async def record(count: int) -> list[Call]:
    """A conversation in which the agent lists files `count` times."""
    async with token_proxy(listing) as proxy:
        await play(proxy, count)
        return proxy.capture.calls


async def play(proxy: Any, count: int) -> list[Call]:
    messages, calls = [SYSTEM, USER], []
    for number in range(count):
        call = await send(proxy, messages, tools=TOOLS, stream=bool(number % 2))
        calls.append(call)
        answer = {name: value for name, value in call.message.items() if name != "reasoning_content"}
        result = {"role": "tool", "tool_call_id": call.message["tool_calls"][0]["id"], "content": f"{number}.txt"}
        messages = [*messages, answer, result]
    return calls


@pytest.mark.parametrize("at", [1, 2, None])
def test_a_fork_continues_the_recorded_ids(at: int | None) -> None:
    async def body() -> None:
        recorded = await record(3)
        replay = Replay("r1", recorded, read_messages, at=at)
        async with token_proxy(lambda prompt, calls: listing(prompt, 7), replay=replay) as proxy:
            calls = await play(proxy, 4)
            first = 3 if at is None else at
            assert [call.replayed_from is None for call in calls] == [False] * first + [True] * (4 - first)
            for index, call in enumerate(calls[1:], 1):
                assert continues(call, calls[index - 1])
            assert calls[first].token_mode == {
                "renderer": "qwen3",
                "render": "bridge",
                "continues": f"c{first - 1}",
            }
            assert calls[0].completion_token_ids == recorded[0].completion_token_ids
            assert calls[0].token_mode == recorded[0].token_mode

    run(body())


def test_an_answer_that_was_written_by_hand_has_no_ids_to_continue() -> None:
    async def body() -> None:
        answer = {"tool_calls": [{"id": "x", "function": {"name": "bash", "arguments": "{}"}}]}
        replay = Replay("r1", await record(2), read_messages, at=1, edit=Edit(answer=answer))
        async with token_proxy(lambda prompt, calls: listing(prompt, 7), replay=replay) as proxy:
            calls = await play(proxy, 3)
            assert (calls[2].token_mode or {})["render"] == "full"
            assert not continues(calls[2], calls[1])

    run(body())


def test_calls_at_the_same_time_keep_their_conversations() -> None:
    async def body() -> None:
        async with token_proxy(lambda prompt, calls: f"Answer {calls}.") as proxy:
            starts = [[{"role": "system", "content": f"You are helper {number}."}, USER] for number in range(4)]
            await asyncio.gather(*(proxy.chat(messages=each) for each in starts))
            await proxy.wait_until(lambda: len(proxy.recorded) == 4)
            calls_by_prompt = {call.request["messages"][0]["content"]: call for call in proxy.capture.calls}
            for start in starts:
                first = calls_by_prompt[str(start[0]["content"])]
                assert continues(await send(proxy, [*start, first.message, USER]), first)

    run(body())
