"""The images of a container runtime: it pulls and builds them itself, and takes those of our own store."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import os
import re
import stat
import tarfile
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
from pydantic import Field, ValidationError

from paddock.errors import ImageError
from paddock.sandbox.container_api import ContainerApi, ContainerApiError
from paddock.sandbox.images.dockerfiles.events import BuildEvent
from paddock.sandbox.images.dockerfiles.ignore import IgnoreRules, parse_ignore_file
from paddock.sandbox.images.image import DOCKERFILE, Image
from paddock.sandbox.images.oci import ContainerSettings, OciDocument, OciPlatform, read_settings, this_platform
from paddock.sandbox.images.provider import BuildRequest, ImageProvider
from paddock.sandbox.images.reference import parse_reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping


BUILD_NAME = "paddock/build"
"""Images of Dockerfiles have this name, and a tag made from the content of their context."""
BUILD_LABEL = "paddock.image"
IGNORE_FILE = ".dockerignore"
NEEDS_BUILDKIT = re.compile(
    r"^\s*(?:RUN|COPY|ADD)\s[^\n]*?(?:<<-?[\"']?[A-Za-z_]|--(?:mount|chmod|link|exclude|parents|security|network)\b)",
    re.IGNORECASE | re.MULTILINE,
)
BUILDKIT = "2"
STEP = re.compile(r"step (\d+)/(\d+) ?: ?(.*)", re.IGNORECASE)
"""How the runtime's classic builder, and Podman, begin a step."""
SHOWN_CHARACTERS = 2000
USE_BWRAP = "run it with --sandbox bwrap"


class RuntimeImage(OciDocument):
    """What a runtime says about an image."""

    id: str = Field(alias="Id", min_length=1)
    architecture: str = Field("amd64", alias="Architecture")
    os: str = Field("linux", alias="Os")
    variant: str = Field("", alias="Variant")
    config: ContainerSettings | None = Field(None, alias="Config")

    def to_image(self, name: str) -> Image:
        digest = self.id if ":" in self.id else f"sha256:{self.id}"
        platform = OciPlatform(os=self.os, architecture=self.architecture)
        # Its layers are the runtime's affair.
        return Image(name, digest, (), read_settings(name, self.config or ContainerSettings()), str(platform))


class DockerImages(ImageProvider):
    """An image of the runtime answers for its name, then one of our own store, then the runtime pulls it."""

    async def get(self, name: str) -> Image:
        async with ContainerApi() as api, runtime_errors(f"the image {name}"):
            document = await api.inspect_image(name)
            if document is None:
                if not await load_from_store(api, name):
                    await api.pull_image(name, await registry_login(name))
                document = await api.inspect_image(name)
        return to_image(name, document)

    async def build(self, request: BuildRequest) -> Image:
        network = request.network
        if network.mode == "allowlist":
            raise ImageError("a container runtime cannot build with a network by allowlist", hint=USE_BWRAP)
        context = await asyncio.to_thread(pack_context, request.dockerfile, request.files, request.modes)
        name = f"{BUILD_NAME}:{hashlib.sha256(context).hexdigest()[:32]}"
        query = {"t": name, "rm": "1", "forcerm": "1", "labels": orjson.dumps({BUILD_LABEL: "build"}).decode()}
        if network.mode == "no-network":
            query["networkmode"] = "none"
        progress = BuildProgress(request.on_progress)
        try:
            async with asyncio.timeout(request.timeout), ContainerApi() as api, runtime_errors("the build"):
                if NEEDS_BUILDKIT.search(request.dockerfile) and api.builder == BUILDKIT:
                    query["version"] = BUILDKIT
                try:
                    async for message in api.build_image(context, query):
                        progress.read(message)
                except ContainerApiError as error:
                    progress.end("failed")
                    if "fails_for_all" in error.data:
                        raise
                    reason = f"the build failed: {error.message}{progress.tail()}"
                    raise ImageError(reason, hint="see the build log") from error
                progress.end("done")
                document = await api.inspect_image(name)
        except TimeoutError:
            raise ImageError(
                f"the build did not end within {request.timeout:g} s",
                hint="raise the limit: environment.build_timeout_sec",
            ) from None
        return to_image(name, document)


class BuildProgress:
    """The messages of a runtime's build as events. BuildKit's own messages are binary, and left out."""

    def __init__(self, on_progress: Callable[[BuildEvent], None] | None) -> None:
        self._on_progress = on_progress
        self._step, self._steps = 0, 0
        self._output = ""

    def read(self, message: dict[str, Any]) -> None:
        text = str(message.get("stream") or "")
        if not text:
            return
        if match := STEP.match(text.strip()):
            self.end("done")
            self._step, self._steps, self._output = int(match[1]), int(match[2]), ""
            self._emit("started", match[3])
        else:
            self._output = (self._output + text)[-SHOWN_CHARACTERS:]
            self._emit("output", text)

    def end(self, kind: Any) -> None:
        """The present step, if there is one, is over."""
        if self._step:
            self._emit(kind, "")
            self._step = 0

    def tail(self) -> str:
        return f"; its last output: {self._output.strip()}" if self._output.strip() else ""

    def _emit(self, kind: Any, text: str) -> None:
        if self._on_progress is not None:
            self._on_progress(BuildEvent(kind, self._step, self._steps, 0, text))


def to_image(name: str, document: dict[str, Any] | None) -> Image:
    if document is None:
        raise ImageError(f"the container runtime does not have {name}, which it has just been given")
    try:
        image = RuntimeImage.model_validate(document).to_image(name)
    except ValidationError as error:
        raise ImageError(f"the container runtime describes {name} in an unexpected form: {error}") from error
    if not this_platform().startswith(image.platform):
        hint = "choose an image for this platform: programs of this machine run in it"
        raise ImageError(f"{name} is for {image.platform}, not for {this_platform()}", hint=hint)
    return image


@asynccontextmanager
async def runtime_errors(subject: str) -> AsyncIterator[None]:
    """A refusal of the runtime is the image's fault; a runtime that does not answer is not."""
    try:
        yield
    except ContainerApiError as error:
        if error.data.get("fails_for_all"):
            raise
        hint = "pull it with the runtime's own program to see more, or paddock image import ARCHIVE NAME"
        raise ImageError(f"{subject}: {error.message}", hint=hint) from error


async def load_from_store(api: ContainerApi, name: str) -> bool:
    """Give the runtime the image of our own store with this name, if there is one."""
    from paddock.sandbox.images.exporting import export_image
    from paddock.sandbox.images.store import default_store

    store = await asyncio.to_thread(default_store)
    image = await asyncio.to_thread(store.find, name)
    if image is None:
        return False
    with tempfile.TemporaryDirectory(prefix="paddock-load-") as folder:
        archive = Path(folder, "image.tar")
        await export_image(image, archive, store=store)
        await api.load_image(archive)
    return True


async def registry_login(name: str) -> str:
    """The value of X-Registry-Auth for pulling an image; empty without a login for its registry."""
    from paddock.sandbox.images.registry.credentials import find_login

    registry = parse_reference(name).registry
    login = await find_login(registry)
    if login.identity_token:
        document = {"identitytoken": login.identity_token, "serveraddress": registry}
    elif login.user:
        document = {"username": login.user, "password": login.password, "serveraddress": registry}
    else:
        return ""
    return base64.urlsafe_b64encode(orjson.dumps(document)).decode()


def pack_context(dockerfile: str, files: Mapping[str, bytes], modes: Mapping[str, int]) -> bytes:
    """The build context as a tar, less what `.dockerignore` leaves out. Equal contexts give equal bytes."""
    rules = IgnoreRules()
    if IGNORE_FILE in files:
        rules = parse_ignore_file(files[IGNORE_FILE].decode(errors="replace"))
    context = {name: data for name, data in files.items() if not rules.ignores(name)}
    context[DOCKERFILE] = dockerfile.encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, data in sorted(context.items()):
            member = tarfile.TarInfo(name)
            member.mode = modes.get(name, 0o644)
            if stat.S_ISLNK(member.mode):
                member.type, member.linkname, member.mode = tarfile.SYMTYPE, os.fsdecode(data), 0o777
                archive.addfile(member)
                continue
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()
