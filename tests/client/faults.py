"""A TCP proxy that drops connections at random: before, within or after any piece of what either side sends."""

import asyncio
import random

from .proxy import Pair, Proxy

PASS, BEFORE, WITHIN, AFTER = "pass", "before", "within", "after"


class FaultyProxy(Proxy):
    """Cuts `most` connections in all, one of them at about every `every`-th piece. The same seed, the same dice."""

    def __init__(self, port: int, seed: int, every: int = 4, most: int = 150) -> None:
        super().__init__(port)
        self.cuts = 0
        self.is_calm = True
        """Whether everything passes for now."""
        self._dice = random.Random(seed)
        self._every = every
        self._most = most

    async def _up(self, pair: Pair, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if await self._is_cut(pair, pair.far, data):
                return
        pair.far.close()

    async def _down(self, pair: Pair, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(65536):
            if await self._is_cut(pair, pair.near, data):
                return
        pair.near.close()

    async def _is_cut(self, pair: Pair, to: asyncio.StreamWriter, data: bytes) -> bool:
        fault = self._fault()
        if fault is not BEFORE:
            to.write(data[: len(data) // 2] if fault is WITHIN else data)
        if fault is PASS:
            return False
        # What was written arrives before the end of the connection does.
        await asyncio.sleep(0.002)
        self.cuts += 1
        pair.cut()
        return True

    def _fault(self) -> str:
        if self.is_calm or self.cuts >= self._most or self._dice.randrange(self._every):
            return PASS
        return self._dice.choice((BEFORE, WITHIN, AFTER))
