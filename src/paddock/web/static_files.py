"""The static files of the page, read and compressed once."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING

from starlette.responses import Response

from paddock.web.responses import PageNotFound

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from starlette.requests import Request

INDEX = "index.html"
MEDIA_TYPES = {
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
    compressed: bytes
    media_type: str
    etag: str


class Assets:
    """Everything below `static/`, by its path."""

    def __init__(self) -> None:
        self._assets: dict[str, Asset] | None = None

    def get(self, path: str) -> Asset:
        asset = self.all().get(path)
        if asset is None:
            raise PageNotFound(f"the page has no file {path[:200]!r}", hint="go to /web/")
        return asset

    def all(self) -> dict[str, Asset]:
        if self._assets is None:
            self._assets = dict(_read(resources.files("paddock.web") / "static", ""))
        return self._assets

    def respond(self, request: Request, path: str) -> Response:
        asset = self.get(path)
        headers = {"etag": asset.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if asset.etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        headers["content-type"] = asset.media_type
        if "gzip" in request.headers.get("accept-encoding", "") and len(asset.compressed) < len(asset.content):
            return Response(asset.compressed, headers={**headers, "content-encoding": "gzip"})
        return Response(asset.content, headers=headers)


def _read(folder: Traversable, prefix: str) -> list[tuple[str, Asset]]:
    assets: list[tuple[str, Asset]] = []
    for entry in sorted(folder.iterdir(), key=lambda each: each.name):
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            assets += _read(entry, f"{path}/")
        elif (media_type := _media_type(entry.name)) is not None:
            content = entry.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:24]}"'
            assets.append((path, Asset(content, gzip.compress(content, 9, mtime=0), media_type, etag)))
    return assets


def _media_type(name: str) -> str | None:
    suffix = f".{name.rpartition('.')[2]}"
    return MEDIA_TYPES.get(suffix) or (mimetypes.guess_type(name)[0] if suffix == ".txt" else None)
