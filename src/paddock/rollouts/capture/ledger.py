"""All calls of one rollout: begun, ended, linked, and handed on to be kept. No HTTP.

Every call is handed on once when it ends, and again if it changes afterwards. One write at a time;
a write that fails is told in `lost` and stops nothing.
"""

from __future__ import annotations

import asyncio
import time
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import orjson

from paddock.rollouts.prefixes import Prefixes
from paddock.rollouts.trace import Call, Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.rollouts.masking import Mask

LONGEST_WRITE = 60.0


class Ledger:
    def __init__(self, on_call: Callable[[Call], Awaitable[None]], mask: Mask, log: Callable[[str], None]) -> None:
        self.calls: list[Call] = []
        self.lost: str | None = None
        self._on_call = on_call
        self._mask = mask
        self._log = log
        self._latest: dict[tuple[str | None, bytes], Call] = {}
        """By session and messages."""
        self._unanswered: dict[tuple[str | None, bytes], list[Call]] = {}
        """Calls that ended without a complete answer, and that nobody has asked again yet."""
        self._keys: dict[str, tuple[str | None, bytes]] = {}
        """By call, its session and messages."""
        self._prefixes = Prefixes()
        self._one_write = asyncio.Lock()
        self._writes: set[asyncio.Task[None]] = set()

    def begin(
        self, role: Role, session: str | None, request: dict[str, Any], mark: bytes, dialect: str = "chat"
    ) -> Call:
        """A new call. Earlier ones of the same session with the same messages become RETRIED, if they have ended
        without a complete answer."""
        index = len(self.calls)
        call = Call(f"c{index}", index, dialect, role, session, request, started=time.time())
        key = self._keys[call.id] = (session, mark)
        self._latest[key] = call
        for earlier in self._unanswered.pop(key, ()):
            self._retry(earlier, call)
            self._write(earlier)
        self.calls.append(call)
        return call

    def _retry(self, call: Call, following: Call) -> None:
        call.role = Role.RETRIED
        self._log(f"{call.id} asked again as {following.id}")

    async def finish(self, call: Call) -> None:
        """Close the call and hand it on. Cancelled, it still comes to its end; `settle` waits for that."""
        call.ended = time.time()
        self._hide_secrets(call)
        self._decide(call)
        if call.prompt_token_ids:
            prefix = self._prefixes.add(call)
            call.parent = None if prefix.answered is None else prefix.answered.id
            call.shared_tokens = prefix.answered_tokens
        self._log(summary(call))
        await asyncio.shield(self._write(call))

    def rewrite(self, call: Call) -> None:
        """Hand a call on again that has changed since it ended."""
        if call.ended is not None:
            self._write(call)

    def _decide(self, call: Call) -> None:
        """Whether a call that has ended was asked again while it ran, or may be later.

        An answer that reached the agent completely counts as used, however often the same is asked: agents sample one
        prompt several times on purpose, and start equal sub-agents.
        """
        if call.ok or call.role is Role.TITLE:
            return
        key = self._keys[call.id]
        if self._latest[key] is not call:
            self._retry(call, self._latest[key])
        else:
            self._unanswered.setdefault(key, []).append(call)

    async def settle(self) -> None:
        """Wait until everything handed on was taken, or whoever takes it has clearly hung."""
        while self._writes:
            done, _ = await asyncio.wait(self._writes, timeout=LONGEST_WRITE)
            if not done:
                self.lost = f"{len(self._writes)} calls were not kept: no write ended in {LONGEST_WRITE:g} s"
                self._log(self.lost)
                return

    def _write(self, call: Call) -> asyncio.Task[None]:
        task = asyncio.create_task(self._hand_on(call))
        self._writes.add(task)
        task.add_done_callback(self._writes.discard)
        return task

    async def _hand_on(self, call: Call) -> None:
        async with self._one_write:
            try:
                await self._on_call(call)
            except Exception as error:
                self.lost = self._mask.text(f"{call.id} was not kept: {type(error).__name__}: {error}")
                self._log(self.lost)

    def _hide_secrets(self, call: Call) -> None:
        if self._mask.is_in(orjson.dumps([call.message, call.usage])):
            call.message, call.usage = self._mask.value(call.message), self._mask.value(call.usage)
        text = "".join(call.tokens)
        if self._mask.text(text) != text:
            # A secret spreads over several tokens. The ids still tell what was sampled.
            call.tokens, call.top_logprobs = [], []
        if call.error is not None:
            call.error = self._mask.text(call.error)


def fingerprint(messages: Any) -> bytes:
    """The same for the same messages, however they were written."""
    return blake2b(orjson.dumps(messages, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()


def summary(call: Call) -> str:
    """One line for the log."""
    took = (call.ended or call.started) - call.started
    how = call.error or call.finish_reason or "no end"
    sizes = f"{len(call.prompt_token_ids)}+{len(call.completion_token_ids)} tokens, {call.level}"
    flags = "".join((", aborted" if call.aborted else "", f", {len(call.attempts)} retries" if call.attempts else ""))
    return f"{call.id} {call.role}: {how}, status {call.status}, {sizes}, {took:.2f} s{flags}"
