"""Runs the tests of a task in a sandbox on an image. They are in `/tests`, and write to `/logs/verifier`.

The tests may write everywhere, and they see the files and perhaps the processes of the agent. Which sandbox they run
in is decided elsewhere (`image_workspace`).
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from paddock.errors import SandboxError
from paddock.rollouts.log_grading import grade_tests
from paddock.rollouts.sandboxes import pack_files
from paddock.rollouts.verifier import ENTRY, VerifierResult, read_reward
from paddock.sandbox.base import TESTS, Command
from paddock.store.outcome import Reward

if TYPE_CHECKING:
    from collections.abc import Mapping

    from paddock.sandbox.base import Sandbox
    from paddock.tasks.settings import LogGrader

ROOT = PurePosixPath("/")
NONINTERACTIVE = {"DEBIAN_FRONTEND": "noninteractive"}
RESET_SECONDS = 120.0
RUNNABLE = 0o755
KEPT_CHARACTERS = 256 * 1024
"""Of a log that was graded. The log itself may be far longer."""
RUN_SCRIPT = 'if command -v bash >/dev/null 2>&1; then exec bash -c "$0"; else exec sh -c "$0"; fi'
RESET_FOLDERS = """
import os, shutil, sys
for path in sys.argv[1:]:
    if os.path.islink(path) or os.path.exists(path) and not os.path.isdir(path):
        os.unlink(path)
    os.makedirs(path, exist_ok=True)
    os.chmod(path, 0o777)
    for entry in os.scandir(path):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
"""
"""Makes plain, empty folders of paths, whatever the agent put there."""


async def run_image_tests(
    sandbox: Sandbox,
    tests: Mapping[str, bytes],
    *,
    env: Mapping[str, str],
    user: str,
    timeout: float,
    keeps_running: bool = False,
    grader: LogGrader | None = None,
) -> VerifierResult:
    """Put the tests into place, run them, and read the reward. Empty `tests`: those of the image are run.

    With a `grader`, what they print is graded outside of the sandbox, and a reward that they write does not count.

    Afterwards every process in the sandbox is dead, unless it `keeps_running`. Raises SandboxError.
    """
    emptied = ["/logs/verifier", *([str(TESTS)] if tests else [])]
    await reset_folders(sandbox, *emptied)
    if tests:
        await unpack_scripts(sandbox, TESTS, tests)
    command = Command(
        script_command(str(TESTS / ENTRY)),
        cwd=sandbox.workdir,
        env=env,
        last=not keeps_running,
        user=user,
    )
    done = await sandbox.exec(command, timeout=timeout)
    if not keeps_running:
        await sandbox.kill()
    stdout, stderr = (output.decode(errors="replace") for output in (done.stdout, done.stderr))
    if grader is not None:
        reward = await grade_tests(grader, done, timeout)
        return VerifierResult(reward, done.exit_code, stdout[-KEPT_CHARACTERS:], stderr[-KEPT_CHARACTERS:])
    try:
        reward = await read_reward(sandbox, done, timeout)
    except SandboxError as error:
        reward = Reward.unknown(error.message)
    return VerifierResult(reward, done.exit_code, stdout, stderr)


def script_command(command: str) -> list[str]:
    """Runs the path of a script, or other shell, in bash where the image has it."""
    return ["/bin/sh", "-c", RUN_SCRIPT, command]


async def reset_folders(sandbox: Sandbox, *paths: str) -> None:
    assert sandbox.runtime_python is not None, "only a sandbox on an image has one"
    argv = [sandbox.runtime_python, "-I", "-S", "-c", RESET_FOLDERS, *paths]
    done = await sandbox.exec(Command(argv, cwd=ROOT, user="root"), timeout=RESET_SECONDS)
    if done.exit_code != 0:
        raise SandboxError(f"{', '.join(paths)} cannot be emptied: {done.stderr[-500:].decode(errors='replace')}")


async def unpack_scripts(
    sandbox: Sandbox, folder: PurePosixPath, files: Mapping[str, bytes], modes: Mapping[str, int] | None = None
) -> None:
    """Put files into a folder; those that are programs can be run."""
    await sandbox.unpack(folder, pack_files(files, {**script_modes(files), **(modes or {})}))


def script_modes(files: Mapping[str, bytes]) -> dict[str, int]:
    return {name: RUNNABLE for name, data in files.items() if name.endswith(".sh") or data.startswith(b"#!")}
