"""Programs of this host in an empty root: no libc, no Python, no shell."""

import os
import shutil
import subprocess
from pathlib import Path, PurePosixPath

import pytest

from paddock.errors import SandboxError
from paddock.sandbox import host_runtime
from paddock.sandbox.base import Mount
from paddock.sandbox.bwrap import find_bwrap, find_python
from paddock.sandbox.elf import read_elf
from paddock.sandbox.host_runtime import (
    LOADER,
    SHELL_FOLDER,
    TARGET,
    HostRuntime,
    find_host_runtime,
    portable_program,
    with_portable_programs,
)
from rollouts.played import needs_bwrap

SHELL = Path("/bin/sh").resolve()
REPORT = """
import ctypes, json, os, socket, ssl, sys
foreign = [line for line in open("/proc/self/maps") if ".so" in line and "/run/paddock/runtime/" not in line]
variables = [name for name in os.environ if name.startswith(("LD_", "PYTHON"))]
print(json.dumps([sys.prefix, os.readlink("/proc/self/exe"), foreign, variables]))
"""


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> HostRuntime:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return find_host_runtime.__wrapped__(find_python()[0])


def run_in_empty_root(runtime: HostRuntime, root: Path, *argv: str, program: Path | None = None) -> str:
    binds = [word for mount in runtime.mounts for word in ("--ro-bind", str(mount.source), str(mount.target))]
    if program is not None:
        binds += ["--ro-bind", str(program), "/program"]
    command = [str(find_bwrap()), "--unshare-all", "--bind", str(root), "/", "--proc", "/proc", "--clearenv"]
    done = subprocess.run([*command, *binds, "--", *argv], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@needs_bwrap
def test_python_runs_in_an_empty_root(runtime: HostRuntime, tmp_path: Path) -> None:
    printed = run_in_empty_root(runtime, tmp_path, runtime.python, "-I", "-S", "-c", REPORT)
    assert printed == f'["{TARGET}", "{runtime.python}", [], []]'


@needs_bwrap
def test_a_program_of_the_host_runs_in_an_empty_root(
    runtime: HostRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (root := tmp_path / "root").mkdir()
    program = portable_program(SHELL)
    printed = run_in_empty_root(
        runtime, root, "/program", "-c", 'echo "$0 ${LD_LIBRARY_PATH-unset}"', program=program
    )
    assert printed == "/program unset"
    assert program.stat().st_size == SHELL.stat().st_size
    assert portable_program(SHELL) == program


@needs_bwrap
def test_bash_runs_in_an_empty_root(runtime: HostRuntime, tmp_path: Path) -> None:
    if not (runtime.folder / "shell" / "bash").exists():
        pytest.skip("this host has no bash")
    bash = str(SHELL_FOLDER / "bash")
    assert (
        run_in_empty_root(runtime, tmp_path, bash, "-c", "shopt -u nullglob; words=(a b); echo ${#words[@]}") == "2"
    )


def test_programs_of_a_mount_are_replaced_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "agent").mkdir()
    shutil.copy(SHELL, tmp_path / "agent" / "program")
    (tmp_path / "agent" / "script").write_text("#!/bin/sh\n")
    mount = Mount(tmp_path / "agent", PurePosixPath("/opt/agent"), ("program", "script"))
    plain = Mount(tmp_path, PurePosixPath("/opt/plain"))
    first, copy, last = with_portable_programs((mount, plain))
    assert (first, last) == (mount, plain)
    assert copy.target == PurePosixPath("/opt/agent/program")
    elf = read_elf(copy.source)
    assert elf is not None
    assert elf.interpreter == str(LOADER)


@needs_bwrap
def test_a_list_of_libraries_in_the_root_is_not_read(runtime: HostRuntime, tmp_path: Path) -> None:
    """An image has a libc of its own, and a list that names it."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "lib" / "x86_64-linux-gnu").mkdir(parents=True)
    (tmp_path / "lib" / "x86_64-linux-gnu" / "libc.so.6").write_bytes(b"no library")
    (tmp_path / "etc" / "ld.so.cache").write_bytes(
        (runtime.folder / "ld.so.cache").read_bytes().replace(b"libs", b"none")
    )
    assert run_in_empty_root(runtime, tmp_path, runtime.python, "-I", "-S", "-c", "print(1)") == "1"


def test_everybody_can_read_it(runtime: HostRuntime) -> None:
    modes = [path.stat().st_mode for path in runtime.folder.rglob("*")]
    assert modes
    assert all(mode & 0o004 for mode in modes)
    assert (runtime.folder / "ld.so").read_bytes().count(b"/run/paddock/ldc\0") == 1


def test_a_script_stays_as_it_is(tmp_path: Path) -> None:
    script = tmp_path / "agent"
    script.write_text("#!/bin/sh\n")
    assert portable_program(script) == script


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + b"\xff" * 200, b"#!/bin/sh\n"])
def test_an_interpreter_that_no_loader_starts_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "python3").write_bytes(content)
    with pytest.raises(SandboxError, match="is no program that a loader starts") as failure:
        find_host_runtime(str(tmp_path / "python3"))
    assert "glibc" in str(failure.value.hint)


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(ready: Path) -> None:
        (ready / "half").write_text("")
        raise OSError("no space left")

    with pytest.raises(SandboxError, match="no space left"):
        host_runtime._make(tmp_path / "made", fail)
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == []
    assert len(str(LOADER)) < len("/lib/ld-linux-aarch64.so.1") + 1
