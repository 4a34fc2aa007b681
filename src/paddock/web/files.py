"""The files that a browser gets, read once, compressed once."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

from paddock.web.answers import NotFound

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".json": "application/json",
    ".woff2": "font/woff2",
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    squeezed: bytes
    kind: str
    tag: str


class Assets:
    """Everything below `static/`, by its path."""

    def __init__(self) -> None:
        self._assets: dict[str, Asset] | None = None

    def get(self, path: str) -> Asset:
        found = self.all().get(path)
        if found is None:
            raise NotFound(f"the page has no file {path[:200]!r}", hint="go to /web/")
        return found

    def all(self) -> dict[str, Asset]:
        if self._assets is None:
            self._assets = dict(_read(resources.files("paddock.web") / "static", ""))
        return self._assets

    def answer(self, request: Request, path: str) -> Response:
        asset = self.get(path)
        headers = {"etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if asset.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        headers["content-type"] = asset.kind
        if "gzip" in request.headers.get("accept-encoding", "") and len(asset.squeezed) < len(asset.content):
            return Response(asset.squeezed, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, headers=headers)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    found: list[tuple[str, Asset]] = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _read(entry, f"{path}/")
        elif (kind := _kind(entry.name)) is not None:
            content = entry.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            found.append((path, Asset(content, gzip.compress(content, 9, mtime=0), kind, tag)))
    return found


def _kind(name: str) -> str | None:
    ending = f".{name.rpartition('.')[2]}"
    return KINDS.get(ending) or (mimetypes.guess_type(name)[0] if ending == ".txt" else None)
