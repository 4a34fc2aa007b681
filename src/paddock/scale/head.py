"""The head of a Ray cluster as a process sees it that uses the cluster: there, away, or back without its memory.

Ray waits for a head that is away, mostly without a word; after a minute it ends the process, and what that has placed
stays. Here a head is looked at each second, so that everybody knows, and there is time for an end in order. Whether a
head that is started again still knows its cluster is up to Ray: by default it keeps everything in memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from paddock.errors import ClusterError
from paddock.scale.cluster import ray_module

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ResultT = TypeVar("ResultT")
Seen = Literal["there", "away", "forgot", "cut off"]

LOOK_EVERY = 1.0
ANSWER_WITHIN = 2.0
RAY_WAITS = 60.0
"""Seconds after which Ray ends a process whose head is away, if it is not told otherwise."""
RAY_WAITS_NAME = "RAY_gcs_rpc_server_reconnect_timeout_s"
END_TAKES = 20.0
"""Seconds of that which we keep for an end in order; Ray's own part of it takes five."""
UNAUTHENTICATED = 16
KEY, SPACE = b"head", b"paddock"
logger = logging.getLogger("paddock.scale")


class Head:
    """Ask `is_there` before anything is placed. `watch` in a task of its own."""

    def __init__(
        self,
        address: str,
        look: Callable[[], Seen] | None = None,
        *,
        patience: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self.away_since: float | None = None
        self.given_up: ClusterError | None = None
        self._look = look or look_at_head
        self._patience = patience_of_ray() if patience is None else patience
        self._clock = clock
        self._changed = asyncio.Event()

    @classmethod
    def joined(cls) -> Head:
        """That of the cluster which this process has joined."""
        return cls(str(ray_module().get_runtime_context().gcs_address))

    @property
    def is_there(self) -> bool:
        return self.away_since is None and self.given_up is None

    def shown(self) -> dict[str, Any]:
        away = None if self.away_since is None else round(self._clock() - self.away_since, 1)
        return {"address": self.address, "away_seconds": away}

    async def watch(self) -> ClusterError:
        """Look at it until it is given up; then why. Losses and returns are logged."""
        while self.given_up is None:
            self.note(await self._seen())
            if self.given_up is None:
                await asyncio.sleep(LOOK_EVERY)
        logger.error("%s", self.given_up)
        return self.given_up

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """For the time of a block, which is cancelled when the head is given up, and raises ClusterError then."""
        block = asyncio.current_task()
        assert block is not None
        watching = asyncio.ensure_future(self.watch())
        watching.add_done_callback(lambda _: self.given_up is not None and block.cancel())
        try:
            yield
        except asyncio.CancelledError:
            if self.given_up is None or block.uncancel() > 0:
                raise
            raise self.given_up from None
        finally:
            watching.cancel()

    async def change(self) -> None:
        """Until it goes, comes back or is given up."""
        await self._changed.wait()

    def note(self, seen: Seen) -> None:
        """What a look at it has shown."""
        before = (self.away_since is None, self.given_up is None)
        if seen in FINAL:
            self.given_up = FINAL[seen](self.address)
        elif seen == "there":
            if self.away_since is not None:
                logger.warning("the Ray head at %s is back", self.address)
            self.away_since = None
        elif self.away_since is None:
            self.away_since = self._clock()
            logger.error(
                "the Ray head at %s does not answer: what runs goes on, nothing new is placed; waiting %g s for it",
                self.address,
                self._patience,
            )
        elif self._clock() - self.away_since >= self._patience:
            self.given_up = away_too_long(self.address, self._patience)
        if before != (self.away_since is None, self.given_up is None):
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def _seen(self) -> Seen:
        try:
            # Ray ends a look by itself; the time beyond that is for a thread that gets no core.
            return await in_time(self._look, 3 * ANSWER_WITHIN)
        except TimeoutError:
            return "away"


def look_at_head() -> Seen:
    """Ask it something small, by way of our own node. Blocks for two seconds at most."""
    from ray._private import worker

    driver: Any = worker.global_worker
    try:
        if not listens(str(driver.node.raylet_socket_name)):
            return "cut off"
        driver.gcs_client.internal_kv_exists(KEY, SPACE, timeout=ANSWER_WITHIN)
    except AttributeError:
        # This process has left the cluster, or its Ray has no such parts: then nobody can look.
        return "there"
    except Exception as error:
        # Older versions of Ray have no class for it.
        refused = type(error).__name__ == "AuthenticationError"
        return "forgot" if refused or getattr(error, "rpc_code", None) == UNAUTHENTICATED else "away"
    return "there"


def listens(path: str) -> bool:
    """Whether somebody is behind a socket of this machine. A node whose process died leaves its file."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(ANSWER_WITHIN)
        try:
            probe.connect(path)
        except TimeoutError:
            return True
        except OSError:
            return False
    return True


async def in_time(call: Callable[[], ResultT], seconds: float) -> ResultT:
    """What a call into Ray returns, which may block. One that does not end is left behind. Raises TimeoutError.

    It has a thread of its own: those of the loop are waited for at its end.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ResultT] = loop.create_future()

    def settle(settle_it: Callable[[Any], None], value: Any) -> None:
        if not answer.done():
            settle_it(value)

    def run() -> None:
        told: tuple[Callable[[Any], None], Any]
        try:
            told = (answer.set_result, call())
        except Exception as error:
            told = (answer.set_exception, error)
        try:
            loop.call_soon_threadsafe(settle, *told)
        except RuntimeError:
            logger.debug("an answer of Ray came after the end: %s", told[1])

    threading.Thread(target=run, name="paddock-asks-ray", daemon=True).start()
    async with asyncio.timeout(seconds):
        return await answer


def patience_of_ray() -> float:
    """How long we wait for a head that is away."""
    try:
        waits = float(os.environ.get(RAY_WAITS_NAME, RAY_WAITS))
    except ValueError:
        waits = RAY_WAITS
    return max(waits - END_TAKES, waits / 3)


def away_too_long(address: str, seconds: float) -> ClusterError:
    return ClusterError(
        f"the Ray head at {address} has not answered for {seconds:g} s",
        hint="start the head and its nodes again (`ray stop`, `ray start`), then this command",
    )


def forgotten(address: str) -> ClusterError:
    return ClusterError(
        f"the Ray head at {address} was started anew and knows nothing of this cluster any more",
        hint="start its nodes again (`ray stop`, `ray start --address`), then this command",
    )


def cut_off(address: str) -> ClusterError:
    return ClusterError(
        f"the Ray node that this process used is gone, and with it the way to the head at {address}",
        hint="start the node again (`ray start`; the head first, if it is gone too), then this command",
    )


FINAL: dict[Seen, Callable[[str], ClusterError]] = {"forgot": forgotten, "cut off": cut_off}
"""What no waiting mends."""
