"""The fault hook: only for a plane that was started with faults, on loopback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.fleet.control.answers import Refused, answer
from paddock.fleet.control.faults import read_fault

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.control.plane import Plane


class Lab:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        if not self.plane.settings.faults:
            return []
        return [
            Route("/_lab/faults", self.add, methods=["POST"]),
            Route("/_lab/faults", self.listed, methods=["GET"]),
            Route("/_lab/faults", self.clear, methods=["DELETE"]),
        ]

    async def add(self, request: Request) -> Response:
        """Put one fault, or a list of them, in force."""
        try:
            given: Any = orjson.loads(await request.body())
            found = [read_fault(one) for one in (given if isinstance(given, list) else [given])]
        except ValueError as error:
            raise Refused(400, f"This is no fault: {error}.") from None
        for fault in found:
            self.plane.faults.add(fault)
        return self._tell()

    async def listed(self, request: Request) -> Response:
        return answer(self.plane.faults.to_list())

    async def clear(self, request: Request) -> Response:
        self.plane.faults.active.clear()
        return self._tell()

    def _tell(self) -> Response:
        self.plane.hosting.set_faults(self.plane.faults.to_list())
        return answer(self.plane.faults.to_list())
