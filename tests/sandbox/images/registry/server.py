"""A small registry on loopback that can ask for logins, redirect, and break. `docker-registry` does none of it."""

import base64
import gzip
import hashlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from paddock.sandbox.images.image import ImageConfig
from paddock.sandbox.images.oci import OCI_CONFIG, OCI_INDEX, OCI_LAYER, OCI_MANIFEST, config_to_json, digest_of

USER, PASSWORD, IDENTITY_TOKEN = "ada", "correct horse", "refresh-me"


@dataclass(frozen=True)
class Fault:
    """What happens to one request instead of the right answer."""

    status: int = 0
    cut_after: int | None = None
    """Close the connection after this many bytes of the body."""
    replace: bytes | None = None
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class SeenRequest:
    path: str
    range: str
    authorization: str
    status: int


@dataclass
class Registry:
    """Its content and behaviour. Change the fields between requests."""

    login: str = ""
    """`basic`, `bearer`, or empty for none."""
    is_public: bool = True
    """A token is given to everybody."""
    token_uses: int = 1000
    """After so many requests a token is refused."""
    redirect_to: str = ""
    """Where requests for blobs are sent."""
    ignores_range: bool = False
    url: str = ""
    files: dict[str, tuple[bytes, str]] = field(default_factory=dict)
    faults: defaultdict[str, list[Fault]] = field(default_factory=lambda: defaultdict(list))
    """By a part of the path. Each is used once."""
    requests: list[SeenRequest] = field(default_factory=list)
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return urlsplit(self.url).netloc

    def seen(self, part: str) -> list[SeenRequest]:
        return [one for one in self.requests if part in one.path]

    # -- content --------------------------------------------------------------------------------------

    def add_blob(self, repository: str, content: bytes, media_type: str = OCI_LAYER) -> dict[str, Any]:
        digest = digest_of(content)
        self.files[f"/v2/{repository}/blobs/{digest}"] = (content, "application/octet-stream")
        return {"mediaType": media_type, "digest": digest, "size": len(content)}

    def add_manifest(self, repository: str, document: dict[str, Any], *tags: str) -> dict[str, Any]:
        content = json.dumps(document).encode()
        for selector in (digest_of(content), *tags):
            self.files[f"/v2/{repository}/manifests/{selector}"] = (content, document["mediaType"])
        return {"mediaType": document["mediaType"], "digest": digest_of(content), "size": len(content)}

    def add_image(
        self,
        repository: str,
        *layers: bytes,
        tag: str = "latest",
        platform: str = "linux/amd64",
        compress: Callable[[bytes], bytes] = gzip.compress,
    ) -> dict[str, Any]:
        """Push an image, and return the descriptor of its manifest."""
        config = config_to_json(tuple(map(digest_of, layers)), ImageConfig(env={"A": platform}), platform)
        manifest = {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": self.add_blob(repository, config, OCI_CONFIG),
            "layers": [self.add_blob(repository, compress(layer)) for layer in layers],
        }
        return self.add_manifest(repository, manifest, tag)

    def add_index(self, repository: str, images: dict[str, dict[str, Any]], tag: str = "latest") -> None:
        manifests = []
        for platform, descriptor in images.items():
            system, architecture, *variant = platform.split("/")
            words = {"os": system, "architecture": architecture, **({"variant": variant[0]} if variant else {})}
            manifests.append({**descriptor, "platform": words})
        self.add_manifest(repository, {"mediaType": OCI_INDEX, "manifests": manifests}, tag)

    # -- requests -------------------------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        response = await self._answer(request)
        headers = request.headers
        self.requests.append(
            SeenRequest(request.path, headers.get("Range", ""), headers.get("Authorization", ""), response.status)
        )
        return response

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/token":
            return await self._give_token(request)
        fault = next((queue.pop(0) for part, queue in self.faults.items() if part in request.path and queue), Fault())
        if fault.status:
            return web.Response(status=fault.status, headers=dict(fault.headers))
        if not self._is_authorized(request):
            return web.Response(status=401, headers={"WWW-Authenticate": self._challenge(request)})
        if self.redirect_to and "/blobs/" in request.path:
            target = self.redirect_to + request.path + "?signature=secret"
            return web.Response(status=307, headers={"Location": target})
        if request.path not in self.files:
            return web.Response(status=404, text="{}")
        content, media_type = self.files[request.path]
        return await self._send(request, content if fault.replace is None else fault.replace, media_type, fault)

    async def _send(self, request: web.Request, content: bytes, media_type: str, fault: Fault) -> web.StreamResponse:
        start = 0
        if (header := request.headers.get("Range")) and not self.ignores_range:
            start = int(header.removeprefix("bytes=").partition("-")[0])
        response = web.StreamResponse(status=206 if start else 200, headers={"Content-Type": media_type})
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        body = content[start:]
        response.content_length = len(body)
        await response.prepare(request)
        if fault.cut_after is not None:
            await response.write(body[: fault.cut_after])
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(body)
        return response

    # -- logins ---------------------------------------------------------------------------------------

    def _challenge(self, request: web.Request) -> str:
        if self.login == "basic":
            return 'Basic realm="here"'
        repository = request.path.removeprefix("/v2/").rpartition("/")[0].rpartition("/")[0]
        return f'Bearer realm="{self.url}/token",service="{self.host}",scope="repository:{repository}:pull"'

    def _is_authorized(self, request: web.Request) -> bool:
        authorization = request.headers.get("Authorization", "")
        if self.login == "basic":
            return authorization == basic_login()
        if self.login == "bearer":
            token = authorization.removeprefix("Bearer ")
            self.tokens[token] = self.tokens.get(token, 0) - 1
            return self.tokens[token] >= 0
        return True

    async def _give_token(self, request: web.Request) -> web.Response:
        if request.method == "POST":
            form = await request.post()
            is_known = form.get("refresh_token") == IDENTITY_TOKEN and form.get("grant_type") == "refresh_token"
        else:
            assert request.query["service"] == self.host
            assert request.query["scope"].endswith(":pull")
            is_known = request.headers.get("Authorization", "") == basic_login()
        if not is_known and not (self.is_public and "Authorization" not in request.headers):
            return web.Response(status=401)
        token = hashlib.sha256(f"{len(self.tokens)}{self.url}".encode()).hexdigest()
        self.tokens[token] = self.token_uses
        return web.json_response({"token": token} if request.method == "GET" else {"access_token": token})


def basic_login() -> str:
    return "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


@asynccontextmanager
async def serving(registry: Registry, host: str = "127.0.0.1") -> AsyncIterator[Registry]:
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", registry.answer)
    runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        await site.start()
        registry.url = f"http://{host}:{runner.addresses[0][1]}"
        yield registry
    finally:
        await runner.cleanup()
