"""Sandboxes in containers of Docker or Podman, without a network.

The guest is process 1 of the container: commands cannot end it or look into it, and its end is the end of the
container. All writable filesystems are in memory and limited by size; the rest of the image is read-only. Files go
through the guest too, because the runtime's archive API does not see filesystems in memory.

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

from paddock.config import PADDOCK_DOCKER_IMAGE
from paddock.errors import SandboxError
from paddock.limits import MEBIBYTE
from paddock.sandbox.base import LOGS, TESTS
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.container_api import AttachedChannel, ContainerApi, ContainerApiError
from paddock.sandbox.guest.entry import HOME
from paddock.sandbox.guest_sandbox import write_tests
from paddock.sandbox.remote import USER, RemoteSandbox

if TYPE_CHECKING:
    from pathlib import Path

    from paddock.sandbox.base import SandboxSpec
    from paddock.sandbox.guest_sandbox import GuestSandbox
    from paddock.sandbox.images.provider import ImageProvider
    from paddock.sandbox.transports import ByteChannel

IMAGE = "python:3.13-slim"
"""It needs `python3` (3.10 or later), `sh` and `bash`."""
LABEL = "paddock.sandbox"
EXTRA_MEMORY_BYTES = 128 * MEBIBYTE
"""Above the memory limit, so that the guest notices first that the limit is exceeded, and can report it."""
DISK_SHARES = {str(HOME): 12, "/tmp": 2, str(LOGS): 1}
"""Sixteenths of the disk; the rest is shared memory."""
VOLUME_TARGET = "/staged"
CLEAN_UP_SECONDS = 60.0
PYTHON_HINT = "choose an image with python3 3.10 or later: PADDOCK_DOCKER_IMAGE"


class DockerSandbox(RemoteSandbox):
    backend = "docker"
    supports_images = True
    supports_dockerfiles = True

    _api: ContainerApi | None = None
    _container: str | None = None
    _channel: AttachedChannel | None = None
    _stderr: bytes | bytearray = b""

    @classmethod
    def class_for(cls, spec: SandboxSpec) -> type[GuestSandbox]:
        if spec.image is None:
            return cls
        from paddock.sandbox.docker_image import ImageDockerSandbox

        return ImageDockerSandbox

    @classmethod
    def image_provider(cls) -> ImageProvider:
        from paddock.sandbox.docker_images import DockerImages

        return DockerImages()

    @property
    def image_name(self) -> str:
        """Of the container's image, as the runtime knows it."""
        return PADDOCK_DOCKER_IMAGE.read() or IMAGE

    async def connect(self) -> ByteChannel:
        api = self._api = await ContainerApi().__aenter__()
        self._container = await self.make_container(api)
        channel = self._channel = await api.attach(self._container)
        self._stderr = channel.stderr
        try:
            await api.start(self._container)
        except ContainerApiError as error:
            hint = PYTHON_HINT if "python3" in error.message else error.hint
            raise SandboxError(f"the container does not start: {error.message}", hint=hint) from error
        return channel

    async def open(self, timeout: float) -> None:
        try:
            await super().open(timeout)
        except SandboxError as error:
            stderr = self._stderr.decode("utf-8", "replace").strip()
            if not stderr:
                raise
            raise SandboxError(f"{error.message}: {stderr[-500:]}", hint=error.hint or PYTHON_HINT) from error

    def settings(self) -> dict[str, Any]:
        settings = super().settings()
        # The container runtime limits the processors.
        return {**settings, "user": None, "limits": {**settings["limits"], "cpus": None}}

    # -- the container --------------------------------------------------------------------------------

    async def make_container(self, api: ContainerApi) -> str:
        """Create the container. Returns its id."""
        if await api.inspect_image(self.image_name) is None:
            await api.pull_image(self.image_name)
        return await api.create(self._container_config(await self._sources(api)))

    def _container_config(self, sources: list[str]) -> dict[str, Any]:
        disk = int(self.spec.limits.disk_bytes)
        options = f"rw,exec,nosuid,nodev,uid={USER},gid={USER},mode=0755"
        places = {path: f"{options},size={disk * share // 16}" for path, share in DISK_SHARES.items()}
        base = self._container_base()
        return {
            **base,
            "Entrypoint": ["python3", "-I", "-S", "-c", remote_program(), "pipe"],
            "User": f"{USER}:{USER}",
            "WorkingDir": str(HOME),
            "Env": [f"{name}={value}" for name, value in self._base_env.items()],
            "HostConfig": {
                **base["HostConfig"],
                "ReadonlyRootfs": True,
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
            },
        }

    def _container_base(self) -> dict[str, Any]:
        """What every container of ours has: its limits, no network, and as few rights as possible."""
        limits = self.spec.limits
        memory = int(limits.memory_bytes) + EXTRA_MEMORY_BYTES
        return {
            "Image": self.image_name,
            "Cmd": [],
            "Hostname": "sandbox",
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
                "CapDrop": ["ALL"],
                "SecurityOpt": ["no-new-privileges"],
                "Memory": memory,
                "MemorySwap": memory,
                "PidsLimit": int(limits.processes) + 1,
                "NanoCpus": (limits.cpus or 0) * 10**9,
                "IpcMode": "private",
                "LogConfig": {"Type": "none"},
                "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}],
            },
        }

    @property
    def _labels(self) -> dict[str, str]:
        return {LABEL: self.id, "paddock.owner": f"{os.getpid()}@{socket.gethostname()}"}

    @property
    def _targets(self) -> list[str]:
        tests = [str(TESTS)] if self.spec.readonly_tests else []
        return [*(str(mount.target) for mount in self.spec.mounts), *tests]

    async def _sources(self, api: ContainerApi) -> list[str]:
        """What is mounted: folders of this machine if the runtime is on it, otherwise volumes with their content."""
        folders = [mount.source.resolve() for mount in self.spec.mounts]
        if self.spec.readonly_tests:
            tests = self._own_folder() / "tests"
            await asyncio.to_thread(write_tests, tests, self.spec.readonly_tests)
            folders.append(tests)
        if api.address.is_local:
            return [str(folder) for folder in folders]
        return [await self._volume(api, number, folder) for number, folder in enumerate(folders)]

    async def _volume(self, api: ContainerApi, number: int, folder: Path) -> str:
        """A volume with the content of a folder, uploaded through a container that is never started."""
        if not await asyncio.to_thread(folder.is_dir):
            raise SandboxError(f"{folder} is no folder, and a container runtime elsewhere takes only folders")
        name = f"paddock-{self.id}-{number}"
        await api.create_volume(name, self._labels)
        mounts = [{"Type": "volume", "Source": name, "Target": VOLUME_TARGET}]
        host = {"Mounts": mounts, "NetworkMode": "none"}
        body = {"Image": self.image_name, "Labels": self._labels, "HostConfig": host}
        helper = await api.create(body)
        try:
            await api.put_archive(helper, VOLUME_TARGET, await asyncio.to_thread(pack_tree, folder))
        finally:
            await api.remove(helper)
        return name

    # -- the end --------------------------------------------------------------------------------------

    async def destroy(self) -> None:
        api, self._api = self._api, None
        if api is None:
            return
        container, self._container = self._container, None
        channel, self._channel = self._channel, None
        try:
            if channel is not None:
                await channel.close()
            # A container may have been created although the answer did not arrive.
            for container_id in [container] if container else await api.find_containers(f"{LABEL}={self.id}"):
                await api.remove(container_id)
            if not api.address.is_local:
                for name in await api.find_volumes(f"{LABEL}={self.id}"):
                    await api.remove_volume(name)
        finally:
            await api.close()

    @classmethod
    def end_orphan(cls, sandbox_id: str) -> bool:
        return asyncio.run(asyncio.wait_for(end_labelled(sandbox_id), CLEAN_UP_SECONDS))


async def end_labelled(sandbox_id: str) -> bool:
    """Remove every container and volume with the label of this sandbox. Returns whether none is left."""
    label = f"{LABEL}={sandbox_id}"
    async with ContainerApi() as api:
        for container in await api.find_containers(label):
            await api.remove(container)
        for name in await api.find_volumes(label):
            await api.remove_volume(name)
        return not await api.find_containers(label)


def pack_tree(folder: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(folder, arcname=".")
    return buffer.getvalue()
