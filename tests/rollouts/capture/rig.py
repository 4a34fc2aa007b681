"""A capture between a scripted model and a plain HTTP client, all on real sockets."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from paddock.rollouts.capture import Capture, CaptureSettings, Upstream
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.trace import Call
from rollouts.capture.scripted import Scripted

KEY = "sk-upstream-very-secret"
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]


def run(body: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await body

    asyncio.run(bounded())


def settings(**changes: Any) -> CaptureSettings:
    return CaptureSettings(**{"first_pause": 0.01, "longest_pause": 0.02, **changes})


@dataclass
class Got:
    """What the agent got."""

    status: int
    text: str
    headers: dict[str, str]

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.text)
        return found

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document["error"]
        return found

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def said(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@dataclass
class Rig:
    model: Scripted
    upstream: Upstream
    capture: Capture
    session: aiohttp.ClientSession
    url: str
    kept: list[Call]

    def body(self, text: str = "hello", **changes: Any) -> dict[str, Any]:
        return {"model": "policy", "messages": [{"role": "user", "content": text}], **changes}

    async def ask(self, text: str = "hello", *, headers: dict[str, str] | None = None, **changes: Any) -> Got:
        return await self.post(json.dumps(self.body(text, **changes)).encode(), headers=headers)

    async def post(
        self, raw: bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> Got:
        sent = {"Authorization": f"Bearer {self.capture.secret}", **(headers or {})}
        async with self.session.post(self.url + path, data=io.BytesIO(raw), headers=sent) as response:
            return Got(response.status, await response.text(), dict(response.headers))

    async def last(self) -> Call:
        """The latest call, once it was handed on."""
        await self.until(lambda: bool(self.capture.calls) and self.capture.calls[-1] in self.kept)
        return self.capture.calls[-1]

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def rig(
    model: Scripted,
    *,
    on_call: Callable[[Call], Awaitable[None]] | None = None,
    engine: str | None = None,
    upstream: Upstream | None = None,
    classify: Any = None,
    secrets: tuple[str, ...] = (),
    **changes: Any,
) -> AsyncIterator[Rig]:
    kept: list[Call] = []

    async def keep(call: Call) -> None:
        kept.append(call)

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with model, upstream or Upstream() as way, aiohttp.ClientSession() as session:
        endpoint = Endpoint(model.url, "real", api_key=KEY, engine=engine)
        capture = Capture(
            endpoint, way, settings(**changes), on_call=on_call or keep, classify=classify, secrets=secrets
        )
        await capture.serve(sock)
        try:
            yield Rig(model, way, capture, session, f"http://127.0.0.1:{port}", kept)
        finally:
            await capture.stop()
