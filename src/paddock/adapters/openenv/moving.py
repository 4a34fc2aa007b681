"""The whole server under the interpreter that has the environment, so that no step wakes another process.

Its packages come first, ours where it has none. An interpreter of another Python, or one whose packages cannot carry
a server, is left alone: then the environment runs in a process of its own.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import paddock
from paddock.sessions.isolation.process import interpreter

logger = logging.getLogger("paddock.adapters")

SCHEME = "openenv:"
VARIABLE = "PADDOCK_MOVED_IN"
"""Holds our folders for the other interpreter, and says that it has moved in already."""
PATHS = f"import os, sys; sys.path.extend(os.environ[{VARIABLE!r}].split(os.pathsep)); "
CHECK = PATHS + "import paddock.server.run, paddock.adapters.openenv.hosted; print(*sys.version_info[:2])"
BOOT = PATHS + "from paddock.cli import main; main(sys.argv[1:])"
CHECK_SECONDS = 60.0


def move_in(target: str, words: list[str]) -> None:
    """Go on with the same command there, and never come back; come back if `target` or its interpreter does not fit.

    Raises TargetError if it names an interpreter that is not there.
    """
    place, at, venv = target.removeprefix(SCHEME).rpartition("@")
    if not target.startswith(SCHEME) or not at or target not in words or VARIABLE in os.environ:
        return
    python = interpreter(venv)
    folders = [str(Path(paddock.__file__).parent.parent), sysconfig.get_paths()["purelib"]]
    variables = {**os.environ, VARIABLE: os.pathsep.join(folders)}
    if not can_carry(python, variables):
        logger.info("%s cannot carry the server: %s gets a process of its own", python, place)
        return
    moved = [f"{SCHEME}{place}" if word == target else word for word in words]
    os.execve(python, [python, "-c", BOOT, *moved], variables)


def can_carry(python: str, variables: dict[str, str]) -> bool:
    """Whether the interpreter is of our Python, and can import a server and OpenEnv together."""
    try:
        done = subprocess.run(
            [python, "-c", CHECK], env=variables, capture_output=True, text=True, timeout=CHECK_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and done.stdout.split() == [str(part) for part in sys.version_info[:2]]
