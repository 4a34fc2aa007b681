"""The cache of agent programs: each version is fetched once and used offline afterwards.

A version is either complete in the cache or absent: it is prepared in a temporary folder and renamed into place,
under a file lock, so that rollouts that start together fetch it once. No install script of a package runs.
"""

from __future__ import annotations

import asyncio
import fcntl
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from paddock.config import PADDOCK_AGENTS, XDG_CACHE_HOME, user_cache_folder
from paddock.errors import AgentError
from paddock.sandbox.base import Mount
from paddock.sandbox.bwrap import find_python
from paddock.sandbox.host_runtime import SHELL_FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from paddock.agents.base import AgentBase

NODE_VERSION = "24.21.0"
NODE_FOLDER = PurePosixPath("/opt/node")
NODE = str(NODE_FOLDER / "node")
"""The interpreter of agents written in JavaScript, in every sandbox that has `node_mounts`."""
NODE_COMMAND = (NODE, "--disable-wasm-trap-handler", "--liftoff-only", "--wasm-max-mem-pages=8192")
"""How to start it. Without these options WebAssembly exceeds the memory limit of a sandbox: it reserves 10 GB of
addresses per module, and optimizing a parser as large as a shell's takes gigabytes."""
RIPGREP_VERSION = "1.18.0"
RIPGREP_FOLDER = "/opt/ripgrep"
NPM_INSTALL = ("--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--omit", "dev")
OLDEST_TOOL_PYTHON = (3, 10)
REGISTRY_HINT = "is the registry reachable?"
_only_cached: ContextVar[bool] = ContextVar("only_cached", default=False)


def agents_folder() -> Path:
    """Where agent programs are kept: `PADDOCK_AGENTS`, or `agents` in Paddock's cache folder.

    For root that is below `/var/cache`: sandboxes run as another user, who cannot read root's home.
    """
    folder = PADDOCK_AGENTS.read()
    if folder is not None:
        return folder
    if os.geteuid() == 0 and XDG_CACHE_HOME.read() is None:
        return Path("/var/cache/paddock/agents")
    return user_cache_folder() / "agents"


@contextmanager
def only_cached() -> Iterator[None]:
    """Inside, nothing is fetched: what is not in the cache raises AgentError."""
    token = _only_cached.set(True)
    try:
        yield
    finally:
        _only_cached.reset(token)


async def is_installed(agent: AgentBase) -> bool:
    """Whether the agent would start without fetching anything."""
    try:
        with only_cached():
            await agent.install(lambda line: None, timeout=1.0)
    except AgentError:
        return False
    return True


async def fetch_npm_binary(
    package: str, version: str, member: str, log: Callable[[str], None], *, timeout: float
) -> Path:
    """The folder that holds the one file `member` of an npm package, fetched if it is not there yet.

    Only the package's archive is taken: nothing it depends on comes along.
    """
    folder = agents_folder() / folder_name(package, version)

    def fill(scratch: Path, ready: Path) -> None:
        archive = _npm_pack(f"{package}@{version}", scratch, timeout)
        with tarfile.open(archive) as packed:
            _extract(packed, f"package/{member}", ready / Path(member).name)

    await prepare(folder, Path(member).name, fill, log)
    return folder


async def fetch_npm_tree(
    package: str,
    version: str,
    log: Callable[[str], None],
    *,
    timeout: float,
    only: tuple[str, ...] = (),
    alone: bool = False,
    optional: bool = False,
    node: bool = True,
) -> Path:
    """The folder whose `node_modules` holds an npm package and all it depends on, fetched if it is not there yet.

    `only` keeps of it what these patterns, relative to `node_modules`, match, and drops the rest. `alone` leaves
    everything it depends on out, for a package that bundles what it needs; `optional` takes optional dependencies
    along. With `node` the interpreter is fetched too: see `node_mounts`.
    """
    folder = agents_folder() / f"{folder_name(package, version)}-tree"
    spec = f"{package}@{version}"

    def fill(scratch: Path, ready: Path) -> None:
        if alone:
            _unpack(_npm_pack(spec, scratch, timeout), ready / "node_modules" / package)
        else:
            command = [_npm(spec), "install", *NPM_INSTALL, *(() if optional else ("--omit", "optional"))]
            run_fetcher([*command, "--prefix", str(ready), spec], scratch, spec, timeout)
        if only:
            keep_only(ready / "node_modules", only)

    await prepare(folder, "node_modules", fill, log)
    if node:
        await fetch_node(log, timeout=timeout)
    return folder


async def fetch_npm_bundle(
    package: str,
    version: str,
    target: PurePosixPath,
    members: tuple[str, ...],
    log: Callable[[str], None],
    *,
    timeout: float,
) -> tuple[Mount, ...]:
    """The mounts of a bundled Node.js program, below `target`. Only `members` of its package are kept."""
    only = tuple(f"{package}/{path}" for path in members)
    folder = await fetch_npm_tree(package, version, log, timeout=timeout, only=only, alone=True)
    return (Mount(folder, target), *node_mounts())


async def fetch_ripgrep(log: Callable[[str], None], *, timeout: float) -> Mount:
    """The mount of the search program `rg`, which some agents would otherwise try to download."""
    package = f"@vscode/ripgrep-{npm_platform()}"
    folder = await fetch_npm_binary(package, RIPGREP_VERSION, "bin/rg", log, timeout=timeout)
    return Mount(folder, PurePosixPath(RIPGREP_FOLDER), ("rg",))


def with_ripgrep(*words: str) -> list[str]:
    """A command line that runs with `rg` on its PATH, and with `bash` where an image has none."""
    return ["/bin/sh", "-c", f'PATH="{RIPGREP_FOLDER}:$PATH:{SHELL_FOLDER}" exec "$0" "$@"', *words]


def with_bash(*words: str) -> list[str]:
    """A command line that finds `bash` also where an image has none."""
    return ["/bin/sh", "-c", f'PATH="$PATH:{SHELL_FOLDER}" exec "$0" "$@"', *words]


async def fetch_node(log: Callable[[str], None], *, timeout: float) -> Path:
    """The folder that holds `node`, the same release on every machine, whatever else is installed there."""
    return await fetch_npm_binary(f"node-{npm_platform()}", NODE_VERSION, "bin/node", log, timeout=timeout)


def node_mounts() -> tuple[Mount, ...]:
    """What shows the fetched interpreter inside, as `NODE`."""
    folder = agents_folder() / folder_name(f"node-{npm_platform()}", NODE_VERSION)
    return (Mount(folder, NODE_FOLDER, (PurePosixPath(NODE).name,)),)


async def fetch_python_tool(
    name: str, version: str, pins: tuple[str, ...], log: Callable[[str], None], *, timeout: float
) -> Path:
    """The folder to put on the path of `tool_python`: a Python package, and of its dependencies only `pins`."""
    python = tool_python()
    folder = agents_folder() / f"{folder_name(name, version)}-py{python.version.replace('.', '')}"
    specs = [f"{name}=={version}", *pins]

    def fill(scratch: Path, ready: Path) -> None:
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--python-version", python.version]
        command = [*_pip(name), "install", *options, "--target", str(ready), *specs]
        run_fetcher(command, scratch, specs[0], timeout)
        # Compiled by the interpreter that will run it: its bytecode may differ from this process's.
        run_fetcher([python.program, "-I", "-m", "compileall", "-q", str(ready)], scratch, specs[0], timeout)

    await prepare(folder, f"{name.replace('-', '_')}-{version}.dist-info", fill, log)
    return folder


@dataclass(frozen=True, slots=True)
class ToolPython:
    """A Python interpreter that is the same inside and outside of a sandbox."""

    program: str
    version: str
    mounts: tuple[Mount, ...] = ()


def tool_python() -> ToolPython:
    """The one that sandboxes have anyway or, where that is too old, the one that runs this."""
    program, folder = find_python()
    if folder is None:
        major, minor = (int(number) for number in Path(program).resolve().name.removeprefix("python").split("."))
        if (major, minor) >= OLDEST_TOOL_PYTHON:
            return ToolPython(program, f"{major}.{minor}")
    own, prefix = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return ToolPython(str(own), version, (Mount(prefix, PurePosixPath(prefix)),))


def program_text(name: str) -> str:
    """The source of a program in this package that runs in a sandbox, without Paddock."""
    return Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")


def folder_name(package: str, version: str) -> str:
    """The name of the folder in which a release of a package is installed."""
    return f"{package.removeprefix('@').replace('/', '-')}-{version}"


def npm_platform() -> str:
    """How npm packages with binaries name this machine, as in `linux-x64`."""
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine().lower())
    if machine is None:
        raise AgentError(f"there is no build for {platform.machine()}", hint="x86_64 and arm64 machines work")
    return f"{platform.system().lower()}-{machine}"


def has_avx2() -> bool:
    """Whether this processor has AVX2, which newer builds need; assumed if it cannot be read."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


# -- how a folder gets into the cache --------------------------------------------------------------------


async def prepare(folder: Path, wanted: str, fill: Callable[[Path, Path], None], log: Callable[[str], None]) -> None:
    """Make `folder`, unless `wanted` is in it. `fill` gets a scratch folder, and the one that becomes `folder`."""
    if (folder / wanted).exists():
        return
    if _only_cached.get():
        raise AgentError(f"{folder.name} is not on this machine", hint="paddock agents --install NAME fetches it")
    await asyncio.to_thread(_prepare, folder, wanted, fill, log)


def _prepare(folder: Path, wanted: str, fill: Callable[[Path, Path], None], log: Callable[[str], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _file_lock(folder.parent / f".{folder.name}.lock"):
        if (folder / wanted).exists():
            return
        log(f"fetching {folder.name}")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            ready = Path(scratch) / "ready"
            ready.mkdir()
            fill(Path(scratch), ready)
            shutil.rmtree(folder, ignore_errors=True)
            ready.rename(folder)
        log(f"{folder.name} is in the cache")


def keep_only(folder: Path, patterns: Sequence[str]) -> None:
    """Drop all below `folder` that no pattern matches; a pattern that matches a folder keeps all that is in it."""
    whole = folder.rename(folder.with_name("whole"))
    matches = [path for pattern in patterns for path in whole.glob(pattern)]
    if not matches:
        raise AgentError(f"nothing matches {', '.join(patterns)}", hint="another version may be laid out differently")
    for path in matches:
        if path.exists():
            target = folder / path.relative_to(whole)
            target.parent.mkdir(parents=True, exist_ok=True)
            path.rename(target)
    shutil.rmtree(whole)


def _unpack(archive: Path, folder: Path) -> None:
    """All files of an npm archive, whose one top folder is left out."""
    with tarfile.open(archive) as packed:
        for member in packed:
            inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or ".." in inside.parts:
                continue
            (folder / inside).parent.mkdir(parents=True, exist_ok=True)
            _extract(packed, member.name, folder / inside)


def _extract(packed: tarfile.TarFile, member: str, target: Path) -> None:
    try:
        source = packed.extractfile(member)
    except KeyError:
        source = None
    if source is None:
        raise AgentError(f"the package has no {member}", hint="another version may be laid out differently")
    with source, target.open("wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    target.chmod(0o755)


def _npm_pack(spec: str, scratch: Path, timeout: float) -> Path:
    run_fetcher([_npm(spec), "pack", "--silent", "--pack-destination", str(scratch), spec], scratch, spec, timeout)
    archives = list(scratch.glob("*.tgz"))
    if not archives:
        raise AgentError(f"npm gave no archive of {spec}", hint=REGISTRY_HINT)
    return archives[0]


def _npm(spec: str) -> str:
    npm = shutil.which("npm")
    if npm is None:
        raise AgentError(f"npm is needed once to fetch {spec}", hint="install Node.js, which brings npm")
    return npm


def _pip(spec: str) -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    uv = shutil.which("uv")
    if uv is None:
        raise AgentError(f"pip or uv is needed once to fetch {spec}", hint="python -m ensurepip")
    return [uv, "pip"]


def run_fetcher(command: Sequence[str], folder: Path, spec: str, timeout: float) -> None:
    """Run a package manager to its end. Raises AgentError with its last output if it fails or takes too long."""
    name = Path(command[0]).name
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise AgentError(f"{name} did not fetch {spec} in {timeout:g} s", hint=REGISTRY_HINT) from error
    if done.returncode != 0:
        output = (done.stderr or done.stdout).strip()[-500:]
        raise AgentError(f"{name} could not fetch {spec}: {output}", hint=REGISTRY_HINT)


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock file against other threads and processes."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
