"""Ctrl-C while a command starts.

The rule: no signal raises an exception while modules are imported. A KeyboardInterrupt during the import of an
extension module leaves the module half initialised, which can end in a segmentation fault. One in a callback of the
import system is swallowed. Before a command does its work there is nothing to clean up, so the process exits at once.
SIGTERM does that by default.

Every command starts with `exit_on_interrupt`. A command that has something to clean up imports what it needs, then
works in `run_async` or `interruptible`, or serves after `raise_on_interrupt`. In a running event loop an import is
safe: there Ctrl-C cancels a task and raises nothing.
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
    """From now on Ctrl-C ends the process, without unwinding. A process that ignores SIGINT still ignores it."""
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def raise_on_interrupt() -> None:
    """Ctrl-C raises KeyboardInterrupt again; `asyncio.run` turns it into a cancellation."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_async(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run`, which Ctrl-C and SIGTERM cancel."""
    import asyncio

    with interruptible():
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            work = _cancel_on_sigterm(work)
        return asyncio.run(work)


async def _cancel_on_sigterm(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """`asyncio.run` does this only for SIGINT. An exception in any line would skip what it should clean up."""
    import asyncio

    task = asyncio.ensure_future(work)
    if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside, Ctrl-C and SIGTERM raise KeyboardInterrupt. Outside, they end the process again."""
    handler = signal.getsignal(signal.SIGINT)
    if handler not in (_exit, signal.SIG_IGN) or threading.current_thread() is not threading.main_thread():
        yield
        return
    with restored_handlers():
        raise_on_interrupt()
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # A background job of a script ignores SIGINT.
            is_ignored = handler is signal.SIG_IGN
            signal.signal(signal.SIGTERM, signal.default_int_handler if is_ignored else _send_interrupt)
        yield


@contextmanager
def restored_handlers() -> Iterator[None]:
    """Restore the signal handlers. An event loop with handlers of its own does not restore them when it closes."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send_interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def _exit(*_: Any) -> None:
    os.write(2, b"error: interrupted\n")
    os._exit(INTERRUPTED)
