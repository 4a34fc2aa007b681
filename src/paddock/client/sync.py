"""The client for code that is not async: the same methods on a loop thread of its own."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from paddock.client.client import Client

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.types import StepResult, ToolInfo

ObservationT = TypeVar("ObservationT")


class SyncClient(Generic[ObservationT]):
    """Like `Client`, without `await`. Use it in `with`, or call `close` when done."""

    def __init__(self, target: str | Callable[[], Any], **options: Any) -> None:
        self._client: Client[ObservationT] = Client(target, **options)
        self._stack = ExitStack()
        self._started: BlockingPortal | None = None

    @classmethod
    def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """A client that is connected already. Raises ConnectFailed."""
        return cls(target, **options).__enter__()

    def __enter__(self) -> Self:
        try:
            self._portal.call(self._client.__aenter__)
        except BaseException:
            self._started = None
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _portal(self) -> BlockingPortal:
        if self._started is None:
            self._started = self._stack.enter_context(start_blocking_portal("asyncio"))
        return self._started

    def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        return self._portal.call(partial(self._client.reset, timeout=timeout, **arguments))

    def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        return self._portal.call(partial(self._client.step, action, timeout=timeout))

    def state(self, *, timeout: float | None = None) -> Any:
        return self._portal.call(partial(self._client.state, timeout=timeout))

    def tools(self, *, timeout: float | None = None) -> list[ToolInfo]:
        return self._portal.call(partial(self._client.tools, timeout=timeout))

    def call_tool(self, name: str, /, **arguments: Any) -> Any:
        return self._portal.call(partial(self._client.call_tool, name, **arguments))

    def schema(self) -> dict[str, Any]:
        return self._portal.call(self._client.schema)

    def metadata(self) -> dict[str, Any]:
        return self._portal.call(self._client.metadata)

    def close(self) -> None:
        """End the session and the loop thread."""
        if self._started is not None:
            try:
                self._started.call(self._client.close)
            finally:
                self._started = None
                self._stack.close()
