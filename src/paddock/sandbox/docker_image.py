"""A container on an image of its task, in which commands are root.

The guest and its Python come from this machine: mounted read-only, or, where the runtime is on another machine,
copied into the container before it starts. The rest of the container is as in `docker`, but its root can be written
to.
"""

from __future__ import annotations

import asyncio
import tarfile
import tempfile
from typing import IO, TYPE_CHECKING, Any

from paddock.sandbox import image_root
from paddock.sandbox.base import TESTS, Mount
from paddock.sandbox.bundle import remote_program
from paddock.sandbox.container_api import ContainerApiError
from paddock.sandbox.docker import DockerSandbox
from paddock.sandbox.guest_sandbox import write_tests
from paddock.sandbox.remote_image import RemoteImageSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from paddock.sandbox.container_api import ContainerApi

SHARED_MEMORY_BYTES = 64 * 1024 * 1024
DISK_SECONDS = 2.0
"""Between two measurements of the writable layer. The runtime walks through it each time."""
SIZE_OPTION_WORDS = ("storage-opt", "storage option", "size", "quota")
"""In the refusal of a runtime whose storage cannot limit a layer."""
ENGINE_LIMITS = {"memory": "memory", "cpus": "cpu", "processes": "pids"}
"""The word for each limit in the warnings of a runtime that does not enforce it."""


class ImageDockerSandbox(RemoteImageSandbox, DockerSandbox):
    _python = ""
    _mounts: tuple[Mount, ...] = ()
    _warnings: Sequence[str] = ()
    _has_disk_option = False
    _copied_bytes = 0
    _disk_watch: asyncio.Task[None] | None = None

    @property
    def image_name(self) -> str:
        return self.image.digest

    @property
    def limits_enforced(self) -> Mapping[str, str]:
        measured = {"memory": "measured every 0.25 s", "cpus": "", "processes": "measured every 0.25 s"}
        limits = {}
        for name, word in ENGINE_LIMITS.items():
            is_enforced = not any(word in warning.lower() for warning in self._warnings)
            ways = [*(["by the runtime"] if is_enforced else []), *([measured[name]] if measured[name] else [])]
            limits[name] = ", ".join(ways) or "not limited"
        if not self.spec.limits.cpus:
            limits["cpus"] = "not limited"
        every = f"measured every {DISK_SECONDS:g} s; the sandbox is ended above it"
        return {**limits, "disk": "by the runtime" if self._has_disk_option else every}

    # -- opening --------------------------------------------------------------------------------------

    async def make_container(self, api: ContainerApi) -> str:
        self._mounts = await asyncio.to_thread(self._find_mounts)
        if api.address.is_local:
            return await self._create(api, mounts=self._mounts)
        # A runtime elsewhere cannot mount folders of this machine. What is copied does not count as written.
        with tempfile.TemporaryFile() as file:
            self._copied_bytes = await asyncio.to_thread(pack_at_targets, self._mounts, file)
            container = await self._create(api, mounts=())
            await api.put_archive(container, "/", file)
        return container

    async def _create(self, api: ContainerApi, *, mounts: Sequence[Mount]) -> str:
        body = self._image_container(mounts)
        try:
            storage = {"size": str(self._most_bytes)}
            created = await api.create_container(
                {**body, "HostConfig": {**body["HostConfig"], "StorageOpt": storage}}
            )
            self._has_disk_option = True
        except ContainerApiError as error:
            if not any(word in error.message.lower() for word in SIZE_OPTION_WORDS):
                raise
            created = await api.create_container(body)
        self._warnings = created.warnings
        return created.id

    @property
    def _most_bytes(self) -> int:
        """In the writable layer."""
        return int(self.spec.limits.disk_bytes) + self._copied_bytes

    def _find_mounts(self) -> tuple[Mount, ...]:
        from paddock.sandbox.bwrap import find_python
        from paddock.sandbox.host_runtime import find_host_runtime, with_portable_programs

        runtime = find_host_runtime(find_python()[0])
        self._python = self.runtime_python = runtime.python
        mounts = [*with_portable_programs(self.spec.mounts), *runtime.mounts]
        if self.spec.readonly_tests:
            tests = self._own_folder() / "tests"
            write_tests(tests, self.spec.readonly_tests)
            mounts.append(Mount(tests, TESTS))
        return tuple(mounts)

    def _image_container(self, mounts: Sequence[Mount]) -> dict[str, Any]:
        body = self._container_base()
        capabilities = [name.removeprefix("CAP_") for name in image_root.CAPABILITIES]
        return {
            **body,
            "Entrypoint": [self._python, "-I", "-S", "-c", remote_program(), "pipe"],
            "User": "0:0",
            "WorkingDir": "/",
            "Env": [],
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                **body["HostConfig"],
                "CapAdd": capabilities,
                "ShmSize": SHARED_MEMORY_BYTES,
                "Mounts": [
                    {
                        "Type": "bind",
                        "Source": str(mount.source.resolve()),
                        "Target": str(mount.target),
                        "ReadOnly": True,
                    }
                    for mount in mounts
                ],
            },
        }

    # -- the disk -------------------------------------------------------------------------------------

    async def open(self, timeout: float) -> None:
        await super().open(timeout)
        if not self._has_disk_option:
            self._disk_watch = asyncio.ensure_future(self._watch_disk())

    async def _watch_disk(self) -> None:
        """End the sandbox when it has written too much."""
        while self._api is not None and self._container is not None:
            try:
                used = await self._api.writable_bytes(self._container)
            except ContainerApiError:
                # Whatever is wrong with the runtime or the container, the connection to the guest reports it.
                used = None
            if used is not None and used > self._most_bytes:
                self._killed_for = "disk"
                await self.kill()
                return
            await asyncio.sleep(DISK_SECONDS)

    async def destroy(self) -> None:
        if self._disk_watch is not None and self._disk_watch is not asyncio.current_task():
            self._disk_watch.cancel()
            await asyncio.wait([self._disk_watch])
        await super().destroy()


def pack_at_targets(mounts: Sequence[Mount], file: IO[bytes]) -> int:
    """Write what is mounted as one archive, at the paths where it belongs. Returns its size.

    Later mounts cover earlier ones."""

    def owned_by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(fileobj=file, mode="w|") as archive:
        for mount in mounts:
            archive.add(mount.source.resolve(), arcname=str(mount.target.relative_to("/")), filter=owned_by_root)
    size = file.tell()
    file.seek(0)
    return size
