"""Sandboxes in containers of Docker or Podman, without a network.

The steward is the container's first process: what runs beside it cannot end it or look into it, and its end is
the end of the container. All that can be written lies in memory and is limited by size; the rest of the image is
read-only. Files go over the steward's line too: what lies in memory is not what the engine's archives hold.

A container ends and is removed when its owner's connection ends, so that a killed owner leaves none behind.

Read from the environment: `DOCKER_HOST` and its companions, and `PADDOCK_DOCKER_IMAGE`.
"""

from __future__ import annotations

import asyncio
import io
import os
import socket
import tarfile
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.rollouts.limits import MEBIBYTE
from paddock.rollouts.sandbox.base import HOME, LOGS, TESTS
from paddock.rollouts.sandbox.bundle import program
from paddock.rollouts.sandbox.engine import AttachedLine, Engine, EngineError
from paddock.rollouts.sandbox.remote import RemoteSandbox
from paddock.rollouts.sandbox.supervised import write_tests

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.rollouts.sandbox.channel import Line

IMAGE = "python:3.13-slim"
"""It needs `python3` (3.10 or later), `sh` and `bash`."""
MARK = "paddock.sandbox"
USER = 1000
ROOM = 128 * MEBIBYTE
"""Above the limit for memory: the steward sees first that it is used up, and can tell."""
SHARES = {str(HOME): 12, "/tmp": 2, str(LOGS): 1}
"""Sixteenths of the disk; what is left is shared memory."""
STAGED = "/staged"
CLEAN_UP_SECONDS = 60.0
PYTHON = "choose an image with python3 3.10 or later: PADDOCK_DOCKER_IMAGE"


class DockerSandbox(RemoteSandbox):
    backend = "docker"

    _engine: Engine | None = None
    _container: str | None = None
    _line: AttachedLine | None = None
    _said: bytes | bytearray = b""

    @property
    def image(self) -> str:
        return os.environ.get("PADDOCK_DOCKER_IMAGE") or IMAGE

    async def connect(self) -> Line:
        engine = self._engine = await Engine().__aenter__()
        await engine.ensure_image(self.image)
        sources = await self._sources(engine)
        self._container = await engine.create(self._described(sources))
        line = self._line = await engine.attach(self._container)
        self._said = line.said
        try:
            await engine.start(self._container)
        except EngineError as error:
            hint = PYTHON if "python3" in error.message else error.hint
            raise SandboxError(f"the container does not start: {error.message}", hint=hint) from error
        return line

    async def open(self, timeout: float) -> None:
        try:
            await super().open(timeout)
        except SandboxError as error:
            said = self._said.decode("utf-8", "replace").strip()
            if not said:
                raise
            raise SandboxError(f"{error.message}: {said[-500:]}", hint=error.hint or PYTHON) from error

    def settings(self) -> dict[str, Any]:
        # The engine gives it as many processors as it may use.
        return {**super().settings(), "user": None, "cpus": None}

    # -- how it is made -------------------------------------------------------------------------------

    def _described(self, sources: list[str]) -> dict[str, Any]:
        limits = self.spec.limits
        disk = int(limits.disk_bytes)
        memory = int(limits.memory_bytes) + ROOM
        options = f"rw,exec,nosuid,nodev,uid={USER},gid={USER},mode=0755"
        places = {path: f"{options},size={disk * share // 16}" for path, share in SHARES.items()}
        return {
            "Image": self.image,
            "Entrypoint": ["python3", "-I", "-S", "-c", program(), "binary"],
            "Cmd": [],
            "User": f"{USER}:{USER}",
            "WorkingDir": str(HOME),
            "Hostname": "sandbox",
            "Env": [f"{name}={value}" for name, value in self._base_env.items()],
            "Labels": self._labels,
            "Tty": False,
            "OpenStdin": True,
            "StdinOnce": True,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "NetworkDisabled": True,
            "HostConfig": {
                "AutoRemove": True,
                "NetworkMode": "none",
                "ReadonlyRootfs": True,
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": int(limits.processes) + 1,
                "NanoCpus": (limits.cpus or 0) * 10**9,
                "ShmSize": disk // 16,
                "Tmpfs": places,
                "Mounts": [
                    {
                        "Type": "bind" if source.startswith("/") else "volume",
                        "Source": source,
                        "Target": target,
                        "ReadOnly": True,
                    }
                    for source, target in zip(sources, self._targets, strict=True)
                ],
                "IpcMode": "private",
                "LogConfig": {"Type": "none"},
                "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            },
        }

    @property
    def _labels(self) -> dict[str, str]:
        return {MARK: self.id, "paddock.owner": f"{os.getpid()}@{socket.gethostname()}"}

    @property
    def _targets(self) -> list[str]:
        tests = [str(TESTS)] if self.spec.readonly_tests else []
        return [*(str(mount.target) for mount in self.spec.mounts), *tests]

    async def _sources(self, engine: Engine) -> list[str]:
        """What is mounted: folders of this machine if the engine is on it, otherwise volumes made of them."""
        folders = [mount.source.resolve() for mount in self.spec.mounts]
        if self.spec.readonly_tests:
            place = self._own_folder()
            await asyncio.to_thread(write_tests, place / "tests", self.spec.readonly_tests)
            folders.append(place / "tests")
        if engine.address.is_here:
            return [str(folder) for folder in folders]
        return [await self._volume(engine, number, folder) for number, folder in enumerate(folders)]

    async def _volume(self, engine: Engine, number: int, folder: Path) -> str:
        """A volume with the content of a folder, brought in through a container that is never started."""
        if not await asyncio.to_thread(folder.is_dir):
            raise SandboxError(f"{folder} is no folder, and an engine elsewhere takes only folders")
        name = f"paddock-{self.id}-{number}"
        await engine.make_volume(name, self._labels)
        mounts = [{"Type": "volume", "Source": name, "Target": STAGED}]
        body = {"Image": self.image, "Labels": self._labels, "HostConfig": {"Mounts": mounts, "NetworkMode": "none"}}
        helper = await engine.create(body)
        try:
            await engine.put_archive(helper, STAGED, await asyncio.to_thread(pack_tree, folder))
        finally:
            await engine.remove(helper)
        return name

    # -- the end --------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        container, self._container = self._container, None
        line, self._line = self._line, None
        try:
            if line is not None:
                await line.close()
            # One that was asked for may be there without our having heard of it.
            for found in [container] if container else await engine.find_marked(f"{MARK}={self.id}"):
                await engine.remove(found)
            if not engine.address.is_here:
                for name in await engine.find_volumes(f"{MARK}={self.id}"):
                    await engine.remove_volume(name)
        finally:
            await engine.close()

    @classmethod
    def end_leftover(cls, sandbox_id: str) -> bool:
        return asyncio.run(asyncio.wait_for(end_marked(sandbox_id), CLEAN_UP_SECONDS))


async def end_marked(sandbox_id: str) -> bool:
    """Remove every container and volume that bears this mark. Returns whether none is left."""
    label = f"{MARK}={sandbox_id}"
    async with Engine() as engine:
        for container in await engine.find_marked(label):
            await engine.remove(container)
        for name in await engine.find_volumes(label):
            await engine.remove_volume(name)
        return not await engine.find_marked(label)


def pack_tree(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()
