"""The line between a host and a door: lines of JSON over one TCP connection that the host opens.

The host says who it is, then how it is: every half second, and at once when a slot comes free. The door asks for
slots over the same line. It dies with either end's process, and silence on it is noticed within two seconds, where
Ray would need fifteen. A door that starts anew knows everything as soon as the hosts have dialled again.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import h11
import orjson

from paddock.net import HttpConnection
from paddock.scale.roster import Host, Roster
from paddock.scale.turns import listen
from paddock.server.app import INSIDE_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.server.service import Service

BEAT_EVERY = 0.5
DIAL_AGAIN_AFTER = 0.2
DIAL_TIMEOUT = 2.0
ANSWER_WITHIN = 2.0
SECRET_WITHIN = 5.0
ALONE_FOR = 10.0
"""Seconds without any door after which a host is told so. A door that is started anew listens all the while."""
COALESCE = 0.005
logger = logging.getLogger("paddock.scale")
Address = tuple[str, int]


# -- the host's end -----------------------------------------------------------------------------------


class Neighbours:
    """The other hosts, as the doors tell of them: what the page shows comes from all."""

    def __init__(self) -> None:
        self.waiting = 0
        self.urls: list[str] = []

    async def gather(self, path: str, headers: dict[str, str]) -> list[bytes]:
        async def ask(url: str) -> bytes | None:
            connection = HttpConnection(url)
            try:
                async with asyncio.timeout(ANSWER_WITHIN):
                    return (await connection.request("GET", path, b"", {**headers, INSIDE_HEADER: "1"}))[2]
            except (OSError, TimeoutError, h11.ProtocolError):
                return None
            finally:
                await connection.close()

        answers = await asyncio.gather(*(ask(url) for url in self.urls))
        return [answer for answer in answers if answer is not None]


class Pulse:
    """Keeps one line to every door. Runs on the server's own loop: a host whose loop stands still is no host."""

    def __init__(
        self,
        service: Service,
        about: dict[str, Any],
        doors: list[Address],
        secret: str,
        *,
        alone: Callable[[], None] | None = None,
    ) -> None:
        self._service = service
        self._alone = alone
        """Called once, when all doors have been gone for too long."""
        self._together_at = time.monotonic()
        self._about = about
        self._doors = doors
        self._neighbours = Neighbours()
        self._secret = secret
        self._writers: dict[Address, asyncio.StreamWriter] = {}
        self._waiting: dict[Address, int] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._giving_way = 0
        self._soon: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._service.manager.slots.freed = self._tell_soon
        self._service.peers = self._neighbours
        self._tasks = [asyncio.create_task(self._keep(door)) for door in self._doors]
        self._tasks.append(asyncio.create_task(self._beat()))

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for writer in self._writers.values():
            writer.close()

    def tell(self) -> None:
        """How this host is, to every door."""
        self._soon = None
        line = orjson.dumps({"beat": self._state()}) + b"\n"
        for writer in self._writers.values():
            writer.write(line)

    def _tell_soon(self) -> None:
        """Many slots that come free together are told of once."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_later(COALESCE, self.tell)

    def _state(self) -> dict[str, Any]:
        manager = self._service.manager
        taken, capacity = manager.slots.taken(), manager.slots.capacity
        return {
            "free": capacity - taken + self._giving_way,
            "sessions": taken,
            "draining": manager.is_draining(),
        }

    async def _beat(self) -> None:
        manager = self._service.manager
        while True:
            # Every session is looked at for this: not for every word that is said.
            self._giving_way = manager.giving_way(manager.clock())
            self.tell()
            self._look_around()
            await asyncio.sleep(BEAT_EVERY)

    def _look_around(self) -> None:
        now = time.monotonic()
        if self._writers:
            self._together_at = now
        elif self._alone is not None and now - self._together_at > ALONE_FOR:
            alone, self._alone = self._alone, None
            alone()

    async def _keep(self, door: Address) -> None:
        """Dial, speak until the line breaks, and dial again."""
        while True:
            with suppress(OSError, TimeoutError, ValueError, asyncio.IncompleteReadError):
                async with asyncio.timeout(DIAL_TIMEOUT):
                    reader, writer = await asyncio.open_connection(*door)
                    give_up_silence(writer)
                try:
                    hello = {"secret": self._secret, **self._about, **self._state()}
                    writer.write(orjson.dumps(hello) + b"\n")
                    self._writers[door] = writer
                    while line := await reader.readline():
                        self._heard(door, writer, orjson.loads(line))
                finally:
                    self._writers.pop(door, None)
                    self._waiting.pop(door, None)
                    writer.close()
            await asyncio.sleep(DIAL_AGAIN_AFTER)

    def _heard(self, door: Address, writer: asyncio.StreamWriter, said: dict[str, Any]) -> None:
        if "reserve" in said:
            leases = [self._service.manager.reserve() for _ in range(said["count"])]
            granted = [lease for lease in leases if lease is not None]
            answer = {"reserved": said["reserve"], "leases": granted, **self._state()}
            writer.write(orjson.dumps(answer) + b"\n")
            if len(self._writers) > 1:
                self._tell_soon()
        elif "release" in said:
            self._service.manager.release(said["release"])
        elif "waiting" in said:
            self._waiting[door] = int(said["waiting"])
            self._neighbours.waiting = sum(self._waiting.values())
        elif "hosts" in said:
            self._neighbours.urls = [url for url in said["hosts"] if url != self._about["url"]]


def give_up_silence(writer: asyncio.StreamWriter) -> None:
    """A line breaks when beats are not taken for too long: a machine without power hangs up on nobody."""
    option = getattr(socket, "TCP_USER_TIMEOUT", None)
    if option is not None:
        milliseconds = int(1000 * ALONE_FOR)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, option, milliseconds)


# -- the door's end -----------------------------------------------------------------------------------


class Line:
    """One host that has dialled in."""

    def __init__(self, host: Host, writer: asyncio.StreamWriter) -> None:
        self.host = host
        self._writer = writer
        self._numbers = 0
        self._open: dict[int, asyncio.Future[list[str]]] = {}

    async def reserve(self, count: int = 1) -> list[str]:
        """Leases of slots there; fewer if the host has not as many, or is gone. Counts `asked` down again."""
        self._numbers += 1
        answer: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        self._open[self._numbers] = answer
        number = self._numbers
        leases: list[str] = []
        try:
            self.say({"reserve": number, "count": count})
            async with asyncio.timeout(ANSWER_WITHIN):
                leases = await answer
        except TimeoutError:
            pass
        finally:
            self.host.asked -= count
            self._open.pop(number, None)
        if len(leases) < count:
            # It has fewer than it said: none, until it speaks again.
            self.host.free = 0
        return leases

    def say(self, document: dict[str, Any]) -> None:
        self._writer.write(orjson.dumps(document) + b"\n")

    def heard(self, said: dict[str, Any], now: float) -> None:
        host, state = self.host, said.get("beat", said)
        host.seen = now
        host.free, host.sessions = int(state["free"]), int(state["sessions"])
        host.draining = bool(state["draining"])
        if "reserved" not in said:
            return
        answer = self._open.pop(said["reserved"], None)
        if answer is not None and not answer.done():
            answer.set_result(said["leases"])
            return
        for lease in said["leases"]:
            self.say({"release": lease})

    def close(self) -> None:
        self._writer.close()
        for answer in self._open.values():
            if not answer.done():
                answer.set_result([])


class Switchboard:
    """Takes the calls of hosts, and of other doors. `changed` hears of every word of a host, and of its end."""

    def __init__(self, roster: Roster, secret: str, changed: Callable[[], None]) -> None:
        self.lines: dict[str, Line] = {}
        self._roster = roster
        self._secret = secret
        self._changed = changed

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One call, from its first word to its end. The callback of `asyncio.start_server`."""
        line: Line | None = None
        try:
            async with asyncio.timeout(SECRET_WITHIN):
                hello = orjson.loads(await reader.readline() or b"{}")
            if not hmac.compare_digest(str(hello.pop("secret", "")), self._secret):
                logger.warning("somebody without the secret called at the hosts' port")
                return
            if "door" in hello:
                await listen(self._roster.turns, hello["door"], reader)
                return
            host = Host(seen=self._roster.clock(), **hello)
            line = Line(host, writer)
            before = self.lines.get(host.key)
            self.lines[host.key] = line
            if before is not None:
                before.close()
            self._roster.join(host)
            self._introduce()
            self._changed()
            while said := await reader.readline():
                line.heard(orjson.loads(said), self._roster.clock())
                self._changed()
        except (OSError, TimeoutError, ValueError, TypeError) as error:
            logger.debug("a host's line broke: %s", error)
        except asyncio.CancelledError:
            # Only the door's own end cancels a call, and whoever started it takes that for a failure.
            logger.debug("the door ends")
        finally:
            writer.close()
            if line is not None:
                self._hung_up(line)

    def tell_all(self, document: dict[str, Any]) -> None:
        for line in self.lines.values():
            line.say(document)

    def _introduce(self) -> None:
        """Tell the hosts of one another."""
        self.tell_all({"hosts": [host.url for host in self._roster.hosts.values()]})

    def drop_silent(self) -> None:
        for key in self._roster.silent():
            logger.warning("host %s has not been heard of: it counts as lost", key)
            self.lines[key].close()
            self._hung_up(self.lines[key])

    def _hung_up(self, line: Line) -> None:
        key = line.host.key
        line.close()
        if self.lines.get(key) is line:
            del self.lines[key]
            self._roster.leave(key)
            self._introduce()
            self._changed()
