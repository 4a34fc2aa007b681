"""An episode that outlives the host it ran on: the same seed and actions, given to a new session.

Only where the environment declares itself deterministic, and only if it answers what it answered before: an episode
that went another way is reported as lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import EpisodeLost, PaddockError

if TYPE_CHECKING:
    from paddock.client.transports.ws import WebSocketTransport

ACTS = frozenset(("step", "mcp"))
logger = logging.getLogger("paddock.client")


class ReplayTransport:
    """A WebSocket transport that remembers what was done since the last reset."""

    def __init__(self, inner: WebSocketTransport) -> None:
        self.inner = inner
        self.replays = 0
        """How often an episode was brought back."""
        self._done: list[tuple[dict[str, Any], bytes]] = []
        """Every request that acts, with a digest of its answer. The first is the reset."""
        self._lives = 0
        self._replaying = asyncio.Lock()

    @property
    def foreign(self) -> bool:
        return self.inner.foreign

    async def open(self) -> None:
        await self.inner.open()

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind = message["type"]
        if kind == "reset":
            self._done.clear()
        life = self._lives
        try:
            reply = await self.inner.request(message, timeout)
        except EpisodeLost as loss:
            if kind == "reset" or not self._done or not self.inner.deterministic:
                raise
            await self._bring_back(life, loss, timeout)
            reply = await self.inner.request(message, timeout)
        if kind == "reset" or (kind in ACTS and self._done):
            self._done.append((message, digest(reply)))
        return reply

    async def fetch(self, path: str) -> Any:
        return await self.inner.fetch(path)

    async def close(self) -> None:
        await self.inner.close()

    def drop(self) -> None:
        self.inner.drop()

    async def _bring_back(self, life: int, loss: EpisodeLost, timeout: float | None) -> None:
        """Do everything again elsewhere, once, however many callers have lost the same episode."""
        async with self._replaying:
            if self._lives != life:
                return
            logger.warning("%s; replaying %d requests on a new session", loss.message, len(self._done))
            for number, (message, before) in enumerate(self._done):
                try:
                    again = digest(await self.inner.request(message, timeout))
                except PaddockError as error:
                    raise EpisodeLost(
                        f"{loss.message}; its replay failed at request {number}: {error.message}", hint=loss.hint
                    ) from error
                if again != before:
                    self._done.clear()
                    raise EpisodeLost(
                        f"{loss.message}; its replay went another way at request {number}",
                        hint="the environment is not as deterministic as it declares (was reset given a seed?)",
                    )
            self._lives += 1
            self.replays += 1


def digest(reply: dict[str, Any]) -> bytes:
    """What an answer says, without its number. An observation's metadata may hold times, and does not count."""
    data = reply["data"]
    if reply["type"] == "observation":
        seen = {name: value for name, value in data["observation"].items() if name != "metadata"}
        data = [seen, data.get("reward"), data.get("done")]
    elif isinstance(data, dict):
        data = data.get("result", data.get("error"))
    return hashlib.blake2b(orjson.dumps(data, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
