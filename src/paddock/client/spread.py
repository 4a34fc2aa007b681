"""Sessions over the hosts of a cluster: its door says which host has room for how many.

One connection leads to each host. A session goes where the door has taken a slot for it, so that many sessions of
one client are placed, and wait for their turn, as those of many clients are.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from paddock.client.returning import Tries
from paddock.client.transports.http import post_json
from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.client.policy import Reconnect
    from paddock.client.trunk import Lane, Trunk

PLACES_AT_ONCE = 200
NO_DOOR = (404, 405)
ANSWER_TAKES = 15.0


class Spread:
    def __init__(
        self, url: str, headers: dict[str, str], reconnect: Reconnect, trunk_for: Callable[[str], Trunk]
    ) -> None:
        """`trunk_for(lease)` is a connection, not opened yet, to the host that granted the lease."""
        self.trunks: dict[str, Trunk] = {}
        """By the host that each leads to."""
        self._url = f"{url}/places"
        self._headers = headers
        self._reconnect = reconnect
        self._trunk_for = trunk_for

    async def open_lanes(self, keys: Sequence[str], queue_timeout: float | None) -> dict[str, Lane | PaddockError]:
        """Open a session for each key, on hosts with room; who gets none has an error instead."""
        await self._drop_gone()
        loop, left = asyncio.get_running_loop(), list(keys)
        opened: dict[str, Lane | PaddockError] = {}
        began = loop.time()
        while left:
            wait = None if queue_timeout is None else max(0.0, began + queue_timeout - loop.time())
            try:
                places = await self._places(min(len(left), PLACES_AT_ONCE), wait)
            except PaddockError as error:
                return opened | dict.fromkeys(left, error)
            opening = []
            for host, leases in places.items():
                opening.append(self._open_at(host, left[: len(leases)], leases))
                left = left[len(leases) :]
            for some in await asyncio.gather(*opening):
                opened |= some
        return opened

    async def drop_unused(self) -> None:
        for host, trunk in list(self.trunks.items()):
            if not trunk.lanes:
                del self.trunks[host]
                await trunk.close()

    async def _places(self, count: int, wait: float | None) -> dict[str, list[str]]:
        """Leases by host, of at least one slot. A door that dies meanwhile is asked again when it is back."""
        asked = {"sessions": count, **({} if wait is None else {"queue_timeout": wait})}
        # Without a wish of ours the door waits for as long as it is set up to, which we do not know.
        timeout = None if wait is None else wait + ANSWER_TAKES
        answer = await Tries(self._reconnect).reach(lambda: post_json(self._url, self._headers, asked, timeout))
        return {place["host"]: place["leases"] for place in answer["places"]}

    async def _open_at(self, host: str, keys: list[str], leases: list[str]) -> dict[str, Lane | PaddockError]:
        try:
            if host not in self.trunks:
                trunk = self._trunk_for(leases[0])
                await trunk.open()
                self.trunks[host] = trunk
            await self.trunks[host].wait_back()
        except PaddockError as error:
            return dict.fromkeys(keys, error)
        return {lane.key: lane for lane in await self.trunks[host].open_lanes(keys, leases=leases)}

    async def _drop_gone(self) -> None:
        """Let go of connections to hosts that are no more."""
        for host, trunk in list(self.trunks.items()):
            if trunk.is_gone:
                del self.trunks[host]
                await trunk.close()


def is_no_door(error: PaddockError | None) -> bool:
    """Whether the server does not know what it was asked: a host by itself, say."""
    return error is not None and error.data.get("status") in NO_DOOR
