"""The owner's end of the socket to a supervisor: requests with answers, and what it tells by itself.

Knows messages and descriptors, not what they mean.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import marshal
import os
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Sequence

MARSHAL_VERSION = 2
"""Read alike by every Python that may run the supervisor."""
LONGEST_ANSWER = 65536
MOST_DESCRIPTORS = 4
ANSWER_TIMEOUT = 10.0


class Listener(Protocol):
    def happened(self, words: list[str]) -> None:
        """The supervisor told something by itself."""

    def ended(self) -> None:
        """The supervisor is gone."""

    def came_late(self, name: str, words: list[str]) -> None:
        """An answer that nobody waits for any more."""


class Control:
    """One connection. Use it from one event loop only."""

    def __init__(self, connection: socket.socket, listener: Listener) -> None:
        self._connection = connection
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, tuple[str, asyncio.Future[tuple[list[str], list[int]]]]] = {}
        self.open = True
        connection.setblocking(False)
        self._loop.add_reader(connection.fileno(), self._readable)

    def new_number(self) -> int:
        return next(self._numbers)

    async def ask(
        self,
        name: str,
        arguments: dict[str, Any],
        descriptors: Sequence[int] = (),
        *,
        number: int | None = None,
        timeout: float = ANSWER_TIMEOUT,
    ) -> tuple[list[str], list[int]]:
        """The words and descriptors of the answer; the descriptors are the caller's to close.

        Raises OSError if the supervisor could not do it, SandboxError if there is no answer.
        """
        number = number or self.new_number()
        answer: asyncio.Future[tuple[list[str], list[int]]] = self._loop.create_future()
        self._send(number, name, arguments, descriptors)
        self._waiting[number] = (name, answer)
        try:
            async with asyncio.timeout(timeout):
                return await answer
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer to {name} within {timeout:g} s") from None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                words, given = answer.result()
                close_all(given)
                self._listener.came_late(name, words)
            raise

    def tell(self, name: str, arguments: dict[str, Any]) -> None:
        """Ask without waiting for the answer."""
        with suppress(SandboxError):
            self._send(self.new_number(), name, arguments, ())

    def close(self) -> None:
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._connection.fileno())
        self._connection.close()
        waiting, self._waiting = self._waiting, {}
        for name, answer in waiting.values():
            if not answer.done():
                answer.set_exception(SandboxError(f"the sandbox ended before it answered to {name}"))

    def _send(self, number: int, name: str, arguments: dict[str, Any], descriptors: Sequence[int]) -> None:
        if not self.open:
            raise SandboxError("the sandbox has ended")
        message = marshal.dumps((number, name, arguments), MARSHAL_VERSION)
        try:
            socket.send_fds(self._connection, [message], list(descriptors))
        except BlockingIOError:
            raise SandboxError("the sandbox does not take requests any more") from None
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                hint = "write it to a file and run that"
                raise SandboxError(f"a command of {len(message)} bytes is too long", hint=hint) from None
            raise SandboxError("the sandbox has ended") from error

    def _readable(self) -> None:
        while self.open:
            try:
                data, descriptors, _, _ = socket.recv_fds(
                    self._connection, LONGEST_ANSWER, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            if not data:
                self.close()
                self._listener.ended()
                return
            self._take(data.decode("utf-8", "replace").split(" "), descriptors)

    def _take(self, words: list[str], descriptors: list[int]) -> None:
        number = int(words[0])
        name, answer = self._waiting.pop(number, ("", None))
        if answer is not None and not answer.done():
            if words[1] == "!":
                close_all(descriptors)
                answer.set_exception(OSError(int(words[2]), " ".join(words[3:])))
            else:
                answer.set_result((words[1:], descriptors))
            return
        close_all(descriptors)
        if number == 0:
            self._listener.happened(words[1:])
        elif name and words[1] != "!":
            self._listener.came_late(name, words[1:])


def close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
