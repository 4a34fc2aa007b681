"""`paddock doctor`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paddock.cli import counted, note, print_json
from paddock.cli.interrupts import run_async
from paddock.cli.shadow import find_shadow, version_of
from paddock.distribution import NAME, VERSION
from paddock.distribution import install_command as from_extra
from paddock.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["ok", "missing", "problem"]
MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "missing": ("–", "yellow"),
    "problem": ("✗", "red"),
}

GIBIBYTE = 1024**3
OLDEST_PYTHON = (3, 11)
DEFAULT_PORT = 8000
FEW_FILES, MANY_FILES = 256, 8192
LITTLE_DISK = GIBIBYTE
LITTLE_MEMORY = GIBIBYTE // 2
PATIENCE = 10.0

EXTRAS = {
    "aiohttp": "rollouts",
    "xllamacpp": "the local model",
    "gymnasium": "Gymnasium's environments",
    "ray": "clusters",
    "e2b": "E2B's sandboxes",
    "pyarrow": "Parquet files",
    "logfire": "hosted telemetry",
}
# User, mount, process and network namespaces at once, as a sandbox needs them. Some systems grant
# the first and then refuse the others.
UNSHARE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
failed = libc.unshare(0x10000000 | 0x00020000 | 0x20000000 | 0x40000000)
sys.exit(os.strerror(ctypes.get_errno()) if failed else 0)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `missing` is optional; only a `problem` stands in the way."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


@click.command("doctor")
@click.option("--clean", is_flag=True, help="End what a killed Paddock left behind: sandboxes and open rollouts.")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(clean: bool, store: Path | None, as_json: bool) -> int:
    """Tell what this machine has and lacks. Ends with 1 if something stands in the way."""
    if clean:
        return clean_up(store, as_json)
    findings = examine()
    problems = sum(finding.status == "problem" for finding in findings)
    if as_json:
        print_json({"ok": not problems, "findings": [asdict(finding) for finding in findings]})
    else:
        print_table(findings)
        missing = sum(finding.status == "missing" for finding in findings)
        note(f"{problems} problem{'s' * (problems != 1)}, {missing} optional things missing")
    return 1 if problems else 0


def clean_up(store: Path | None, as_json: bool) -> int:
    """Give every rollout whose process is dead its outcome, and end the sandboxes it left running."""
    from contextlib import closing

    from paddock.rollouts.ledger import recover
    from paddock.rollouts.store import Store

    with closing(Store.open(store)) as kept:
        recovery = recover(kept)
        place = str(kept.path)
    found = {"store": place, "rollouts": recovery.rollouts, "sandboxes": recovery.sandboxes}
    if as_json:
        print_json(found)
    else:
        closed = counted(len(recovery.rollouts), "rollout")
        ended = counted(len(recovery.sandboxes), "sandbox", "sandboxes")
        note(f"{place}: {closed} closed, {ended} ended")
    return 0


def examine() -> list[Finding]:
    return [
        *(look() for look in BASICS),
        *(extra(name, use) for name, use in EXTRAS.items()),
        *(look() for look in PROGRAMS),
    ]


# -- Python -------------------------------------------------------------------------------------------


def python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Finding("python", "problem", version, "Paddock needs Python 3.11 or later")
    return Finding("python", "ok", f"{version} ({platform.python_implementation()}, {platform.platform(terse=True)})")


def paddock() -> Finding:
    """Our own package, unless a foreign one of the same name is imported in its place."""
    shadow = find_shadow()
    if shadow is not None:
        problem, hint = shadow
        return Finding("paddock", "problem", f"{VERSION}, but {problem}", hint)
    return Finding("paddock", "ok", VERSION)


def uvloop() -> Finding:
    version = version_of("uvloop")
    if version is None:
        return Finding("uvloop", "missing", "not installed: the server is slower", "pip install uvloop")
    return Finding("uvloop", "ok", version)


def httptools() -> Finding:
    return required("httptools", "the server cannot read HTTP")


def picows() -> Finding:
    return required("picows", "there are no WebSockets")


def required(name: str, otherwise: str) -> Finding:
    version = version_of(name)
    if version is None:
        return Finding(name, "problem", f"not installed: {otherwise}", f"pip install {name}")
    return Finding(name, "ok", version)


def extra(name: str, use: str) -> Finding:
    version = version_of(name)
    if version is not None:
        return Finding(name, "ok", version)
    return Finding(name, "missing", f"not installed: {use}", install_command(name))


def install_command(name: str) -> str:
    """The smallest extra that brings it if Paddock has one, else the package itself."""
    try:
        wanted = importlib.metadata.requires(NAME) or []
    except importlib.metadata.PackageNotFoundError:
        wanted = []
    found = (re.match(r"([\w.-]+).*extra == [\"'](\w+)[\"']", line) for line in wanted)
    pairs = [(match[1], match[2]) for match in found if match and match[2] != "dev"]
    sizes = Counter(extra for _, extra in pairs)
    bringing = [extra for package, extra in pairs if package == name]
    # `fleet` is another name for `rollouts`, and has its size.
    known = min(bringing, key=lambda extra: (sizes[extra], extra == "fleet"), default=None)
    return from_extra(known) if known else f"pip install {name}"


# -- the machine --------------------------------------------------------------------------------------


def port() -> Finding:
    name = f"port {DEFAULT_PORT}"
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", DEFAULT_PORT))
        except OSError as error:
            hint = "serve on another one: paddock serve --port 0 takes any that is free"
            return Finding(name, "missing", f"taken ({error.strerror})", hint)
    return Finding(name, "ok", "free")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    detail = f"{limit(soft)} (at most {limit(hard)})"
    if soft == resource.RLIM_INFINITY or soft >= MANY_FILES:
        return Finding("open files", "ok", detail)
    status: Status = "problem" if soft < FEW_FILES else "missing"
    wanted = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
    hint = f"each session takes one or more: `ulimit -n {wanted}` before you serve thousands"
    return Finding("open files", status, f"{detail}: enough for about {max(0, soft - 64)} sessions", hint)


def limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def cpus() -> Finding:
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    advice = f"paddock serve --workers {count} uses them all" if count > 1 else None
    return Finding("processors", "ok", str(count), advice)


def memory() -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    granted = min([total, *cgroup_memory()])
    available = min(granted, available_memory() or granted)
    detail = f"{gibibytes(available)} free of {gibibytes(granted)}"
    if available < LITTLE_MEMORY:
        return Finding("memory", "problem", detail, "end something else first: environments will be killed")
    return Finding("memory", "ok", detail)


def available_memory() -> int | None:
    """What the kernel says could be used without swapping."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(found[1]) * 1024 if found else None


def cgroup_memory() -> list[int]:
    """What a container is granted, if it is limited."""
    places = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    texts = [Path(place).read_text().strip() for place in places if Path(place).is_file()]
    return [int(text) for text in texts if text.isdigit()]


def disk() -> Finding:
    free = {place: shutil.disk_usage(place).free for place in (str(Path.cwd()), tempfile.gettempdir())}
    detail = ", ".join(f"{gibibytes(size)} free in {place}" for place, size in free.items())
    if min(free.values()) < LITTLE_DISK:
        return Finding("disk", "problem", detail, "make room: less than 1 GiB is left")
    return Finding("disk", "ok", detail)


def gibibytes(size: int) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"


# -- programs -----------------------------------------------------------------------------------------


def bubblewrap() -> Finding:
    from paddock.rollouts.sandbox.programs import find_bwrap

    try:
        path = find_bwrap()
    except SandboxError as error:
        return Finding("bubblewrap", "missing", error.message, error.hint)
    return Finding("bubblewrap", "ok", f"{first_line([str(path), '--version'])} ({path})")


def sandbox() -> Finding:
    """Whether a sandbox really starts here; what else was found does not tell."""
    try:
        from paddock.rollouts.sandbox import available
    except ImportError as error:
        return Finding("sandbox", "missing", f"needs {error.name}", from_extra("rollouts"))
    problem = available("bwrap")
    if problem is None:
        return Finding("sandbox", "ok", "bwrap starts")
    return Finding("sandbox", "missing", problem, "rollouts need it, or --sandbox process --unsafe")


def container_engine() -> Finding:
    """Whether an engine answers; sandboxes in containers need one, and no package."""
    import asyncio

    name = "container engine"
    try:
        from paddock.rollouts.sandbox.engine import Engine
    except ImportError as error:
        return Finding(name, "missing", f"needs {error.name}", from_extra("rollouts"))

    async def ask() -> str:
        async with asyncio.timeout(PATIENCE), Engine() as engine:
            return f"{engine.name or 'answers'}, API {engine.version} ({engine.address})"

    try:
        return Finding(name, "ok", run_async(ask()))
    except (SandboxError, TimeoutError) as error:
        hint = error.hint if isinstance(error, SandboxError) else None
        return Finding(name, "missing", f"{error or 'it does not answer'}: no --sandbox docker", hint)


def e2b_service() -> Finding:
    """Whether E2B's SDK would know where to go. Nobody is asked: that would make a sandbox, which costs."""
    where = os.environ.get("E2B_API_URL") or os.environ.get("E2B_DOMAIN") or "e2b.app"
    if not os.environ.get("E2B_API_KEY"):
        hint = "set it for E2B's cloud, or run a server of your own: paddock e2b up"
        return Finding("e2b service", "missing", "E2B_API_KEY is not set: no --sandbox e2b", hint)
    return Finding("e2b service", "ok", f"there is a key for {where}")


def opencode() -> Finding:
    from paddock.rollouts.agents.install import agents_folder
    from paddock.rollouts.agents.opencode import OpenCode

    version = OpenCode.version
    kept = list(agents_folder().glob(f"opencode-*-{version}/opencode"))
    if os.environ.get("PADDOCK_OPENCODE"):
        return Finding("opencode", "ok", f"{os.environ['PADDOCK_OPENCODE']} (PADDOCK_OPENCODE)")
    if kept:
        return Finding("opencode", "ok", f"{version} ({kept[0]})")
    return Finding("opencode", "missing", f"{version} is not in the cache", "the first rollout fetches it with npm")


def user_namespaces() -> Finding:
    name = "user namespaces"
    if sys.platform != "linux":
        return Finding(name, "missing", f"{sys.platform} has none", "sandboxes with bubblewrap need Linux")
    tried = subprocess.run(
        [sys.executable, "-I", "-c", UNSHARE], capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if tried.returncode == 0:
        return Finding(name, "ok", "usable")
    reason = tried.stderr.strip() or f"exit code {tried.returncode}"
    hint = (
        "bubblewrap needs them: allow them with sysctl (kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or start the container with less confinement"
    )
    return Finding(name, "missing", f"refused: {reason}", hint)


def node() -> Finding:
    return program("node")


def npm() -> Finding:
    return program("npm")


def program(name: str) -> Finding:
    path = shutil.which(name)
    if path is None:
        hint = "install Node.js 20 or later to run coding agents"
        return Finding(name, "missing", "not found: coding agents written for Node cannot run", hint)
    return Finding(name, "ok", f"{first_line([path, '--version'])} ({path})")


def first_line(command: list[str]) -> str:
    """What a program says first, or that it says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {type(error).__name__}"
    return (done.stdout or done.stderr).strip().partition("\n")[0] or "says nothing"


BASICS: tuple[Callable[[], Finding], ...] = (
    python, paddock, uvloop, httptools, picows, port, open_files, cpus, memory, disk,
)  # fmt: skip
PROGRAMS: tuple[Callable[[], Finding], ...] = (
    bubblewrap, user_namespaces, sandbox, container_engine, e2b_service, node, npm, opencode,
)  # fmt: skip


def print_table(findings: list[Finding]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        mark, colour = MARKS[finding.status]
        detail = Text(finding.detail)
        if finding.hint:
            detail.append("\nhint: ", style="cyan").append(finding.hint)
        table.add_row(Text(mark, style=colour), finding.name, Text(finding.status, style=colour), detail)
    Console().print(table)
