"""Fault injection, for tests of clients: responses that are late, wrong, lost, or never come.

An ASGI layer around a plane and around each of its instances. Paths of an instance are matched as
`/INSTANCE_ID/path`. `after` does the work and then drops the response: the case that separates safe retries from
unsafe ones. The routes under `/_lab/faults` exist only in a plane that was started with faults, on loopback.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson
from starlette.routing import Route

from paddock.fleet.plane.http import HttpError, json_response

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from paddock.fleet.plane.plane import Plane

MAX_HANG_SECONDS = 3600.0
_NUMBERS = itertools.count(1)


@dataclass(slots=True)
class Fault:
    """What happens to the next `times` requests that match; -1 means all."""

    path: str
    method: str | None = None
    status: int | None = None
    times: int = 1
    delay: float = 0.0
    hang: bool = False
    drop: bool = False
    dribble: float = 0.0
    """Seconds between the single bytes of the response."""
    after: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    id: str = ""
    hits: int = 0

    def matches(self, method: str, path: str) -> bool:
        is_spent = 0 <= self.times <= self.hits
        return not is_spent and self.method in (None, method) and re.search(self.path, path) is not None

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


def read_fault(document: Any) -> Fault:
    """A fault from JSON. Raises ValueError that says what is wrong with it."""
    if not isinstance(document, dict):
        raise ValueError("a fault is an object")
    kinds = {"path": str, "method": str, "id": str, "status": int, "times": int, "headers": dict}
    kinds |= {"delay": float, "dribble": float, "hang": bool, "drop": bool, "after": bool}
    unknown = document.keys() - kinds.keys() - {"body", "hits"}
    if unknown:
        raise ValueError(f"a fault has no {', '.join(sorted(unknown))}; it has {', '.join(sorted(kinds))} and body")
    values = {name: value for name, value in document.items() if value is not None and name != "hits"}
    for name, value in values.items():
        kind: Any = (int, float) if kinds.get(name) is float else kinds.get(name, object)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise ValueError(f"'{name}' of a fault must be of type {kinds[name].__name__}")
    if "path" not in values:
        raise ValueError("'path' of a fault is missing: a regular expression")
    try:
        re.compile(values["path"])
    except re.error as error:
        raise ValueError(f"'path' of a fault is no regular expression: {error}") from None
    if "method" in values:
        values["method"] = values["method"].upper()
    values.setdefault("id", f"fault-{next(_NUMBERS)}")
    return Fault(**values)


class Faults:
    """The active faults, the oldest first."""

    def __init__(self) -> None:
        self.active: list[Fault] = []

    def add(self, fault: Fault) -> None:
        self.active.append(fault)

    def replace(self, documents: list[Any]) -> None:
        """Make these active. One that was active before with the same id keeps its count."""
        hits = {fault.id: fault.hits for fault in self.active}
        self.active = [read_fault(document) for document in documents]
        for fault in self.active:
            fault.hits = hits.get(fault.id, 0)

    def hit(self, method: str, path: str) -> Fault | None:
        """The first fault that matches, counted."""
        match = next((fault for fault in self.active if fault.matches(method, path)), None)
        if match is not None:
            match.hits += 1
        return match

    def to_list(self) -> list[dict[str, Any]]:
        return [fault.to_dict() for fault in self.active]


class FaultLayer:
    """An ASGI application whose requests go through the faults first.

    It must be the outermost layer: to drop a connection it uses the transport of the server.
    """

    def __init__(self, app: Any, faults: Faults, prefix: str = "") -> None:
        self.app = app
        self.faults = faults
        self.prefix = prefix

    def __getattr__(self, name: str) -> Any:
        return getattr(self.app, name)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        fault = None
        if scope["type"] == "http" and self.faults.active and not scope["path"].startswith("/_lab/"):
            fault = self.faults.hit(scope["method"], self.prefix + scope["path"])
        if fault is None:
            await self.app(scope, receive, send)
            return
        if fault.after:
            await self.app(scope, receive, _discard)
        if fault.delay:
            await asyncio.sleep(fault.delay)
        if fault.hang:
            await _wait_for_disconnect(receive)
        elif fault.drop:
            await _drop(receive, send)
        elif fault.status is not None:
            await _respond(fault, _dribbling(send, fault.dribble))
        elif fault.after:
            await _drop(receive, send)
        else:
            await self.app(scope, receive, _dribbling(send, fault.dribble))


async def _discard(message: Any) -> None:
    """A `send` that loses the response."""


async def _respond(fault: Fault, send: Any) -> None:
    document = {"detail": "injected fault"} if fault.body is None else fault.body
    body = document.encode() if isinstance(document, str) else orjson.dumps(document)
    kind = "text/plain" if isinstance(document, str) else "application/json"
    headers = {"content-type": kind, "content-length": str(len(body)), **fault.headers}
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": fault.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def _dribbling(send: Any, pause: float) -> Any:
    if not pause:
        return send

    async def slowly(message: Any) -> None:
        if message["type"] != "http.response.body":
            await send(message)
            return
        for byte in message.get("body", b""):
            await send({"type": "http.response.body", "body": bytes([byte]), "more_body": True})
            await asyncio.sleep(pause)
        await send({"type": "http.response.body", "body": b"", "more_body": message.get("more_body", False)})

    return slowly


async def _drop(receive: Any, send: Any) -> None:
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    if transport is None:
        raise RuntimeError("this server does not let a connection be dropped")
    transport.abort()
    await _wait_for_disconnect(receive)


async def _wait_for_disconnect(receive: Any) -> None:
    async with asyncio.timeout(MAX_HANG_SECONDS):
        while (await receive())["type"] != "http.disconnect":
            pass


class FaultRoutes:
    def __init__(self, plane: Plane) -> None:
        self.plane = plane

    def routes(self) -> list[Route]:
        if not self.plane.settings.faults:
            return []
        return [
            Route("/_lab/faults", self.add, methods=["POST"]),
            Route("/_lab/faults", self.list_all, methods=["GET"]),
            Route("/_lab/faults", self.clear, methods=["DELETE"]),
        ]

    async def add(self, request: Request) -> Response:
        """Activate one fault, or a list of them."""
        try:
            body: Any = orjson.loads(await request.body())
            faults = [read_fault(each) for each in (body if isinstance(body, list) else [body])]
        except ValueError as error:
            raise HttpError(400, f"This is no fault: {error}.") from None
        for fault in faults:
            self.plane.faults.add(fault)
        return self._apply()

    async def list_all(self, request: Request) -> Response:
        return json_response(self.plane.faults.to_list())

    async def clear(self, request: Request) -> Response:
        self.plane.faults.active.clear()
        return self._apply()

    def _apply(self) -> Response:
        self.plane.instances.set_faults(self.plane.faults.to_list())
        return json_response(self.plane.faults.to_list())
