"""The conversations of one rollout in token mode: what each call's prompt ids are, and what they continue.

A request that continues a known conversation gets the ids of that prompt and its answer, followed by the ids of the
new messages. Any other request is rendered as a whole. `Call.token_mode` says which it was, and why.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from paddock.capture.tokens.history import History
from paddock.capture.tokens.rendering import plain_text
from paddock.capture.tokens.request import TokenCall, TokenModeRefusal, check_request, find_images
from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.engines import InferenceEngine
    from paddock.capture.tokens.history import AnsweredCall, Lookup
    from paddock.capture.tokens.opening import RenderingSource
    from paddock.capture.tokens.rendering import Rendering
    from paddock.capture.trace import Call

FIRST, BRIDGE, FULL, ENGINE = "first", "bridge", "full", "engine"
"""How a prompt was made: the first of a conversation, an extension, rendered as a whole, or by the engine."""

LONG_TEXT_CHARACTERS = 10_000
"""New messages that are longer are rendered on a thread: that takes longer than the hand-off to it."""


class TokenConversations:
    """The state of one rollout. The proxy makes one and gives it to every exchange."""

    def __init__(self, source: RenderingSource, log: Callable[[str], None]) -> None:
        self._source = source
        self._log = log
        self._history = History()

    async def prepare(self, call: Call, chat: dict[str, Any], engine: InferenceEngine) -> TokenCall | None:
        """The call with its prompt ids; None if the engine has to render it, because it has images.

        Raises TokenModeRefusal for a request that cannot be sampled exactly, and without a tokenizer."""
        messages: list[dict[str, Any]] = chat["messages"]
        if (image := find_images(messages)) is not None:
            notice = f"message {image} has a part that is no text, so the engine renders the prompt"
            self._log(f"{call.id}: {notice}")
            call.token_mode = {"render": ENGINE, "reason": notice}
            return None
        stop_strings = check_request(chat, engine)
        try:
            rendering = await self._source.open()
        except PaddockError as error:
            hint = f" ({error.hint})" if error.hint else ""
            raise TokenModeRefusal(f"token mode cannot be used: {error}{hint}") from error
        tools = offered_tools(chat)
        lookup = self._history.find(messages, tools)
        try:
            prompt = await self._make_prompt(call, rendering, lookup, messages, tools)
        except Exception as error:
            message = f"the renderer {rendering.family} cannot render this conversation: {error}"
            raise TokenModeRefusal(message) from error
        if call.token_mode and (reason := call.token_mode.get("reason")):
            self._log(f"{call.id}: {reason}")

        def on_answer(sampled: list[int], message: dict[str, Any], malformed: list[dict[str, str]]) -> None:
            self._history.add(lookup, call.id, prompt, sampled, message)
            if malformed and call.token_mode is not None:
                call.token_mode["malformed_tool_calls"] = malformed

        seed = chat.get("seed")
        return TokenCall(
            engine=engine,
            rendering=rendering,
            model=self._source.endpoint.name,
            prompt=prompt,
            tools=tools,
            stop_strings=stop_strings,
            seed=seed if isinstance(seed, int) else None,
            on_answer=on_answer,
        )

    def restore(self, call: Call, chat: dict[str, Any]) -> None:
        """Continue from the ids of a call whose recorded answer was sent again."""
        lookup = self._history.find(chat["messages"], offered_tools(chat))
        if call.prompt_token_ids and call.completion_token_ids and call.token_problem is None:
            prompt, sampled = call.prompt_token_ids, call.completion_token_ids
            self._history.add(lookup, call.id, prompt, sampled, call.message)

    async def _make_prompt(
        self,
        call: Call,
        rendering: Rendering,
        lookup: Lookup,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> list[int]:
        described: dict[str, Any] = {"renderer": rendering.family}
        call.token_mode = described
        before = lookup.answered
        if before is not None:
            extended = await self._extend(rendering, before, messages[before.size :], tools)
            if extended is not None and _begins_with(extended, before.prompt, before.sampled):
                described |= {"render": BRIDGE, "continues": before.call_id}
                if lookup.is_branch:
                    described |= {"branch": True, "reason": f"{before.call_id} was continued in another way before"}
                return extended
        change = describe_change(lookup, messages)
        if change is not None:
            described |= {"render": FULL, "branch": True, "reason": change}
        elif before is not None:
            reason = f"the renderer {rendering.family} has no exact extension of {before.call_id} by these messages"
            described |= {"render": FULL, "reason": reason}
        else:
            described |= {"render": FIRST}
        return await asyncio.to_thread(rendering.render, messages, tools)

    @staticmethod
    async def _extend(
        rendering: Rendering,
        before: AnsweredCall,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
    ) -> list[int] | None:
        arguments = (before.prompt, before.sampled, before.answer, messages, tools)
        characters = sum(len(plain_text(message.get("content"))) for message in messages)
        if characters > LONG_TEXT_CHARACTERS:
            return await asyncio.to_thread(rendering.extend, *arguments)
        return await rendering.run(rendering.extend, *arguments)


def describe_change(lookup: Lookup, messages: list[dict[str, Any]]) -> str | None:
    """How the messages differ from those that produced ids; None if they begin or continue a conversation."""
    if lookup.has_other_tools:
        return "the tools are not those of the earlier calls"
    answered = 0 if lookup.answered is None else lookup.answered.size
    if not lookup.shared and not lookup.has_answer:
        return None
    if lookup.shared and lookup.shared in (answered, len(messages)):
        return None
    role = messages[lookup.shared].get("role")
    if lookup.shared and not lookup.is_conversation:
        return "only the system prompt is known: the history was replaced, or another conversation began"
    return f"message {lookup.shared} ({role}) is not the one that produced the ids: the history was edited"


def offered_tools(chat: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that the prompt describes. With `tool_choice` "none", none."""
    choice = chat.get("tool_choice")
    is_none = choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")
    tools = chat.get("tools")
    return None if is_none or not tools else list(tools)


def _begins_with(ids: list[int], prompt: list[int], sampled: list[int]) -> bool:
    size = len(prompt)
    return ids[:size] == prompt and ids[size : size + len(sampled)] == sampled
