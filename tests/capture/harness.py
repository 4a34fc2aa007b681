"""A proxy between a scripted model and a plain HTTP client, on real sockets."""

import asyncio
import io
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from capture.scripted_model import ScriptedModel
from paddock.capture.gate import CallGate
from paddock.capture.proxy import Capture
from paddock.capture.recorded.replay import Replay
from paddock.capture.settings import CaptureSettings
from paddock.capture.trace import Call
from paddock.capture.upstream import Upstream
from paddock.models.endpoint import Endpoint

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
class AgentResponse:
    """The response to an agent."""

    status: int
    text: str
    headers: dict[str, str]

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.text)
        return document

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = self.document["error"]
        return error

    @property
    def events(self) -> list[str]:
        return [line[6:] for line in self.text.splitlines() if line.startswith("data: ")]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event) for event in self.events if event != "[DONE]"]

    @property
    def content(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice["delta"].get("content") or "" for choice in choices)


@dataclass
class ProxyUnderTest:
    model: ScriptedModel
    upstream: Upstream
    capture: Capture
    session: aiohttp.ClientSession
    url: str
    recorded: list[Call]

    def body(self, text: str = "hello", **changes: Any) -> dict[str, Any]:
        return {"model": "policy", "messages": [{"role": "user", "content": text}], **changes}

    async def chat(
        self, text: str = "hello", *, headers: dict[str, str] | None = None, **changes: Any
    ) -> AgentResponse:
        return await self.post(json.dumps(self.body(text, **changes)).encode(), headers=headers)

    async def post(
        self, raw: bytes, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None
    ) -> AgentResponse:
        all_headers = {"Authorization": f"Bearer {self.capture.secret}", **(headers or {})}
        async with self.session.post(self.url + path, data=io.BytesIO(raw), headers=all_headers) as response:
            return AgentResponse(response.status, await response.text(), dict(response.headers))

    async def last_call(self) -> Call:
        """The latest call, once it was recorded."""
        await self.wait_until(lambda: bool(self.capture.calls) and self.capture.calls[-1] in self.recorded)
        return self.capture.calls[-1]

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def start_proxy(
    model: ScriptedModel,
    *,
    on_call: Callable[[Call], Awaitable[None]] | None = None,
    engine: str | None = None,
    upstream: Upstream | None = None,
    classify: Any = None,
    secrets: tuple[str, ...] = (),
    gate: CallGate | None = None,
    replay: Replay | None = None,
    **changes: Any,
) -> AsyncIterator[ProxyUnderTest]:
    recorded: list[Call] = []

    async def record(call: Call) -> None:
        recorded.append(call)

    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    async with model, upstream or Upstream() as client, aiohttp.ClientSession() as session:
        endpoint = Endpoint(model.url, "real", api_key=KEY, engine=engine)
        capture = Capture(
            endpoint,
            client,
            settings(**changes),
            on_call=on_call or record,
            classify=classify,
            secrets=secrets,
            gate=gate,
            replay=replay,
        )
        await capture.serve(sock)
        try:
            yield ProxyUnderTest(model, client, capture, session, f"http://127.0.0.1:{port}", recorded)
        finally:
            await capture.stop()
