"""The calls of one rollout: started, finished, linked to their parents, and passed to `on_call` to be stored.

Every call is written once when it ends, and again if it changes afterwards. There is one write at a time; a failed
write is kept in `storage_error` and stops nothing. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.prefix_tree import PrefixTree
from paddock.capture.trace import Call, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.capture.masking import Mask

LONGEST_WRITE_SECONDS = 60.0


class CallRecorder:
    """Makes the records of the calls of one proxy, and passes them on to be stored."""

    def __init__(self, on_call: Callable[[Call], Awaitable[None]], mask: Mask, log: Callable[[str], None]) -> None:
        self.calls: list[Call] = []
        self.step = ""
        """The step of the task to which new calls belong."""
        self.storage_error: str | None = None
        """Why a call could not be stored."""
        self._on_call = on_call
        self._mask = mask
        self._log = log
        self._latest: dict[tuple[str | None, bytes], Call] = {}
        """By session and messages."""
        self._unanswered: dict[tuple[str | None, bytes], list[Call]] = {}
        """Calls that ended without a complete response and were not repeated yet."""
        self._keys: dict[str, tuple[str | None, bytes]] = {}
        """By call, its session and messages."""
        self._prefixes = PrefixTree()
        self._write_lock = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    def start(
        self, role: Role, session: str | None, request: dict[str, Any], fingerprint: bytes, dialect: str = "chat"
    ) -> Call:
        """A new call. Earlier ones of the same session with the same messages become RETRIED, if they ended without
        a complete response."""
        index = len(self.calls)
        call = Call(f"c{index}", index, dialect, role, session, request, started=time.time(), step=self.step)
        key = self._keys[call.id] = (session, fingerprint)
        self._latest[key] = call
        for earlier in self._unanswered.pop(key, ()):
            self._mark_retried(earlier, call)
            self._write(earlier)
        self.calls.append(call)
        return call

    def _mark_retried(self, call: Call, following: Call) -> None:
        call.role = Role.RETRIED
        self._log(f"{call.id} was repeated as {following.id}")

    async def finish(self, call: Call) -> None:
        """End the call and write it. The write survives cancellation; `settle` waits for it."""
        call.ended = time.time()
        self._mask_secrets(call)
        self._check_repeated(call)
        if call.prompt_token_ids:
            prefix = self._prefixes.add(call)
            call.parent = None if prefix.parent is None else prefix.parent.id
            call.shared_tokens = prefix.parent_tokens
        self._log(describe(call))
        await asyncio.shield(self._write(call))

    def rewrite(self, call: Call) -> None:
        """Write a call again that has changed since it ended."""
        if call.ended is not None:
            self._write(call)

    def _check_repeated(self, call: Call) -> None:
        """Mark an incomplete call that was repeated while it ran, or keep it for a later repetition.

        A response that reached the agent completely is used, however often its prompt is repeated: agents sample one
        prompt several times on purpose, and start equal sub-agents.
        """
        if call.ok or call.role is Role.TITLE:
            return
        key = self._keys[call.id]
        if self._latest[key] is not call:
            self._mark_retried(call, self._latest[key])
        else:
            self._unanswered.setdefault(key, []).append(call)

    async def settle(self) -> None:
        """Wait until all writes have ended, or none ends for `LONGEST_WRITE_SECONDS`."""
        while self._writes:
            done, _ = await asyncio.wait(self._writes, timeout=LONGEST_WRITE_SECONDS)
            if not done:
                self.storage_error = (
                    f"{len(self._writes)} calls were not stored: no write ended in {LONGEST_WRITE_SECONDS:g} s"
                )
                self._log(self.storage_error)
                return

    def _write(self, call: Call) -> asyncio.Task[None]:
        task = asyncio.create_task(self._call_writer(call))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _call_writer(self, call: Call) -> None:
        async with self._write_lock:
            try:
                await self._on_call(call)
            except Exception as error:
                self.storage_error = self._mask.text(f"{call.id} was not stored: {type(error).__name__}: {error}")
                self._log(self.storage_error)

    def _mask_secrets(self, call: Call) -> None:
        if self._mask.is_in(orjson.dumps([call.message, call.usage])):
            call.message, call.usage = self._mask.value(call.message), self._mask.value(call.usage)
        text = "".join(call.tokens)
        if self._mask.text(text) != text:
            # A secret spans several tokens. The ids still say what was sampled.
            call.tokens, call.top_logprobs = [], []
        if call.error is not None:
            call.error = self._mask.text(call.error)


def fingerprint_messages(messages: Any) -> bytes:
    """Equal for equal messages, whatever the order of their keys."""
    return blake2b(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def describe(call: Call) -> str:
    """One line for the log."""
    seconds = (call.ended or call.started) - call.started
    result = call.error or call.finish_reason or "no end"
    sizes = f"{len(call.prompt_token_ids)}+{len(call.completion_token_ids)} tokens, {call.level}"
    flags = "".join((", aborted" if call.aborted else "", f", {len(call.attempts)} retries" if call.attempts else ""))
    return f"{call.id} {call.role}: {result}, status {call.status}, {sizes}, {seconds:.2f} s{flags}"
