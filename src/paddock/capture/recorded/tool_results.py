"""Results of tools that are replaced in what the model gets. The agent keeps its own, and so does its request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

TOOL = "tool"


def find_results(messages: list[Any]) -> Iterator[tuple[int, str, str]]:
    """The tool results of a conversation: position of the message, id of the tool call, and key of the result.

    The key has the tool's name and arguments too, because some engines give several conversations the same ids."""
    keys: dict[str, str] = {}
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        for call in message.get("tool_calls") or ():
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                keys[str(call.get("id"))] = f"{call.get('id')} {function.get('name')} {function.get('arguments')}"
        call_id = str(message.get("tool_call_id"))
        if message.get("role") == TOOL:
            yield position, call_id, keys.get(call_id, call_id)


def replace_results(messages: list[Any], results: Mapping[str, str]) -> tuple[list[Any], dict[str, str]]:
    """The messages with the results of these keys replaced, and those that were."""
    if not results:
        return messages, {}
    replaced, used = list(messages), {}
    for position, _, key in find_results(messages):
        if key in results:
            used[key] = results[key]
            replaced[position] = {**messages[position], "content": results[key]}
    return replaced, used
