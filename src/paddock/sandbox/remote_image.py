"""A sandbox elsewhere whose root is an image: the guest is root inside, and paths start at the root."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.sandbox import image_root
from paddock.sandbox.image_sandbox import ImageSandbox
from paddock.sandbox.remote import PADDOCK_RUN_FOLDER, RemoteSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import PurePosixPath

    from paddock.sandbox.base import SandboxSpec

END_SECONDS = 10.0


class RemoteImageSandbox(ImageSandbox, RemoteSandbox):
    """Comes before the class of the backend in the bases of a sandbox class."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self.use_environment(image_root.base_environment(self.image.config, self.home))

    def use_environment(self, env: Mapping[str, str]) -> None:
        """The variables of every command."""
        self._base_env = dict(env)
        if self.spec.readonly_tests:
            self._base_env["PATH"] = f"{PADDOCK_RUN_FOLDER}:{self._base_env['PATH']}"

    def settings(self) -> dict[str, Any]:
        settings = {**super().settings(), **self.root_settings(), "user": None}
        del settings["logs"]
        return {**settings, "links": {}}

    def _location(self, path: str | PurePosixPath, *, is_file: bool = False) -> dict[str, Any]:
        parts = self._file_parts(path) if is_file else self._parts(path)
        return {"root": "/", "parts": list(parts)}

    async def end_processes(self) -> None:
        used = await self._live_connection().ask("end_processes", {}, timeout=END_SECONDS)
        self._cpu_seconds, self._peak_memory = used["cpu_seconds"], used["peak_memory_bytes"]
