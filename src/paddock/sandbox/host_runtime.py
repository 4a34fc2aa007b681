"""Programs of this host in a root that has neither Python nor this libc: an image, however small.

The host's interpreter, its standard library, the shared libraries that programs of ours need and the loader of glibc
are copied once into a folder of the cache, which is mounted read-only. The copy of the loader reads a list of
libraries of its own instead of `/etc/ld.so.cache`, and programs name that loader as their interpreter. So they find
nothing of the root by accident, `/proc/self/exe` is the program itself, and no variable reaches what they start.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paddock.config import XDG_CACHE_HOME, user_cache_folder
from paddock.errors import SandboxError
from paddock.sandbox.base import Mount
from paddock.sandbox.elf import CACHE_FLAGS, ElfFile, encode_cache, read_elf, set_cache_path, set_interpreter
from paddock.sandbox.runtime_cache import use_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORMAT = 2
"""Changed when a folder in the cache must be made again."""
TARGET = PurePosixPath("/run/paddock/runtime")
LOADER = TARGET / "ld.so"
LIBRARY_LIST = PurePosixPath("/run/paddock/ldc")
"""Takes the place of `/etc/ld.so.cache` in the loader, so it cannot be longer."""
SHELL_FOLDER = TARGET / "shell"
"""Holds `bash`, if this host has it: some agents start no other shell. It comes last in their PATH."""
EXTRA_LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "librt.so.1", "libpthread.so.0", "libdl.so.2", "libutil.so.1")
"""What the programs of agents need beside the libraries of Python, as far as this host has them."""
LEFT_OUT = ("test", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages", "dist-packages")
LAYOUT = "import sys, sysconfig; print(sysconfig.get_path('stdlib'), '%d.%d' % sys.version_info[:2], sep='\\n')"
LAYOUT_SECONDS = 30.0
GLIBC_HINT = "sandboxes on images need a host with glibc on x86_64 or aarch64"


@dataclass(frozen=True, slots=True)
class HostRuntime:
    """What to mount in a sandbox on an image, and how programs of ours start there."""

    mounts: tuple[Mount, ...]
    python: str
    """The interpreter inside. It needs no variables and no options beyond its usual ones."""
    folder: Path
    """Where it is on the host."""


@cache
def find_host_runtime(python: str) -> HostRuntime:
    """The runtime around an interpreter of this host, made on the first use on this machine.

    Raises SandboxError on a host without glibc. Blocks.
    """
    program = Path(python).resolve()
    elf = read_elf(program)
    if elf is None or not elf.interpreter or elf.machine not in CACHE_FLAGS:
        raise SandboxError(f"{program} is no program that a loader starts", hint=GLIBC_HINT)
    loader = Path(elf.interpreter).resolve()
    bash = _find_bash()
    folder = runtime_folder() / f"python-{_key(program, loader, *bash)}"
    _make(folder, lambda ready: _fill(ready, program, elf, loader, bash))
    mounts = (Mount(folder, TARGET), Mount(folder / "ld.so.cache", LIBRARY_LIST))
    return HostRuntime(mounts, str(TARGET / "bin" / "python3"), folder)


def portable_program(program: Path) -> Path:
    """A copy of a program that runs on any root with the mounts of `find_host_runtime`, made on the first use.

    Static programs and scripts are returned as they are. Raises SandboxError if it cannot be made. Blocks.
    """
    elf = read_elf(program)
    if elf is None or not elf.interpreter:
        return program
    folder = runtime_folder() / f"program-{_key(program)}"

    def fill(ready: Path) -> None:
        copy = ready / program.name
        shutil.copyfile(program, copy)
        _use_own_loader(copy, elf)

    _make(folder, fill)
    return folder / program.name


def with_portable_programs(mounts: Iterable[Mount]) -> tuple[Mount, ...]:
    """The mounts, each followed by the copies that replace its programs on an image. Raises SandboxError. Blocks."""
    complete: list[Mount] = []
    for mount in mounts:
        complete.append(mount)
        for name in mount.programs:
            program = mount.source / name
            if (copy := portable_program(program)) != program:
                complete.append(Mount(copy, mount.target / name))
    return tuple(complete)


def runtime_folder() -> Path:
    """For root below `/var/cache`: sandboxes run as another user, who cannot read root's home."""
    if os.geteuid() == 0 and XDG_CACHE_HOME.read() is None:
        return Path("/var/cache/paddock/runtime")
    return user_cache_folder() / "runtime"


# -- how a folder is made -----------------------------------------------------------------------------


def _key(*files: Path) -> str:
    """Changes with the files: an upgrade of the host makes a new folder."""
    states = [(str(file), status.st_size, status.st_mtime_ns) for file in files for status in [file.stat()]]
    return hashlib.sha256(repr((FORMAT, states)).encode()).hexdigest()[:16]


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    """Make `folder` unless it exists. Raises SandboxError."""

    def fill_for_all(ready: Path) -> None:
        fill(ready)
        _let_all_read(ready)

    try:
        use_folder(folder, fill_for_all)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{folder} cannot be made: {error}", hint=GLIBC_HINT) from error


def _fill(ready: Path, program: Path, elf: ElfFile, loader: Path, bash: tuple[Path, ...]) -> None:
    command = [str(program), "-I", "-S", "-c", LAYOUT]
    layout = subprocess.run(command, capture_output=True, text=True, timeout=LAYOUT_SECONDS, check=True).stdout
    standard_library, version = layout.splitlines()
    inside = ready / "lib" / f"python{version}"
    shutil.copytree(standard_library, inside, ignore=_ignored, symlinks=False, ignore_dangling_symlinks=True)
    (ready / "bin").mkdir()
    copy = ready / "bin" / "python3"
    shutil.copyfile(program, copy)
    _use_own_loader(copy, elf)
    _copy_bash(bash, ready / SHELL_FOLDER.name)
    (ready / "ld.so").write_bytes(set_cache_path(loader.read_bytes(), str(LIBRARY_LIST)))
    (ready / "ld.so").chmod(0o755)
    modules = sorted(Path(standard_library, "lib-dynload").glob("*.so"))
    libraries = find_libraries((program, *modules, *bash), EXTRA_LIBRARIES)
    (ready / "libs").mkdir()
    for name, path in libraries.items():
        shutil.copyfile(path, ready / "libs" / name)
    listed = {name: str(TARGET / "libs" / name) for name in libraries}
    # The loader is a library too: others name it, and must get the one that runs.
    listed[loader.name] = listed[Path(elf.interpreter).name] = str(LOADER)
    (ready / "ld.so.cache").write_bytes(encode_cache(listed, elf.machine))


def _find_bash() -> tuple[Path, ...]:
    program = shutil.which("bash")
    return () if program is None else (Path(program).resolve(),)


def _copy_bash(programs: tuple[Path, ...], folder: Path) -> None:
    folder.mkdir()
    for program in programs:
        copy = folder / "bash"
        shutil.copyfile(program, copy)
        copy.chmod(0o755)
        elf = read_elf(program)
        if elf is not None and elf.interpreter:
            set_interpreter(copy, elf, str(LOADER))


def _let_all_read(folder: Path) -> None:
    """Whatever the umask is: sandboxes of root run as another user."""
    folder.chmod(0o755)
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else path.stat().st_mode | 0o444)


def _ignored(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name in LEFT_OUT or name.startswith("config-")]


def _use_own_loader(program: Path, elf: ElfFile) -> None:
    program.chmod(0o755)
    set_interpreter(program, elf, str(LOADER))


def find_libraries(files: Iterable[Path], extra: Iterable[str] = ()) -> dict[str, Path]:
    """Where this host has the libraries that the files need, and those that the libraries need, by their names."""
    on_host = _host_libraries()
    libraries = {name: on_host[name] for name in extra if name in on_host}
    waiting = [*files, *libraries.values()]
    while waiting:
        file = waiting.pop()
        elf = read_elf(file)
        if elf is None:
            continue
        for name in elf.needed:
            path = _find_library(name, elf.search_folders, file) or on_host.get(name)
            if path is not None and name not in libraries and not name.startswith("ld-linux"):
                libraries[name] = path
                waiting.append(path)
    return libraries


def _find_library(name: str, folders: Iterable[str], origin: Path) -> Path | None:
    real = str(origin.resolve().parent)
    paths = (Path(folder.replace("${ORIGIN}", real).replace("$ORIGIN", real)) / name for folder in folders)
    return next((path for path in paths if path.is_file()), None)


@cache
def _host_libraries() -> dict[str, Path]:
    """The libraries that the host's loader lists."""
    ldconfig = shutil.which("ldconfig") or "/sbin/ldconfig"
    command = [ldconfig, "-p"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=LAYOUT_SECONDS, check=True).stdout
    libraries: dict[str, Path] = {}
    for line in printed.splitlines():
        words, arrow, path = line.strip().partition(" => ")
        if arrow and ("x86-64" in words or "AArch64" in words):
            libraries.setdefault(words.split()[0], Path(path))
    return libraries
