"""Opens sandboxes. Backends are chosen by name and imported when chosen."""

from __future__ import annotations

import asyncio
import importlib
import secrets
from typing import TYPE_CHECKING

from paddock.errors import ConfigError, PaddockError, SandboxError
from paddock.limits import SandboxLimits
from paddock.sandbox.base import Command, SandboxSpec
from paddock.sandbox.network.sandbox_network import add_certificates
from paddock.shielded import run_shielded

if TYPE_CHECKING:
    from paddock.sandbox.guest_sandbox import GuestSandbox

BACKENDS = {
    "bwrap": "paddock.sandbox.bwrap:BwrapSandbox",
    "process": "paddock.sandbox.process:ProcessSandbox",
    "docker": "paddock.sandbox.docker:DockerSandbox",
    "e2b": "paddock.sandbox.e2b:E2bSandbox",
}
REMOTE_BACKENDS = ("docker", "e2b")
"""Backends whose sandboxes are no processes of this host. What a dead owner left is found by its label."""
TRIAL_SECONDS = 10.0


async def open_sandbox(
    backend: str,
    spec: SandboxSpec,
    *,
    sandbox_id: str | None = None,
    consent: bool = False,
    timeout: float = 30.0,
) -> GuestSandbox:
    """A running sandbox; close it, or use it as an async context manager.

    `consent` allows a backend that does not isolate. Raises ConfigError for an unknown backend, SandboxError if the
    sandbox cannot be made; then nothing of it is left.
    """
    sandbox_class = choose_backend(backend, consent=consent)
    if spec.network.mode != "no-network":
        spec = await asyncio.to_thread(add_certificates, spec)
    sandbox = sandbox_class.class_for(spec)(sandbox_id or new_sandbox_id(), spec)
    await sandbox.open(timeout)
    try:
        await sandbox.set_network(spec.network, phase=spec.phase)
    except BaseException:
        await run_shielded(sandbox.close())
        raise
    return sandbox


def new_sandbox_id() -> str:
    """A random id, unique across machines."""
    return f"sb-{secrets.token_hex(6)}"


def choose_backend(name: str, *, consent: bool) -> type[GuestSandbox]:
    """The backend of that name. Raises ConfigError for an unknown one, SandboxError for one that needs consent."""
    sandbox_class = find_backend(name)
    if not sandbox_class.isolates and not consent:
        raise SandboxError(
            f"the {name} backend does not isolate: what runs in it can read and change all that you can",
            hint="use bwrap, or give consent (--unsafe) if you trust the agent, the model and the task",
        )
    return sandbox_class


def find_backend(name: str) -> type[GuestSandbox]:
    """The class of a sandbox backend. Raises ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"there is no sandbox backend {name!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    sandbox_class: type[GuestSandbox] = getattr(importlib.import_module(module), attribute)
    return sandbox_class


def available(backend: str) -> str | None:
    """None if a sandbox of this backend can be opened here, else the reason. It opens one."""
    try:
        asyncio.run(_try_backend(backend))
    except PaddockError as error:
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return None


async def _try_backend(backend: str) -> None:
    spec = SandboxSpec(SandboxLimits())
    async with await open_sandbox(backend, spec, consent=True, timeout=TRIAL_SECONDS) as sandbox:
        completed = await sandbox.exec(Command(["/bin/true"]), timeout=TRIAL_SECONDS)
    if completed.exit_code != 0:
        raise SandboxError(f"/bin/true ended with {completed.exit_code} in a {backend} sandbox")
