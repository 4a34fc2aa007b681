"""A browser for tests: asks an ASGI application in this process, and keeps cookies."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

TOKEN = "the-token+of/the=page"
HOST = "127.0.0.1:8123"


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        content = gzip.decompress(self.body) if self.headers.get("content-encoding") == "gzip" else self.body
        return json.loads(content)


@dataclass
class Browser:
    app: Any
    token: str | None = TOKEN
    host: str = HOST
    cookies: dict[str, str] = field(default_factory=dict)

    def get(self, path: str, **headers: str) -> Answer:
        return asyncio.run(self.ask("GET", path, **headers))

    def post(self, path: str, document: Any = None, **headers: str) -> Answer:
        return asyncio.run(self.ask("POST", path, json.dumps(document).encode(), **headers))

    def api(self, path: str) -> Any:
        """The document behind a path of the API."""
        answer = self.get(f"/web/api/{path}")
        assert answer.status == 200, answer.body
        return answer.json()

    async def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        async with self.asking(method, path, body, **headers) as (status, heads, pieces):
            content = b"".join([piece async for piece in pieces])
        for name, value in heads:
            if name == "set-cookie":
                key, _, rest = value.partition("=")
                self.cookies[key] = rest.partition(";")[0]
        return Answer(status, dict(heads), content)

    @asynccontextmanager
    async def asking(
        self, method: str, path: str, body: bytes = b"", **headers: str
    ) -> AsyncIterator[tuple[int, list[tuple[str, str]], AsyncIterator[bytes]]]:
        """The beginning of an answer, and its pieces as they come. Leaving the block hangs up."""
        place, _, query = path.partition("?")
        sent: asyncio.Queue[Any] = asyncio.Queue()
        incoming: asyncio.Queue[Any] = asyncio.Queue()
        incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1",
            "method": method, "scheme": "http", "path": unquote(place), "raw_path": place.encode(),
            "query_string": query.encode(), "root_path": "", "client": ("127.0.0.1", 5), "server": ("127.0.0.1", 80),
            "headers": self._headers(headers),
        }  # fmt: skip
        work = asyncio.create_task(self._call(scope, incoming, sent))
        try:
            start = await asyncio.wait_for(sent.get(), 20)
            if isinstance(start, BaseException):
                raise start
            heads = [(name.decode(), value.decode()) for name, value in start["headers"]]

            async def pieces() -> AsyncIterator[bytes]:
                while True:
                    event = await asyncio.wait_for(sent.get(), 20)
                    if event is None:
                        return
                    if event.get("body"):
                        yield event["body"]
                    if not event.get("more_body"):
                        return

            yield start["status"], heads, pieces()
        finally:
            incoming.put_nowait({"type": "http.disconnect"})
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _call(self, scope: Any, incoming: Any, sent: Any) -> None:
        try:
            await self.app(scope, incoming.get, sent.put)
        except Exception as error:
            await sent.put(error)
        await sent.put(None)

    def _headers(self, extra: dict[str, str]) -> list[tuple[bytes, bytes]]:
        headers = {"host": self.host, **{name.replace("_", "-"): value for name, value in extra.items()}}
        if self.token is not None:
            headers.setdefault("authorization", f"Bearer {self.token}")
        if self.cookies:
            headers.setdefault("cookie", "; ".join(f"{name}={value}" for name, value in self.cookies.items()))
        return [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]


async def events(pieces: AsyncIterator[bytes]) -> AsyncIterator[tuple[str, Any]]:
    """The events of a stream: name and document."""
    rest = b""
    async for piece in pieces:
        rest += piece
        while b"\n\n" in rest:
            block, _, rest = rest.partition(b"\n\n")
            lines = dict(line.split(b": ", 1) for line in block.split(b"\n") if not line.startswith(b":"))
            if lines:
                yield lines[b"event"].decode(), json.loads(lines[b"data"])
