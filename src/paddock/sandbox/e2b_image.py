"""Sandboxes at E2B on the image of a task: the template with the name of the image. Guest and commands are root.

What an image says about its variables, work folder and user, E2B knows and we do not: a command in the new sandbox
prints it. The template has to have a root user, and Python unless the server brings it (`paddock e2b up` does).
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import orjson

from paddock.errors import ImageError, SandboxError
from paddock.sandbox import image_root
from paddock.sandbox.e2b import E2bSandbox, sdk, to_sandbox_error
from paddock.sandbox.host_runtime import TARGET
from paddock.sandbox.images.image import ROOT, Image
from paddock.sandbox.images.provider import BuildRequest, ImageProvider
from paddock.sandbox.remote_image import RemoteImageSandbox

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.sandbox.base import Mount, SandboxSpec

HOST_PYTHON = str(TARGET / "bin" / "python3")
FIND_PYTHON = f"python={HOST_PYTHON}; [ -x $python ] || python=python3; exec $python -I -S -c "
DESCRIBE = """
import json, os, sys
print(json.dumps({"python": sys.executable, "workdir": os.getcwd(), "uid": os.getuid(), "env": dict(os.environ)}))
"""
PYTHON_HINT = "put python3 3.10 or later into the template"


class TemplateImages(ImageProvider):
    """A template stands for the image of the same name."""

    async def get(self, name: str) -> Image:
        e2b = sdk()
        try:
            exists = await e2b.AsyncTemplate.exists(name)
        except Exception as error:
            raise to_sandbox_error(e2b, error) from error
        if not exists:
            hint = f"build a template called {name}, or run the task with --sandbox bwrap or docker"
            raise ImageError(f"E2B has no template {name}", hint=hint)
        return Image(name, f"template:{name}", ())

    async def build(self, request: BuildRequest) -> Image:
        raise ImageError("the e2b backend builds no Dockerfiles", hint="run it with --sandbox bwrap or docker")


@dataclass(frozen=True, slots=True)
class TemplateDefaults:
    """What commands in a sandbox get if nothing else is said."""

    python: str
    workdir: str
    uid: int
    env: Mapping[str, str]


class ImageE2bSandbox(RemoteImageSandbox, E2bSandbox):
    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        self._mounts = spec.mounts

    @property
    def template(self) -> str:
        return self.image.name

    @property
    def mounts(self) -> tuple[Mount, ...]:
        return self._mounts

    async def prepare_guest(self) -> str:
        if not self._root:
            hint = "add the user root to the template"
            raise SandboxError(f"the template {self.template} has no root user, and commands are root", hint=hint)
        defaults = await self._read_defaults()
        config = self.image.config
        workdir = PurePosixPath(defaults.workdir) if config.workdir == ROOT else config.workdir
        user = config.user or (str(defaults.uid) if defaults.uid else "")
        self.image = replace(self.image, config=replace(config, env=defaults.env, workdir=workdir, user=user))
        home = {"HOME": str(self.home)}
        self.use_environment({**image_root.base_environment(self.image.config, self.home), **home})
        self.runtime_python = defaults.python
        if defaults.python == HOST_PYTHON:
            from paddock.sandbox.host_runtime import with_portable_programs

            self._mounts = with_portable_programs(self.spec.mounts)
        return defaults.python

    async def _read_defaults(self) -> TemplateDefaults:
        e2b = sdk()
        try:
            done = await self._remote.commands.run(FIND_PYTHON + shlex.quote(DESCRIBE))
            values: dict[str, Any] = orjson.loads(done.stdout)
            return TemplateDefaults(**values)
        except (e2b.CommandExitException, orjson.JSONDecodeError) as error:
            raise SandboxError(f"the template {self.template} has no python3: {error}", hint=PYTHON_HINT) from error
