"""A bubblewrap sandbox whose root is an image, and whose commands are root in it.

The writable layer is in memory, or a folder on disk (`SandboxSpec.writable_layer`). The guest and its Python come
from the host. With a range of ids (`user_namespace`) the ids of the image are real. With a single one, a filter makes
changes of owners and users succeed without effect.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path, PurePosixPath
from time import perf_counter
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.processes import SANDBOX_VARIABLE
from paddock.sandbox import image_root, syscall_policy
from paddock.sandbox.base import TESTS, Mount, host_folder
from paddock.sandbox.bwrap import MOST_SHARED_MEMORY_BYTES, BwrapSandbox, find_bwrap, find_python
from paddock.sandbox.file_actions import FileAction, is_refused, perform_in_namespace
from paddock.sandbox.guest.files import acting_as, resolve_in_image
from paddock.sandbox.guest.transports import close_descriptors
from paddock.sandbox.guest.usage import DISK_INTERVAL_SECONDS, PAUSE_FACTOR, disk_use
from paddock.sandbox.guest_sandbox import failing_paddock_run, sealed_file, write_tests
from paddock.sandbox.image_sandbox import OWN_USERS, ROOT_HOME, ImageSandbox
from paddock.sandbox.local import GuestProcess, launch_guest
from paddock.sandbox.user_namespace import Identity, find_identity, map_ids

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from paddock.sandbox.base import SandboxSpec
    from paddock.sandbox.socket_owners import SocketOwnerFinder

INFO_SECONDS = 60.0
INFO_POLL_SECONDS = 0.0005


class ImageBwrapSandbox(ImageSandbox, BwrapSandbox):
    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self.identity: Identity | None = None
        self._layers: tuple[Path, ...] = ()
        self._image_layers: tuple[Path, ...] = ()
        self._held = ExitStack()
        self._disk_watch: asyncio.Task[None] | None = None

    @property
    def limits_enforced(self) -> Mapping[str, str]:
        return {
            "memory": "measured every 0.25 s; the sandbox is ended above it",
            "cpus": "processor affinity" if self.spec.limits.cpus else "not limited",
            "processes": "RLIMIT_NPROC",
            "disk": "measured every 0.25 s; the sandbox is ended above it"
            if self.spec.writable_layer is None
            else "measured every second; the sandbox is ended above it",
        }

    @property
    def user_ids(self) -> str:
        return "" if self.identity is None else str(self.identity)

    # -- opening --------------------------------------------------------------------------------------

    def prepare(self) -> None:
        from paddock.sandbox.host_runtime import find_host_runtime, with_portable_programs
        from paddock.sandbox.images.store import default_store

        self.identity = find_identity()
        self._bwrap = find_bwrap()
        self._python = find_python()[0]
        runtime = find_host_runtime(self._python)
        self._guest_python = self.runtime_python = runtime.python
        images = default_store()
        layers = self._held.enter_context(images.hold(self.image))
        self._image_layers = (*layers, *self.spec.extra_layers)
        self._find_home()
        self._base_env = dict(image_root.base_environment(self.image.config, ROOT_HOME))
        self._mounts = [*with_portable_programs(self.spec.mounts), *runtime.mounts]
        if self.spec.readonly_tests:
            own_folder = host_folder(self.id)
            own_folder.mkdir(mode=0o755)
            self.host_paths = (own_folder,)
            write_tests(own_folder / "tests", self.spec.readonly_tests)
            self._mounts.append(Mount(own_folder / "tests", TESTS))
        for mount in self._mounts:
            if not mount.source.exists():
                raise SandboxError(f"{mount.source} cannot be mounted: it does not exist")
        programs = {}
        if self.spec.readonly_tests:
            programs["paddock-run"] = failing_paddock_run("image")
            self._base_env["PATH"] = f"{image_root.PROGRAMS}:{self._base_env['PATH']}"
        skeleton = image_root.find_skeleton(images.skeletons_folder, self._mounts, self.identity, programs)
        self._layers = (*self._image_layers, skeleton)
        if self.spec.writable_layer is not None:
            self._make_work_folder(self.spec.writable_layer)
        self._folder_top = "" if self.spec.readonly_tests else None
        if os.geteuid() == 0:
            self._file_owner, self._keeps_rights = self.identity.host_uid(0), True

    def set_user(self, user: str) -> None:
        super().set_user(user)
        self._find_home()

    def _find_home(self) -> None:
        """Agents write their settings into the home of the image's user, and must be able to read them."""
        user = self.image.config.user
        if user in OWN_USERS:
            self._home = ROOT_HOME
            return
        home = image_root.find_home(self._image_layers, user)
        self._home = home or image_root.AGENT_HOME
        if home is None:
            self._owned.add(str(self._home))

    async def write(self, path: str | PurePosixPath, data: bytes, *, mode: int = 0o644) -> None:
        await super().write(path, data, mode=mode)
        parsed = self.home / PurePosixPath(path)
        if self.home != ROOT_HOME and parsed.is_relative_to(self.home):
            parts = parsed.relative_to(self.home).parts
            self._owned.update(str(self.home.joinpath(*parts[:count])) for count in range(1, len(parts) + 1))

    async def socket_owner_finder(self) -> SocketOwnerFinder | None:
        """None if another user than root runs the agent, whose processes we cannot look at."""
        if self.image.config.user not in OWN_USERS and self._agent_ids() is None:
            return None
        return await super().socket_owner_finder()

    def _acting_as_agent(self) -> AbstractContextManager[None]:
        ids = self._agent_ids()
        return super()._acting_as_agent() if ids is None else acting_as(*ids)

    def _agent_ids(self) -> tuple[int, int] | None:
        """User and group on the host of the image's user, who is not root. None if we cannot act as that user."""
        user = self.image.config.user
        if user in OWN_USERS or os.geteuid() != 0 or self.identity is None:
            return None
        ids = image_root.find_ids(self._image_layers, user)
        if ids is None:
            return None
        uid, gid = self.identity.host_uid(ids[0]), self.identity.host_gid(ids[1])
        return None if uid is None or gid is None else (uid, gid)

    def _make_work_folder(self, layer: Path) -> None:
        work = Path(f"{layer}.work")
        work.mkdir(mode=0o755)
        self.host_paths = (*self.host_paths, work)
        if os.geteuid() == 0 and self.identity is not None:
            for folder in (layer, work):
                os.chown(folder, self.identity.host_uid(0) or 0, self.identity.host_gid(0) or 0)

    def settings(self) -> dict[str, Any]:
        disk_check = "filesystem" if self.spec.writable_layer is None else None
        return {**super().settings(), **self.root_settings(), "disk_check": disk_check, "disk_path": "/"}

    async def launch(self) -> GuestProcess:
        assert self.identity is not None
        bwrap_info = os.memfd_create("bwrap-info", os.MFD_CLOEXEC)
        passed: list[int] = []
        release = -1
        options: dict[str, Any] = {"env": {SANDBOX_VARIABLE: self.id}}
        try:
            writable = self.spec.writable_layer
            folders = [*self._layers, *(mount.source for mount in self._mounts)]
            if writable is not None:
                # The kernel wants the layer and its work folder on one mount: both are reached through their parent.
                folders.append(writable.parent)
            owner = self.identity.host_uid(0)
            assert owner is not None
            resolved = [str(folder.resolve()) for folder in folders]
            staging, program, sources = self._find_program(resolved, owner, passed, options)
            lower, mounted = sources[: len(self._layers)], sources[len(self._layers) :]
            layer = None if writable is None else f"{mounted[-1]}/{writable.name}"
            pair = None if layer is None else (layer, f"{layer}.work")
            argv = [*staging, program, *self._image_namespaces(bwrap_info)]
            if self.identity.kind == "range":
                block, release = os.pipe()
                passed.append(block)
                argv += ["--userns-block-fd", str(block)]
            argv += [*image_root.overlay_arguments(lower, pair), *self._image_filesystem(passed)]
            for source, mount in zip(mounted, self._mounts, strict=False):
                argv += ["--bind" if mount.writable else "--ro-bind", source, str(mount.target)]
            argv += ["--"]
        except BaseException:
            close_descriptors((bwrap_info, *passed, *([release] if release >= 0 else [])))
            raise
        try:
            process = await launch_guest(
                argv, self._guest_python, descriptors=passed, bwrap_info=bwrap_info, **options
            )
            if self.identity.kind == "range":
                # Set at once, so that `close` ends it when this fails.
                self._process = process
                pid = await self._wait_for_namespace(process)
                await asyncio.to_thread(map_ids, pid, self.identity)
                os.write(release, b"1")
            return process
        finally:
            if release >= 0:
                os.close(release)

    async def _wait_for_namespace(self, process: GuestProcess) -> int:
        """The process in the new user namespace, which waits until its ids are mapped."""
        assert process.bwrap_info is not None
        deadline = asyncio.get_running_loop().time() + INFO_SECONDS
        while not (content := os.pread(process.bwrap_info, 4096, 0)).rstrip().endswith(b"}"):
            if process.has_ended or asyncio.get_running_loop().time() > deadline:
                raise self.describe_start_failure(await process.read_stderr())
            await asyncio.sleep(INFO_POLL_SECONDS)
        return int(json.loads(content)["child-pid"])

    def _image_namespaces(self, bwrap_info: int) -> Iterable[str]:
        yield from ("--unshare-all", "--unshare-user", "--uid", "0", "--gid", "0")
        yield from ("--new-session", "--as-pid-1", "--clearenv", "--cap-drop", "ALL")
        for capability in image_root.CAPABILITIES:
            yield from ("--cap-add", capability)
        yield from ("--hostname", "sandbox", "--info-fd", str(bwrap_info))

    def _image_filesystem(self, passed: list[int]) -> Iterable[str]:
        shared = min(MOST_SHARED_MEMORY_BYTES, int(self.spec.limits.disk_bytes) // 8)
        yield from ("--proc", "/proc", "--dev", "/dev")
        yield from ("--perms", "1777", "--size", str(shared), "--tmpfs", "/dev/shm")
        assert self.identity is not None
        pretends = self.identity.kind == "single"
        for program in (
            syscall_policy.sandbox_filter(),
            syscall_policy.image_filter(pretends_ownership=pretends),
        ):
            if program is not None:
                passed.append(sealed_file("seccomp", program))
                yield from ("--add-seccomp-fd", str(passed[-1]))

    async def open(self, timeout: float) -> None:
        await super().open(timeout)
        if self.spec.writable_layer is not None:
            self._disk_watch = asyncio.ensure_future(self._watch_disk(self.spec.writable_layer))

    async def _watch_disk(self, layer: Path) -> None:
        """End the sandbox when it has written too much. The guest cannot see the writable layer itself."""
        while True:
            started = perf_counter()
            used = await asyncio.to_thread(disk_use, str(layer))
            if used > self.spec.limits.disk_bytes:
                self._killed_for, self._is_over = "disk", True
                await self.kill()
                return
            await asyncio.sleep(max(DISK_INTERVAL_SECONDS, PAUSE_FACTOR * (perf_counter() - started)))

    async def close(self) -> None:
        try:
            if self._disk_watch is not None:
                self._disk_watch.cancel()
                await asyncio.wait([self._disk_watch])
            await super().close()
        finally:
            self._held.close()

    # -- commands and files ---------------------------------------------------------------------------

    def check_user(self, user: str) -> None:
        assert self.identity is not None
        if self.identity.kind == "single":
            raise SandboxError(
                f"a command cannot run as {user}: this machine gives a sandbox only one id",
                hint=self.identity.reason,
            )

    def _resolve(self, root: int, parts: Sequence[str]) -> Sequence[str]:
        return resolve_in_image(root, parts, is_file=False)

    def _perform_blocking(self, action: FileAction, root: int, data: bytes) -> bytes:
        action = replace(action, is_root=True)
        try:
            return super()._perform_blocking(action, root, data)
        except SandboxError as error:
            if self.identity is None or not is_refused(error):
                raise
        return perform_in_namespace(action, root, data, self.identity)
