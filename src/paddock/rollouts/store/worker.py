"""A thread that does one thing after another for async callers. Knows nothing of the store."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Worker:
    """The thread starts with the first job and ends with `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], Result]) -> Result:
        """Do `work` after all that was given before. A cancelled caller leaves at once; the work is
        still done, and a failure that nobody waits for is logged.

        Raises RuntimeError after `close`."""
        loop = asyncio.get_running_loop()
        told: asyncio.Future[Result] = loop.create_future()

        def tell(job: Future[Result]) -> None:
            error = job.exception()
            if told.cancelled():
                _log_failure(error)
            elif error is not None:
                told.set_exception(error)
            else:
                told.set_result(job.result())

        def hand_over(job: Future[Result]) -> None:
            try:
                loop.call_soon_threadsafe(tell, job)
            except RuntimeError:
                # The loop is closed, so nobody waits any more.
                _log_failure(job.exception())

        self._threads.submit(work).add_done_callback(hand_over)
        return await told

    def close(self) -> None:
        """Take no more work, and wait for what was given."""
        inside = threading.current_thread().name.startswith(self._name)
        self._threads.shutdown(wait=not inside)


def _log_failure(error: BaseException | None) -> None:
    if error is not None:
        logger.warning("failed after the caller had left: %s", error, exc_info=error)
