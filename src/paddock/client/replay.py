"""An episode that outlives the host it ran on: the same seed and actions, given to a new session.

Only where the environment declares itself deterministic, and only if it answers what it answered before: an episode
that went another way, or was not brought back to the end, is lost, and stays so until a reset begins another.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.returning import no_answer
from paddock.errors import EpisodeLost, PaddockError

if TYPE_CHECKING:
    from paddock.client.transports.ws import WebSocketTransport

ACTS = frozenset(("step", "mcp"))
logger = logging.getLogger("paddock.client")


class Remembered:
    """What was done since the last reset."""

    def __init__(self) -> None:
        self.done: list[tuple[dict[str, Any], bytes]] = []
        """Every request that acts, with a digest of its answer. The first is the reset."""
        self.lives = 0
        """How often it was brought back."""
        self.broken: EpisodeLost | None = None
        """Why it cannot go on: what the session holds now is not this episode."""


class ReplayTransport:
    """A WebSocket transport that remembers what was done since the last reset."""

    def __init__(self, inner: WebSocketTransport) -> None:
        self.inner = inner
        self.replays = 0
        """How often an episode was brought back."""
        self._episode = Remembered()
        self._replaying = asyncio.Lock()

    async def open(self) -> None:
        await self.inner.open()

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout) as deadline:
                return await self._ask(message, timeout)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise no_answer(message, timeout) from None

    async def fetch(self, path: str) -> Any:
        return await self.inner.fetch(path)

    async def close(self) -> None:
        self._episode = Remembered()
        await self.inner.close()

    def abandon(self) -> bool:
        return self.inner.abandon()

    def drop(self) -> None:
        self.inner.drop()

    async def _ask(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind = message["type"]
        # What comes during a replay comes after it.
        async with self._replaying:
            if kind == "reset":
                self._episode = Remembered()
            episode = self._episode
            if episode.broken is not None:
                raise episode.broken
        try:
            reply = await self._carry_out(message, episode, timeout)
        except EpisodeLost as loss:
            # Who was told that it is lost must not find it going on.
            episode.broken = loss
            raise
        if kind == "reset" or (kind in ACTS and episode.done):
            episode.done.append((message, digest(reply)))
        return reply

    async def _carry_out(self, message: dict[str, Any], episode: Remembered, timeout: float | None) -> dict[str, Any]:
        life = episode.lives
        try:
            return await self.inner.request(message, timeout)
        except EpisodeLost as error:
            if not episode.done or not self.inner.deterministic:
                raise
            loss = error
        async with self._replaying:
            if episode is not self._episode or episode.broken is not None:
                raise episode.broken or loss
            # Once, however many callers have lost the same episode.
            if episode.lives == life:
                await self._bring_back(episode, loss, timeout)
        return await self.inner.request(message, timeout)

    async def _bring_back(self, episode: Remembered, loss: EpisodeLost, timeout: float | None) -> None:
        """Do everything again elsewhere. Who gives up on it leaves an episode that is broken."""
        logger.warning("%s; replaying %d requests on a new session", loss.message, len(episode.done))
        episode.broken = loss
        for number, (message, before) in enumerate(episode.done):
            try:
                again = digest(await self.inner.request(message, timeout))
            except PaddockError as error:
                raise EpisodeLost(
                    f"{loss.message}; its replay failed at request {number}: {error.message}", hint=loss.hint
                ) from error
            if again != before:
                raise EpisodeLost(
                    f"{loss.message}; its replay went another way at request {number}",
                    hint="the environment is not as deterministic as it declares (was reset given a seed?)",
                )
        episode.broken = None
        episode.lives += 1
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
