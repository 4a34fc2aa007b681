"""Closed places for agents and verifiers. Backends are chosen by name and imported when chosen."""

from __future__ import annotations

import asyncio
import importlib
import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError, PaddockError, SandboxError
from paddock.rollouts.limits import SandboxLimits
from paddock.rollouts.sandbox.base import Command, Completed, Entry, Job, Mount, Sandbox, SandboxSpec
from paddock.rollouts.sandbox.leftovers import end_leftover

if TYPE_CHECKING:
    from paddock.rollouts.sandbox.supervised import SupervisedSandbox

BACKENDS = {
    "bwrap": "paddock.rollouts.sandbox.bwrap:BwrapSandbox",
    "process": "paddock.rollouts.sandbox.process:ProcessSandbox",
    "docker": "paddock.rollouts.sandbox.docker:DockerSandbox",
    "e2b": "paddock.rollouts.sandbox.e2b:E2bSandbox",
}
ELSEWHERE = ("docker", "e2b")
"""Backends whose sandboxes are no processes of ours: what a dead owner left is found by its mark."""
TRIAL_TIMEOUT = 10.0

__all__ = [
    "BACKENDS",
    "Command",
    "Completed",
    "Entry",
    "Job",
    "Mount",
    "Sandbox",
    "SandboxSpec",
    "available",
    "end_elsewhere",
    "end_leftover",
    "open_sandbox",
]


async def open_sandbox(
    backend: str,
    spec: SandboxSpec,
    *,
    sandbox_id: str | None = None,
    consent: bool = False,
    timeout: float = 30.0,
) -> SupervisedSandbox:
    """A running sandbox; close it, or use it as an async context manager.

    `consent` allows a backend that does not isolate. Raises ConfigError for an unknown backend, SandboxError if the
    sandbox cannot be made; then nothing of it is left.
    """
    kind = choose_backend(backend, consent=consent)
    sandbox = kind(sandbox_id or new_sandbox_id(), spec)
    await sandbox.open(timeout)
    return sandbox


def new_sandbox_id() -> str:
    return f"sb-{secrets.token_hex(6)}"


def choose_backend(name: str, *, consent: bool) -> type[SupervisedSandbox]:
    """The backend of that name. Raises ConfigError for an unknown one, SandboxError for one that needs consent."""
    kind = find_backend(name)
    if not kind.isolates and not consent:
        raise SandboxError(
            f"the {name} backend does not isolate: what runs in it can read and change all that you can",
            hint="use bwrap, or give consent (--unsafe) if you trust the agent, the model and the task",
        )
    return kind


def find_backend(name: str) -> type[SupervisedSandbox]:
    if name not in BACKENDS:
        raise ConfigError(f"there is no sandbox backend {name!r}", hint=f"choose one of {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    kind: type[SupervisedSandbox] = getattr(importlib.import_module(module), attribute)
    return kind


def end_elsewhere(backend: str, sandbox_id: str) -> bool:
    """Take away what a dead owner left at an engine or a service. Returns whether nothing is left. Blocks.

    Raises SandboxError if it cannot be asked.
    """
    if backend not in ELSEWHERE:
        return True
    kind: Any = find_backend(backend)
    # In a thread of its own: the caller's may run an event loop already.
    with ThreadPoolExecutor(1) as thread:
        return bool(thread.submit(kind.end_leftover, sandbox_id).result())


def available(backend: str) -> str | None:
    """None if a sandbox of this backend can be made here, else a sentence that says why not. It makes one."""
    try:
        asyncio.run(_try(backend))
    except PaddockError as error:
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return None


async def _try(backend: str) -> None:
    spec = SandboxSpec(SandboxLimits())
    async with await open_sandbox(backend, spec, consent=True, timeout=TRIAL_TIMEOUT) as sandbox:
        done = await sandbox.exec(Command(["/bin/true"]), timeout=TRIAL_TIMEOUT)
    if done.exit_code != 0:
        raise SandboxError(f"/bin/true ended with {done.exit_code} in a {backend} sandbox")
