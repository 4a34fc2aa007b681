"""Replay: when a session is lost with its host, its seed and actions are sent to a new session.

This happens only if the environment declares itself deterministic. The replayed replies must equal the recorded
ones. If they differ, or the replay fails or is cancelled, the episode is lost until the next reset.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from typing import TYPE_CHECKING, Any

import orjson

from paddock.client.reconnect import no_answer
from paddock.errors import EpisodeLost, PaddockError

if TYPE_CHECKING:
    from paddock.client.transports.ws import WebSocketTransport

ACTING_KINDS = frozenset(("step", "mcp"))
logger = logging.getLogger("paddock.client")


class RecordedEpisode:
    """The requests since the last reset."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, Any], bytes]] = []
        """Every request that acts, with a digest of its reply. The first is the reset."""
        self.replays = 0
        self.error: EpisodeLost | None = None
        """Why the episode cannot continue: the session now holds another state."""


class ReplayTransport:
    """A WebSocket transport that records the requests since the last reset."""

    def __init__(self, inner: WebSocketTransport) -> None:
        self.inner = inner
        self.replays = 0
        """How often an episode was replayed."""
        self._episode = RecordedEpisode()
        self._replay_lock = asyncio.Lock()

    async def open(self) -> None:
        await self.inner.open()

    async def request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout) as deadline:
                return await self._request(message, timeout)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise no_answer(message, timeout) from None

    async def fetch(self, path: str) -> Any:
        return await self.inner.fetch(path)

    async def close(self) -> None:
        self._episode = RecordedEpisode()
        await self.inner.close()

    def abandon(self) -> bool:
        return self.inner.abandon()

    def drop(self) -> None:
        self.inner.drop()

    async def _request(self, message: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        kind = message["type"]
        # Requests that arrive during a replay wait for it.
        async with self._replay_lock:
            if kind == "reset":
                self._episode = RecordedEpisode()
            episode = self._episode
            if episode.error is not None:
                raise episode.error
        try:
            reply = await self._request_or_replay(message, episode, timeout)
        except EpisodeLost as loss:
            # The caller got EpisodeLost, so later requests must get it too, until a reset.
            episode.error = loss
            raise
        if kind == "reset" or (kind in ACTING_KINDS and episode.requests):
            episode.requests.append((message, digest(reply)))
        return reply

    async def _request_or_replay(
        self, message: dict[str, Any], episode: RecordedEpisode, timeout: float | None
    ) -> dict[str, Any]:
        replays_before = episode.replays
        try:
            return await self.inner.request(message, timeout)
        except EpisodeLost as error:
            if not episode.requests or not self.inner.deterministic:
                raise
            loss = error
        async with self._replay_lock:
            if episode is not self._episode or episode.error is not None:
                raise episode.error or loss
            # Once, however many callers lost the same episode.
            if episode.replays == replays_before:
                await self._replay(episode, loss, timeout)
        return await self.inner.request(message, timeout)

    async def _replay(self, episode: RecordedEpisode, loss: EpisodeLost, timeout: float | None) -> None:
        """Send all requests to a new session. If the caller is cancelled meanwhile, the episode stays lost."""
        logger.warning("%s; replaying %d requests on a new session", loss.message, len(episode.requests))
        episode.error = loss
        for number, (message, recorded) in enumerate(episode.requests):
            try:
                replayed = digest(await self.inner.request(message, timeout))
            except PaddockError as error:
                raise EpisodeLost(
                    f"{loss.message}; its replay failed at request {number}: {error.message}", hint=loss.hint
                ) from error
            if replayed != recorded:
                raise EpisodeLost(
                    f"{loss.message}; its replay went another way at request {number}",
                    hint="the environment is not as deterministic as it declares (was reset given a seed?)",
                )
        episode.error = None
        episode.replays += 1
        self.replays += 1


def digest(reply: dict[str, Any]) -> bytes:
    """A hash of a reply without its number. An observation's metadata is left out, because it may hold times."""
    data = reply["data"]
    if reply["type"] == "observation":
        fields = {name: value for name, value in data["observation"].items() if name != "metadata"}
        data = [fields, data.get("reward"), data.get("done")]
    elif isinstance(data, dict):
        data = data.get("result", data.get("error"))
    return hashlib.blake2b(orjson.dumps(data, option=orjson.OPT_SORT_KEYS), digest_size=16).digest()
