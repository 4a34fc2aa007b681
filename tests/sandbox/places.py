"""Opens sandboxes for tests, and looks at what they leave behind."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paddock.limits import MEBIBYTE, SandboxLimits
from paddock.sandbox import SandboxSpec, available, open_sandbox

LIMITS = SandboxLimits(disk_bytes=32 * MEBIBYTE)
SPEC = SandboxSpec(LIMITS)
BWRAP_MISSING = available("bwrap")
needs_bwrap = pytest.mark.skipif(BWRAP_MISSING is not None, reason=str(BWRAP_MISSING))
both = pytest.mark.parametrize("backend", [pytest.param("bwrap", marks=needs_bwrap), "process"])


async def opened(backend: str, spec: SandboxSpec = SPEC, **options: Any) -> Any:
    return await open_sandbox(backend, spec, consent=True, **options)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(holds: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
