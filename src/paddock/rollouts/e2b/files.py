"""`/files`: whole files go in and out, as E2B's daemon takes and gives them."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from aiohttp import BodyPartReader, web

from paddock.rollouts.e2b.arrival import next_piece, pieces
from paddock.rollouts.e2b.connect import ConnectError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from paddock.rollouts.e2b.guest import Guest

CHUNK = 65536
METADATA = "X-Metadata-"
MODE = "paddock-mode"
"""Metadata with which our own client says how a file that root writes may be used."""
MOST_STAGED = 64 << 20
USERS = ("", "user")
FILENAME = re.compile(r'filename="([^"]*)"')


async def download(request: web.Request, guest: Guest) -> web.StreamResponse:
    path = wanted_path(request)
    refuse_others(request.query.get("username", ""))
    size, content = await guest.read(path)
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


async def upload(request: web.Request, guest: Guest) -> web.Response:
    user = request.query.get("username", "")
    metadata = {
        name[len(METADATA) :].lower(): value
        for name, value in request.headers.items()
        if name.lower().startswith(METADATA.lower())
    }
    written: list[dict[str, Any]] = []
    if request.content_type == "multipart/form-data":
        parts = await request.multipart()
        while (part := await next_piece(parts.next())) is not None:
            if not isinstance(part, BodyPartReader):
                raise ConnectError("invalid_argument", "a part of the form holds a form of its own")
            path = request.query.get("path") or named_path(part.headers.get("Content-Disposition", ""))
            if part.name == "file" and path:
                written.append(await write(guest, user, path, pieces(chunks_of(part)), metadata))
    else:
        path = wanted_path(request)
        written.append(await write(guest, user, path, pieces(aiter(request.content.iter_chunked(CHUNK))), metadata))
    if not written:
        raise ConnectError("invalid_argument", "there is no file in the form")
    return web.json_response(written)


def named_path(disposition: str) -> str | None:
    """The path that a part of a form bears as its file name. A parser for forms would cut it short."""
    found = FILENAME.search(disposition)
    return None if found is None else found[1].replace("\\\\", "\\").replace("%22", '"')


async def chunks_of(part: Any) -> AsyncIterator[bytes]:
    while data := await part.read_chunk(CHUNK):
        yield data


async def write(
    guest: Guest, user: str, path: str, content: AsyncIterator[bytes], metadata: dict[str, str]
) -> dict[str, Any]:
    if user == "root":
        place = guest.stage(path, await whole(content), int(metadata.pop(MODE, "644"), 8))
        return {"name": place.name, "type": "file", "path": str(place), "metadata": metadata}
    refuse_others(user)
    found = await guest.write(path, content, metadata)
    shown = guest.shown(found["path"])
    return {"name": PurePosixPath(shown).name, "type": "file", "path": shown, "metadata": found["metadata"]}


async def whole(content: AsyncIterator[bytes]) -> bytes:
    kept = bytearray()
    async for data in content:
        kept += data
        if len(kept) > MOST_STAGED:
            raise ConnectError("invalid_argument", f"root can write {MOST_STAGED} bytes at most")
    return bytes(kept)


def wanted_path(request: web.Request) -> str:
    path = request.query.get("path", "")
    if not path:
        raise ConnectError("invalid_argument", "which path?")
    return path


def refuse_others(user: str) -> None:
    if user not in USERS:
        raise ConnectError("invalid_argument", f"there is no user {user!r} here: everything is done as user")


def signature_opens(request: web.Request, guest: Guest) -> bool:
    """Whether a signed address of `/files` was signed with the token of this guest, and is still good."""
    query = request.query
    operation = "read" if request.method in ("GET", "HEAD") else "write"
    until = query.get("signature_expiration")
    signed = f"{query.get('path', '')}:{operation}:{query.get('username', '')}:{guest.token}"
    if until is not None:
        if not until.isdigit() or int(until) < time.time():
            return False
        signed += f":{until}"
    digest = base64.b64encode(hashlib.sha256(signed.encode()).digest()).rstrip(b"=").decode()
    return hmac.compare_digest(query.get("signature", "").encode(), f"v1_{digest}".encode())
