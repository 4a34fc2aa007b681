# mypy: disable-error-code="import-not-found,misc,untyped-decorator"
"""The environments that OpenEnv serves in the benchmarks, as its documentation says to.

Runs in OpenEnv's own virtual environment: `python -m bench.openenv_app counter --port 8000`.
Every other setting of the server is uvicorn's default.
"""

import argparse
import os
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import uvicorn
from fastapi import FastAPI
from fastmcp import FastMCP
from openenv.core.env_server import (
    Action,
    CallToolAction,
    CallToolObservation,
    Environment,
    MCPEnvironment,
    Observation,
    State,
    create_app,
)
from pydantic import Field

from bench.work import burn, sleep

EPISODE_TOTAL = 10


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class Counter(Environment[Add, Total, State]):
    """Adds up."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._total = 0
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        self._total = 0
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Total(total=0)

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self._total += action.amount
        self._state.step_count += 1
        return Total(total=self._total, reward=action.amount, done=self._total >= EPISODE_TOTAL)

    @property
    def state(self) -> State:
        return self._state


class SleepCounter(Counter):
    """Waits 5 ms in every step."""

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        sleep()
        return super().step(action)


class BusyCounter(Counter):
    """Computes for about 200 us in every step."""

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        burn()
        return super().step(action)


class Echo(MCPEnvironment):
    """Offers two tools that repeat a message."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        tools = FastMCP("echo")

        @tools.tool
        def echo_message(message: str) -> str:
            """Repeat the message."""
            return message

        @tools.tool
        def echo_with_length(message: str) -> dict[str, Any]:
            """Repeat the message and tell its length."""
            return {"message": message, "length": len(message)}

        super().__init__(tools)
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()), step_count=0)
        return Observation(done=False, reward=0.0)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise ValueError(f"{type(action).__name__} is not a tool call")

    @property
    def state(self) -> State:
        return self._state


ENVIRONMENTS: dict[str, tuple[Callable[[], Any], type[Any], type[Any]]] = {
    "counter": (Counter, Add, Total),
    "sleep": (SleepCounter, Add, Total),
    "busy": (BusyCounter, Add, Total),
    "echo": (Echo, CallToolAction, CallToolObservation),
}


def build() -> FastAPI:
    """Build the app that the variables set by `main` name; uvicorn's workers call this."""
    name = os.environ["BENCH_ENVIRONMENT"]
    environment, action, observation = ENVIRONMENTS[name]
    return create_app(
        environment,
        action,
        observation,
        env_name=name,
        max_concurrent_envs=int(os.environ["BENCH_MAX_SESSIONS"]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("environment", choices=sorted(ENVIRONMENTS))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-sessions", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    os.environ["BENCH_ENVIRONMENT"] = options.environment
    os.environ["BENCH_MAX_SESSIONS"] = str(options.max_sessions)
    if options.workers == 1:
        uvicorn.run(build(), host=options.host, port=options.port)
    else:
        uvicorn.run(
            "bench.openenv_app:build",
            factory=True,
            host=options.host,
            port=options.port,
            workers=options.workers,
        )


if __name__ == "__main__":
    main()
