"""Agent programs on this machine: fetched once, kept by version, used offline afterwards.

A version is either whole in the cache or not there: it is prepared in a folder beside it and renamed
into place, under a lock, so that rollouts that start together fetch it once.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import platform
import shutil
import tarfile
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.errors import AgentError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def agents_folder() -> Path:
    """Where agent programs are kept: `PADDOCK_AGENTS`, or `agents` in Paddock's cache folder.

    Root's own home is closed to the user that its sandboxes run as; what lies there takes longer to show them.
    """
    chosen = os.environ.get("PADDOCK_AGENTS")
    if chosen:
        return Path(chosen)
    cache = os.environ.get("XDG_CACHE_HOME") or ("/var/cache" if os.geteuid() == 0 else Path.home() / ".cache")
    return Path(cache) / "paddock" / "agents"


async def fetch_npm_binary(
    package: str, version: str, member: str, log: Callable[[str], None], *, timeout: float
) -> Path:
    """The folder that holds the one file `member` of an npm package, fetched if it is not there yet.

    Only the package's archive is taken: none of its scripts run, and nothing it depends on comes along.
    """
    folder = agents_folder() / f"{package.removeprefix('@').replace('/', '-')}-{version}"
    program = folder / Path(member).name
    if not program.exists():
        await asyncio.to_thread(_fetch, package, version, member, folder, log, timeout)
    return folder


def npm_platform() -> str:
    """How npm packages with binaries name this machine, as in `linux-x64`."""
    machine = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine().lower())
    if machine is None:
        raise AgentError(f"there is no build for {platform.machine()}", hint="x86_64 and arm64 machines work")
    return f"{platform.system().lower()}-{machine}"


def has_avx2() -> bool:
    """Whether this processor has what newer builds need; one that cannot be asked is taken for new."""
    try:
        return " avx2 " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return True


def _fetch(package: str, version: str, member: str, folder: Path, log: Callable[[str], None], timeout: float) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one(folder.parent / f".{folder.name}.lock"):
        if (folder / Path(member).name).exists():
            return
        log(f"fetching {package} {version}")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            archive = _npm_pack(f"{package}@{version}", Path(scratch), timeout)
            ready = Path(scratch) / "ready"
            ready.mkdir()
            with tarfile.open(archive) as packed:
                _extract(packed, f"package/{member}", ready / Path(member).name)
            shutil.rmtree(folder, ignore_errors=True)
            ready.rename(folder)
        log(f"{package} {version} is in the cache")


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
    import subprocess

    npm = shutil.which("npm")
    if npm is None:
        raise AgentError(f"npm is needed once to fetch {spec}", hint="install Node.js, which brings npm")
    command = [npm, "pack", "--silent", "--pack-destination", str(scratch), spec]
    try:
        done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired as error:
        raise AgentError(f"npm did not fetch {spec} in {timeout:g} s", hint="is the registry reachable?") from error
    archives = list(scratch.glob("*.tgz"))
    if done.returncode != 0 or not archives:
        words = (done.stderr or done.stdout).strip()[-500:]
        raise AgentError(f"npm could not fetch {spec}: {words}", hint="is the registry reachable?")
    return archives[0]


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Hold a lock file against other threads and processes."""
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
