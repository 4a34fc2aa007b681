"""Ctrl-C while a command starts.

The rule: no signal raises an exception while modules are imported. A KeyboardInterrupt in the import of an extension
module leaves it half made, which can end in a segmentation fault, and one in a callback of the import system is
swallowed. Before a command works there is nothing to put away, so the process ends at once; SIGTERM does by default.

So every command starts with `exit_on_interrupt`. One that has something to put away imports what it needs, and then
works in `run_async` or `interruptible`, or serves after `raise_on_interrupt`. In a running event loop an import is
safe: there Ctrl-C cancels a task, and raises nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

ResultT = TypeVar("ResultT")

INTERRUPTED = 130


def exit_on_interrupt() -> None:
    """From now on Ctrl-C ends the process, without unwinding. A process that ignores it goes on doing so."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Ctrl-C raises KeyboardInterrupt again, and `asyncio.run` cancels its work for it."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, which Ctrl-C and SIGTERM cancel."""
    import asyncio

    with interruptible():
        return asyncio.run(work)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C and SIGTERM raise KeyboardInterrupt inside. Outside they end the process at once, if they did before."""
    if signal.getsignal(signal.SIGINT) is not _exit:
        yield
        return
    with restored_handlers():
        raise_on_interrupt()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
        yield


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Puts back what was there, which a loop with signal handlers of its own does not do when it is closed."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(*_: Any) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
