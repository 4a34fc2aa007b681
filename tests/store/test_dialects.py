"""Long rollouts in other dialects take as little space, also where programs change what they have sent before."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from bench.rollout_store import growing_calls, prompt_bytes

from paddock.capture.dialects import chat_request
from paddock.store import Store
from paddock.store.record import RolloutRecord

Request = dict[str, Any]


def responses(chat: Request, number: int) -> Request:
    items: list[Request] = []
    for message in chat["messages"][1:]:
        if message["role"] == "tool":
            output = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **output})
            continue
        items.append({"type": "message", "role": message["role"], "content": message["content"]})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    tools = [{"type": "function", **tool["function"]} for tool in chat["tools"]]
    metadata = {"turn": f"{number:032}"}
    return {"instructions": chat["messages"][0]["content"], "input": items, "tools": tools, "metadata": metadata}


def anthropic(chat: Request, number: int) -> Request:
    messages: list[Request] = []
    for message in chat["messages"][1:]:
        blocks: list[Request] = [{"type": "text", "text": message["content"]}]
        if message["role"] == "tool":
            blocks = [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}]
        for call in message.get("tool_calls", ()):
            value = json.loads(call["function"]["arguments"])
            blocks.append({"type": "tool_use", "id": call["id"], "name": "bash", "input": value})
        messages.append({"role": "assistant" if message["role"] == "assistant" else "user", "content": blocks})
    # Programs mark where to cache, and the mark moves with every call.
    messages[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
    system = [{"type": "text", "text": chat["messages"][0]["content"]}]
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]} for tool in chat["tools"]]
    return {"system": system, "messages": messages, "tools": tools, "metadata": {"user_id": f"{number:032}"}}


def google(chat: Request, number: int) -> Request:
    contents: list[Request] = []
    for message in chat["messages"][1:]:
        parts: list[Request] = [{"text": message["content"]}]
        if message["role"] == "tool":
            result = {"id": message["tool_call_id"], "name": "bash", "response": {"output": message["content"]}}
            parts = [{"functionResponse": result}]
        for call in message.get("tool_calls", ()):
            args = json.loads(call["function"]["arguments"])
            parts.append({"functionCall": {"id": call["id"], "name": "bash", "args": args}})
        contents.append({"role": "model" if message["role"] == "assistant" else "user", "parts": parts})
    declared = [
        {"name": each["function"]["name"], "parametersJsonSchema": each["function"]} for each in chat["tools"]
    ]
    system = {"parts": [{"text": chat["messages"][0]["content"]}]}
    return {"systemInstruction": system, "contents": contents, "tools": [{"functionDeclarations": declared}]}


@pytest.mark.parametrize("translate", [responses, anthropic, google])
def test_fifty_growing_calls_take_less_than_thrice_their_longest_prompt(
    store: Store, translate: Callable[[Request, int], Request]
) -> None:
    dialect = translate.__name__
    calls = []
    empty_bytes = store.size_bytes()
    store.begin(RolloutRecord("r-one", "task"))
    for number, call in enumerate(growing_calls(50)):
        calls.append(replace(call, dialect=dialect, request=translate(call.request, number)))
        store.save_call("r-one", calls[-1])
        contents = [message.get("content") for message in chat_request(calls[-1])["messages"]]
        assert contents == [message["content"] for message in call.request["messages"]]
    store.prune()
    assert store.calls("r-one") == calls
    assert store.size_bytes() - empty_bytes < 3 * max(map(prompt_bytes, calls)) / 2  # half of what is allowed
