"""A real model on this machine: an engine in a process of its own, shared by all who use the same weights.

One engine runs for each file of weights and event loop, from its first user to its last. It knows nothing
about where the weights come from.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import tempfile
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING
from weakref import WeakKeyDictionary

from paddock.distribution import install_command
from paddock.errors import ConfigError, ModelError
from paddock.rollouts.processes import process_start_time

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

MODULE = "xllamacpp"
START_SECONDS = 300.0
CONTEXT = 8192
THREADS = 1
"""More threads than idle processors make generation slower, several times over."""


@dataclass(slots=True)
class Engine:
    """A process that serves one file of weights, or the place for it while there is none."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: asyncio.subprocess.Process | None = None
    url: str = ""
    users: int = 0


_ENGINES: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, Engine]] = WeakKeyDictionary()


def check_engine() -> None:
    """Raises ConfigError if no engine is installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise ConfigError("a local model needs an engine", hint=install_command("local"))


@asynccontextmanager
async def open_engine(weights: Path, log: Callable[[str], None]) -> AsyncIterator[str]:
    """The URL of an engine with these weights, while it is entered.

    Raises ModelError if it does not start.
    """
    engine = _ENGINES.setdefault(asyncio.get_running_loop(), {}).setdefault(weights, Engine())
    engine.users += 1
    try:
        async with engine.lock:
            if engine.process is None or is_dead(engine.process):
                engine.process, engine.url = await _start(weights, log)
        yield engine.url
    finally:
        engine.users -= 1
        if engine.users == 0 and engine.process is not None:
            process, engine.process = engine.process, None
            await _end(process)


def is_dead(process: asyncio.subprocess.Process) -> bool:
    """The loop hears of an end a little later than the system knows of it."""
    return process.returncode is not None or process_start_time(process.pid) is None


async def _start(weights: Path, log: Callable[[str], None]) -> tuple[asyncio.subprocess.Process, str]:
    log(f"loading {weights.name}")
    with tempfile.TemporaryFile() as words:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "paddock.rollouts.models.local_server"),
            *("--weights", str(weights), "--parent", str(os.getpid())),
            *("--threads", str(THREADS), "--context", str(CONTEXT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=words,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                url = await _wait_until_ready(process, weights, words)
        except TimeoutError:
            await _end(process)
            raise ModelError(f"{weights.name} was not loaded within {START_SECONDS:g} s") from None
        except BaseException:
            await _end(process)
            raise
    log(f"{weights.name} is loaded")
    return process, url


async def _wait_until_ready(process: asyncio.subprocess.Process, weights: Path, words: IO[bytes]) -> str:
    """The engine tells its address when it has loaded the weights, and answers from then on."""
    assert process.stdout is not None
    while line := await process.stdout.readline():
        if line.startswith(b"http://"):
            return f"{line.decode().strip()}/v1"
    await process.wait()
    words.seek(0)
    last = words.read().decode(errors="replace").strip().rpartition("\n")[2]
    raise ModelError(
        f"the engine ended while loading {weights.name}: {last or f'exit code {process.returncode}'}",
        hint="check that the file is whole and of a kind that llama.cpp knows, and that memory suffices",
    )


async def _end(process: asyncio.subprocess.Process) -> None:
    """It keeps nothing, so there is nothing to wait for but its end."""
    if process.returncode is None:
        process.kill()
    await asyncio.shield(process.wait())
