"""What all backends share for a sandbox whose root is an image: its places, and the users of its commands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.errors import SandboxError
from paddock.sandbox import image_root
from paddock.sandbox.base import WORKDIR, Command
from paddock.sandbox.guest_sandbox import GuestSandbox

if TYPE_CHECKING:
    from paddock.sandbox.base import SandboxSpec
    from paddock.sandbox.images.image import Image

ROOT_HOME = PurePosixPath("/root")
OWN_USERS = ("", "root", "0", "root:root", "0:0")


class ImageSandbox(GuestSandbox):
    """Comes before the class of the backend in the bases of a sandbox class."""

    def __init__(self, sandbox_id: str, spec: SandboxSpec) -> None:
        super().__init__(sandbox_id, spec)
        assert spec.image is not None
        self.image: Image = spec.image
        self._home = ROOT_HOME
        self._owned: set[str] = set()
        """What was written into the home of a user who is not root. It belongs to root until a command is started."""

    @property
    def home(self) -> PurePosixPath:
        return self._home

    @property
    def workdir(self) -> PurePosixPath:
        return self.image.config.workdir

    def set_user(self, user: str) -> None:
        self.image = replace(self.image, config=replace(self.image.config, user=user))

    def check_user(self, user: str) -> None:
        pass

    def root_settings(self) -> dict[str, Any]:
        """The settings of the guest that differ from those of a sandbox without an image."""
        workdir = str(self.workdir)
        folders = [str(self.home), *([workdir] if workdir != "/" else []), *image_root.LOG_FOLDERS]
        settings: dict[str, Any] = {"root": "/", "folders": folders}
        if self.spec.readonly_tests:
            settings["verifier"] = {"is_confined": False, "has_siblings": False}
        return settings

    def _spawn_arguments(self, command: Command) -> dict[str, Any]:
        arguments = super()._spawn_arguments(command)
        if command.cwd == WORKDIR:
            arguments["cwd"] = str(self.workdir)
        user = command.user or self.image.config.user
        if user not in OWN_USERS:
            self.check_user(user)
            arguments["user"] = user
            if user == self.image.config.user and self.home != ROOT_HOME:
                arguments |= {"home": str(self.home), "owned": sorted(self._owned)}
                self._owned.clear()
        return arguments

    def _parts(self, path: str | PurePosixPath) -> tuple[str, ...]:
        parsed = self.home / PurePosixPath(path)
        if ".." in parsed.parts:
            raise SandboxError(f"{path} leads upwards", hint="give a path without ..")
        return parsed.parts[1:]
