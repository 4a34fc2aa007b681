"""The client for code that is not async: the same methods on a loop thread of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from paddock.client.client import Client
from paddock.errors import ClientError
from paddock.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from paddock.types import CallResult, StepResult, ToolInfo

T = TypeVar("T")
ObservationT = TypeVar("ObservationT")


class SyncClient(Generic[ObservationT]):
    """Like `Client`, without `await`. Use it in `with`, or call `close` when done.

    One that is never closed is closed when it is garbage-collected, or when the process ends.
    """

    def __init__(self, target: str | Callable[[], Any], **options: Any) -> None:
        self._client: Client[ObservationT] = Client(target, **options)
        self._thread = LoopThread("paddock-client", cleanup=self._client.close)
        self._closed = False

    @classmethod
    def connect(cls, target: str | Callable[[], Any], **options: Any) -> Self:
        """A client that is connected already. Raises ConnectFailed."""
        return cls(target, **options).__enter__()

    def __repr__(self) -> str:
        return f"<SyncClient of {self._client!r}>"

    def __enter__(self) -> Self:
        self._closed = False
        try:
            self._call(self._client.__aenter__)
        except BaseException:
            self._thread.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: Callable[..., Awaitable[T]], /, *arguments: Any, **keywords: Any) -> T:
        if self._closed:
            raise ClientError("the client is closed", hint="make a new one")
        return self._thread.call(method, *arguments, **keywords)

    def reset(self, /, *, timeout: float | None = None, **arguments: Any) -> StepResult[ObservationT]:
        """Begin a new episode. If the session was lost, a new one is opened. Raises what `step` raises."""
        return self._call(self._client.reset, timeout=timeout, **arguments)

    def step(self, action: Any, *, timeout: float | None = None) -> StepResult[ObservationT]:
        """Apply an action, which is a dict or an action model.

        Raises InvalidMessage for an action that does not fit (it was not executed), EnvironmentFailure if the
        environment failed, EpisodeLost if the connection dropped and the session could not be resumed.
        """
        return self._call(self._client.step, action, timeout=timeout)

    def state(self, *, timeout: float | None = None) -> Any:
        """The state of the episode, as a dict or the `state` model. Raises InvalidMessage if it does not fit."""
        return self._call(self._client.state, timeout=timeout)

    def tools(self, *, timeout: float | None = None) -> list[ToolInfo]:
        """The tools of the environment."""
        return self._call(self._client.tools, timeout=timeout)

    def call_tool(self, name: str, /, **arguments: Any) -> CallResult:
        """Call a tool. Returns its value, its reward, and whether it ended the episode.

        All keywords are arguments of the tool, so there is no `timeout`: the deadline is `timeouts.request`. Raises
        ToolFailure if the call failed, SessionError if the session accepts no calls, and what `step` raises.
        """
        return self._call(self._client.call_tool, name, **arguments)

    def schema(self) -> dict[str, Any]:
        """JSON Schemas of the environment's action, observation and state."""
        return self._call(self._client.schema)

    def metadata(self) -> dict[str, Any]:
        """Name, version and description of the environment."""
        return self._call(self._client.metadata)

    def close(self) -> None:
        """End the session and the loop thread. In a forked child both are the parent's, and stay as they are."""
        self._closed = True
        self._thread.close()
