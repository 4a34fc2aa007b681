"""Text for the policy: its few words as tokens, and the chat template that turns messages into tokens.

What the policy sampled is written back exactly as it was sampled, so each prompt of a conversation begins with
the whole prompt and answer before it.
"""

from __future__ import annotations

import json
import re
from typing import Any

PAD, END, UNKNOWN = 0, 1, 2
NAMES = [
    *("<pad>", "<end>", "<unknown>", "\n", ">", "(", ")"),
    *("find", "a", "number", "from", "to", "guess", "found", "higher", "lower"),
    *"0123456789",
]
IDS = {word: number for number, word in enumerate(NAMES)}
WORD = re.compile(r"<[a-z]+>|[a-z]+|[^ ]")
CALL = re.compile(r"([a-z]+) \( (0|[1-9](?: [0-9])*) \)")
"""A tool call as the policy writes it. There is one way to write each number, so that reading it loses nothing."""


def encode(text: str) -> list[int]:
    return [IDS.get(word, UNKNOWN) for word in WORD.findall(text)]


def decode(ids: list[int]) -> str:
    """All tokens but a last END."""
    return " ".join(NAMES[token] for token in (ids[:-1] if ids[-1:] == [END] else ids))


def prompt_ids(messages: list[dict[str, Any]]) -> list[int]:
    """The conversation up to where the policy goes on."""
    ids: list[int] = []
    for message in messages:
        if message["role"] == "assistant":
            ids += [*encode(written(message)), END]
        else:
            ids += encode(f"{message['content']}\n>")
    return ids


def written(message: dict[str, Any]) -> str:
    """An assistant message as the policy wrote it."""
    for call in message.get("tool_calls") or ():
        (value,) = json.loads(call["function"]["arguments"]).values()
        return f"{call['function']['name']}({value})"
    return message.get("content") or ""


def read(text: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What the policy wrote as an assistant message: a call of a tool if it is exactly one, else plain text."""
    match = CALL.fullmatch(text)
    parameters_by_tool = {tool["function"]["name"]: tool["function"]["parameters"]["properties"] for tool in tools}
    if match is None or match[1] not in parameters_by_tool:
        return {"role": "assistant", "content": text}
    (argument,) = parameters_by_tool[match[1]]
    function = {"name": match[1], "arguments": json.dumps({argument: int(match[2].replace(" ", ""))})}
    call = {"index": 0, "id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
