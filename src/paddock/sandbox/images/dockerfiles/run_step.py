"""RUN: which command runs, what its layer depends on, and how it runs in a sandbox on the layers below."""

from __future__ import annotations

import asyncio
import errno
import os
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from paddock.errors import ImageError
from paddock.sandbox import open_sandbox
from paddock.sandbox.base import Command, Completed, Job, Mount, SandboxSpec
from paddock.sandbox.images.dockerfiles.dockerfile import RunMount, parse_mounts
from paddock.sandbox.images.dockerfiles.scope import PREDEFINED_ARGS, BuildScope
from paddock.sandbox.network.connections import describe_failures

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paddock.limits import SandboxLimits
    from paddock.sandbox.images.dockerfiles.context import SourceTree
    from paddock.sandbox.images.dockerfiles.syntax import Instruction
    from paddock.sandbox.images.image import Image
    from paddock.sandbox.network.connections import ConnectionRecord
    from paddock.sandbox.network.policy import NetworkPolicy

SCRIPT_TARGET = "/run/paddock/heredoc"
LAST_LINES = 20
END_CHARACTERS = 16_384
REPORT_SECONDS = 0.25
SANDBOX_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class RunStep:
    """A RUN with its command."""

    instruction: Instruction
    argv: tuple[str, ...]
    script: str
    """A heredoc that starts with `#!`: it is run as a program, and `argv` is empty."""
    env: dict[str, str]
    mounts: tuple[RunMount, ...]

    def key_inputs(self, scope: BuildScope, tree: SourceTree) -> dict[str, Any]:
        """What the layer depends on, besides the layers of mounts. Raises OSError for files that cannot be read."""
        env = {name: value for name, value in self.env.items() if name not in PREDEFINED_ARGS}
        return {
            "argv": self.argv,
            "script": self.script,
            "env": env,
            "user": scope.config.user,
            "workdir": str(scope.config.workdir),
            "mounts": [
                {**mount.options, "files": self._mount_digest(mount, tree)}
                for mount in self.mounts
                if mount.kind == "bind"
            ],
        }

    def _mount_digest(self, mount: RunMount, tree: SourceTree) -> str:
        if mount.options.get("from"):
            return ""
        try:
            return tree.digest(tree.select(mount.source or "."))
        except FileNotFoundError as error:
            raise FileNotFoundError(errno.ENOENT, "not in the build context", mount.source) from error


def read_run(instruction: Instruction, scope: BuildScope) -> RunStep:
    mounts = tuple(
        replace(mount, options={name: scope.expand(value, instruction.line) for name, value in mount.options.items()})
        for mount in parse_mounts(instruction)
    )
    argv, script = _read_command(instruction, scope)
    return RunStep(instruction, argv, script, scope.step_env, mounts)


def _read_command(instruction: Instruction, scope: BuildScope) -> tuple[tuple[str, ...], str]:
    words = instruction.parse_json()
    if words is not None:
        return words, ""
    heredocs = instruction.heredocs
    is_script = len(heredocs) == 1 and instruction.rest.lstrip("0123456789").startswith("<<")
    if is_script and len(instruction.rest.split()) == 1:
        text = heredocs[0].text
        return ((), text) if text.startswith("#!") else ((*scope.config.shell, text), "")
    # The shell reads other heredocs itself.
    text = f"{instruction.rest}\n{instruction.heredoc_lines}" if heredocs else instruction.rest
    return (*scope.config.shell, text), ""


async def run_step(
    step: RunStep,
    *,
    image: Image,
    staged: Path,
    network: NetworkPolicy,
    limits: SandboxLimits,
    mounts: tuple[Mount, ...],
    on_output: Callable[[str], None],
    on_connection: Callable[[ConnectionRecord], None],
) -> None:
    """Run the command on the image; what it changes goes to `staged`. Raises ImageError with its last output.

    Raises SandboxError if the sandbox fails. Cancelling it ends the sandbox.
    """
    spec = SandboxSpec(limits, mounts=mounts, image=image, writable_layer=staged, network=network, phase="build")
    argv = step.argv or (SCRIPT_TARGET,)
    log = OutputLog(on_output)
    async with await open_sandbox("bwrap", spec, timeout=SANDBOX_SECONDS) as sandbox:
        sandbox.on_connection(on_connection)
        job = await sandbox.start(Command(argv, cwd=image.config.workdir, env=step.env, last=True))
        completed = await _follow(job, log)
        unreached = describe_failures(sandbox.connections)
    if completed.exit_code == 0:
        return
    if completed.killed_for is not None:
        reason = f"it used too much {completed.killed_for}"
    else:
        reason = f"it ended with exit code {completed.exit_code}"
    lines = "".join(f"\n    {line}" for line in (*log.last_lines, *unreached))
    raise ImageError(f"{reason}{lines}", hint="the lines above are its last output; correct the command")


async def _follow(job: Job, log: OutputLog) -> Completed:
    """Report the output of a command while it runs, and return how it ended."""
    waiting = asyncio.ensure_future(job.wait())
    try:
        while not waiting.done():
            await asyncio.wait([waiting], timeout=REPORT_SECONDS)
            log.update(job)
    except BaseException:
        waiting.cancel()
        raise
    return waiting.result()


class OutputLog:
    """Reports the new output of a job at each look, and keeps the end of it."""

    def __init__(self, on_output: Callable[[str], None]) -> None:
        self._on_output = on_output
        self._reported = 0
        self._end = ""

    def update(self, job: Job) -> None:
        count = job.output_bytes - self._reported
        if count > 0:
            self._reported += count
            text = job.tail(count)
            self._on_output(text)
            self._end = (self._end + text)[-END_CHARACTERS:]

    @property
    def last_lines(self) -> list[str]:
        return self._end.splitlines()[-LAST_LINES:]


@contextmanager
def script_mount(script: str) -> Iterator[Mount]:
    """A script as a program inside, for one step."""
    with TemporaryDirectory(prefix="paddock-script-") as folder:
        os.chmod(folder, 0o755)
        path = Path(folder, "script")
        path.write_text(script)
        path.chmod(0o755)
        yield Mount(path, PurePosixPath(SCRIPT_TARGET))
