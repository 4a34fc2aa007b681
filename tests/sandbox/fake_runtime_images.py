"""The images of the fake container runtime. They are real ones of our own store, described as an engine does."""

import io
import json
import os
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from paddock.errors import ImageError
from paddock.sandbox.images.build import build_image
from paddock.sandbox.images.dockerfiles.events import BuildEvent
from paddock.sandbox.images.image import Image
from paddock.sandbox.images.importing import import_image
from paddock.sandbox.images.store import default_store
from paddock.sandbox.network.policy import NO_NETWORK, NetworkPolicy

Messages = list[dict[str, Any]]


def describe_image(image: Image | None) -> dict[str, Any]:
    """The answer to an inspection. None: an image that is never opened."""
    if image is None:
        return {"Id": "sha256:1"}
    system, architecture = image.platform.split("/")[:2]
    config = image.config
    return {
        "Id": image.digest,
        "Os": system,
        "Architecture": architecture,
        "Config": {
            "Env": [f"{name}={value}" for name, value in config.env.items()],
            "WorkingDir": str(config.workdir),
            "User": config.user,
            "Entrypoint": None,
        },
    }


async def load(images: dict[str, Image | None], archive: bytes) -> Messages:
    """As `POST /images/load`."""
    with tempfile.NamedTemporaryFile(suffix=".tar") as file:
        file.write(archive)
        file.flush()
        with tarfile.open(file.name) as opened:
            manifest = opened.extractfile("manifest.json")
            assert manifest is not None
            name = json.loads(manifest.read())[0]["RepoTags"][0]
        images[name] = await import_image(Path(file.name), f"loaded/{name}")
    return [{"stream": f"Loaded image: {name}\n"}]


def put_archive(folder: Path, content: bytes) -> None:
    """As `PUT /containers/ID/archive`: what belongs to root in the archive belongs to the root of the container."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="tar")
    identity = default_store().identity
    if os.geteuid() == 0:
        for path in folder.rglob("*"):
            os.chown(path, identity.host_uid(0) or 0, identity.host_gid(0) or 0, follow_symlinks=False)


async def build(images: dict[str, Image | None], query: dict[str, str], context: bytes) -> Messages:
    """As `POST /build`: the classic builder knows no heredoc. BuildKit reports only the image in plain text."""
    is_buildkit = query.get("version") == "2"
    messages: Messages = []

    def report(event: BuildEvent) -> None:
        if event.kind == "started":
            messages.append({"stream": f"Step {event.step}/{event.steps} : {event.text}\n"})
        elif event.kind == "output":
            messages.append({"stream": event.text})

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with tarfile.open(fileobj=io.BytesIO(context)) as archive:
            archive.extractall(folder, filter="tar")
        text = (folder / "Dockerfile").read_text()
        if "<<" in text and not is_buildkit:
            return [{"error": "dockerfile parse error: unknown instruction: EOF"}]
        network = NO_NETWORK if query.get("networkmode") == "none" else NetworkPolicy("public")
        try:
            image = await build_image(text, folder, network=network, timeout=60, on_progress=report)
        except ImageError as error:
            return [*messages, {"error": error.message, "errorDetail": {"message": error.message}}]
    images[query["t"]] = image
    if is_buildkit:
        messages = [{"id": "moby.buildkit.trace", "aux": "Cr0B"}]
    return [*messages, {"aux": {"ID": image.digest}}]
