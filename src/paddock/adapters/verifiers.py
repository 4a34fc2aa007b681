"""`verifiers:ID@VENV`: a taskset of verifiers as a target.

ID is the taskset's name, or a file that exports one. VENV is the virtual environment that has verifiers (it pins
packages that rule out sharing ours): its folder, or its python.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from paddock.adapters.child_environment import environment_class
from paddock.errors import TargetError
from paddock.sessions.isolation.process import HostProcess, find_interpreter

if TYPE_CHECKING:
    from collections.abc import Callable

LOADER = Path(__file__).with_name("verifiers_loader.py")


def load(rest: str) -> tuple[Callable[[], Any], str]:
    """Raises TargetError."""
    place, at, venv = rest.rpartition("@")
    if not at:
        raise TargetError(
            f"verifiers:{rest} does not say where verifiers is installed", hint=f"write verifiers:{rest}@PATH/TO/VENV"
        )
    # Its libraries start threads when they load a taskset, so nothing may be forked afterwards.
    process = HostProcess(find_interpreter(venv), LOADER, place, sessions_per_process=0)
    return environment_class(process, process.start()), Path(place).stem.lower()
