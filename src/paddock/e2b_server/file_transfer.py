"""`/files` of E2B's daemon: files are uploaded and downloaded. Bodies are read with a deadline."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import re
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from aiohttp import BodyPartReader, web

from paddock.e2b_server.connect_protocol import ConnectError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable
    from typing import TypeVar

    from paddock.e2b_server.served_sandbox import ServedSandbox

    ValueT = TypeVar("ValueT")

CHUNK_BYTES = 65536
METADATA_PREFIX = "X-Metadata-"
MODE_METADATA = "paddock-mode"
"""Metadata with which our own client sets the mode of a file that root writes."""
MOST_ROOT_BYTES = 64 << 20
FILENAME = re.compile(r'filename="([^"]*)"')
BODY_SECONDS = 30.0
"""For a body that is read as a whole."""
STALL_SECONDS = 30.0
"""For the next piece of a file that is uploaded."""


async def download(request: web.Request, served: ServedSandbox) -> web.StreamResponse:
    path = requested_path(request)
    served.check_user(request.query.get("username", ""))
    size, content = await served.read(path)
    response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
    name = PurePosixPath(path).name.replace('"', "")
    response.headers["Content-Disposition"] = f'inline; filename="{name.encode("ascii", "replace").decode()}"'
    if request.method == "HEAD":
        response.content_length = size
        return response
    # Without a length: a file may grow or shrink while it is sent.
    response.enable_chunked_encoding()
    await response.prepare(request)
    async for data in content:
        await response.write(data)
    await response.write_eof()
    return response


async def upload(request: web.Request, served: ServedSandbox) -> web.Response:
    user = request.query.get("username", "")
    metadata = {
        name[len(METADATA_PREFIX) :].lower(): value
        for name, value in request.headers.items()
        if name.lower().startswith(METADATA_PREFIX.lower())
    }
    written: list[dict[str, Any]] = []
    if request.content_type == "multipart/form-data":
        parts = await request.multipart()
        while (part := await in_time(parts.next(), STALL_SECONDS)) is not None:
            if not isinstance(part, BodyPartReader):
                raise ConnectError("invalid_argument", "a part of the form holds a form of its own")
            path = request.query.get("path") or filename_path(part.headers.get("Content-Disposition", ""))
            if part.name == "file" and path:
                written.append(await write(served, user, path, timed_chunks(part_chunks(part)), metadata))
    else:
        path = requested_path(request)
        written.append(
            await write(served, user, path, timed_chunks(aiter(request.content.iter_chunked(CHUNK_BYTES))), metadata)
        )
    if not written:
        raise ConnectError("invalid_argument", "there is no file in the form")
    return web.json_response(written)


def filename_path(disposition: str) -> str | None:
    """The path that is the file name of a part of a form. A parser for forms would cut off its folders."""
    match = FILENAME.search(disposition)
    return None if match is None else match[1].replace("\\\\", "\\").replace("%22", '"')


async def part_chunks(part: Any) -> AsyncIterator[bytes]:
    while data := await part.read_chunk(CHUNK_BYTES):
        yield data


async def write(
    served: ServedSandbox, user: str, path: str, content: AsyncIterator[bytes], metadata: dict[str, str]
) -> dict[str, Any]:
    if user == "root" and served.image is None:
        place = served.write_as_root(path, await collect(content), int(metadata.pop(MODE_METADATA, "644"), 8))
        return {"name": place.name, "type": "file", "path": str(place), "metadata": metadata}
    served.check_user(user)
    metadata.pop(MODE_METADATA, None)
    entry = await served.write(path, content, metadata)
    client_path = served.to_client_path(entry["path"])
    return {
        "name": PurePosixPath(client_path).name,
        "type": "file",
        "path": client_path,
        "metadata": entry["metadata"],
    }


async def collect(content: AsyncIterator[bytes]) -> bytes:
    collected = bytearray()
    async for data in content:
        collected += data
        if len(collected) > MOST_ROOT_BYTES:
            raise ConnectError("invalid_argument", f"root can write {MOST_ROOT_BYTES} bytes at most")
    return bytes(collected)


def requested_path(request: web.Request) -> str:
    path = request.query.get("path", "")
    if not path:
        raise ConnectError("invalid_argument", "the path is missing")
    return path


def is_signed(request: web.Request, served: ServedSandbox) -> bool:
    """Whether a URL of `/files` was signed with the token of this sandbox, and has not expired."""
    query = request.query
    operation = "read" if request.method in ("GET", "HEAD") else "write"
    until = query.get("signature_expiration")
    signed = f"{query.get('path', '')}:{operation}:{query.get('username', '')}:{served.token}"
    if until is not None:
        if not until.isdigit() or int(until) < time.time():
            return False
        signed += f":{until}"
    digest = base64.b64encode(hashlib.sha256(signed.encode()).digest()).rstrip(b"=").decode()
    return hmac.compare_digest(query.get("signature", "").encode(), f"v1_{digest}".encode())


# -- bodies -------------------------------------------------------------------------------------------


async def read_body(request: web.Request) -> bytes:
    """The body. Raises HTTPRequestTimeout if it does not arrive in time."""
    return await in_time(request.read(), BODY_SECONDS)


async def timed_chunks(content: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The chunks of an upload. Raises HTTPRequestTimeout if one of them does not arrive in time."""
    while True:
        try:
            chunk = await in_time(anext(content), STALL_SECONDS)
        except StopAsyncIteration:
            return
        yield chunk


async def in_time(work: Awaitable[ValueT], seconds: float) -> ValueT:
    try:
        async with asyncio.timeout(seconds):
            return await work
    except TimeoutError:
        raise web.HTTPRequestTimeout(reason=f"the body did not arrive within {seconds:g} s") from None
