"""Checks that the users of a task exist in its image, and that commands can run as them on this machine."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import SandboxError, TaskError
from paddock.sandbox.base import Command
from paddock.sandbox.guest.users import NO_USER
from paddock.sandbox.image_sandbox import OWN_USERS

if TYPE_CHECKING:
    from paddock.sandbox.base import Sandbox

PROBE_SECONDS = 30.0


async def check_users(sandbox: Sandbox, *users: str) -> None:
    """Raises TaskError that names the user. Otherwise the first command would fail, and the agent have the blame."""
    for user in dict.fromkeys(users):
        if user in OWN_USERS:
            continue
        try:
            sandbox.check_user(user)
        except SandboxError as error:
            raise TaskError(error.message, hint=error.hint) from error
        assert sandbox.runtime_python is not None, "only a sandbox on an image has one"
        probe = Command([sandbox.runtime_python, "-I", "-S", "-c", ""], cwd=PurePosixPath("/"), user=user)
        done = await sandbox.exec(probe, timeout=PROBE_SECONDS)
        if NO_USER in done.stderr.decode(errors="replace"):
            hint = "create it in environment/Dockerfile with useradd, or correct user in task.toml"
            raise TaskError(f"user {user}: {NO_USER}", hint=hint)
