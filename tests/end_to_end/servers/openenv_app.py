"""Environments written for OpenEnv, served by the framework named on the command line.

Usage: openenv_app.py {openenv,paddock} {counter,echo,tasks,kinds,speaking,whispering} PORT

With `openenv` this is the oracle: what its answers look like is what the wire is.
With `paddock` the same classes run on Paddock, the import of `create_app` being the only change.
"""

import sys
from typing import Any
from uuid import uuid4

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field

GOAL = 10


class Add(Action):
    amount: int = Field(ge=0)


class Total(Observation):
    total: int


class CounterState(State):
    total: int = 0


class Counter(Environment[Add, Total, CounterState]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = CounterState(episode_id=str(uuid4()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Total:
        self._state = CounterState(episode_id=episode_id or str(uuid4()))
        return Total(total=0)

    def step(self, action: Add, timeout_s: float | None = None, **kwargs: Any) -> Total:
        self._state.step_count += 1
        self._state.total += action.amount
        total = self._state.total
        return Total(total=total, reward=float(action.amount), done=total >= GOAL)

    @property
    def state(self) -> CounterState:
        return self._state


class Echo(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("echo")

        @server.tool
        def echo_message(message: str) -> str:
            """Say the message back."""
            return message

        @server.tool
        def echo_with_length(message: str) -> dict[str, Any]:
            """Say the message back, with its length."""
            return {"message": message, "length": len(message)}

        super().__init__(server)
        self._state = State(episode_id=str(uuid4()))

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._state = State(episode_id=episode_id or str(uuid4()))
        return Observation(reward=0.0, metadata={"status": "ready"})

    def step(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return super().step(action, timeout_s=timeout_s, **kwargs)

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        self._state.step_count += 1
        return await super().step_async(action, timeout_s=timeout_s, **kwargs)

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        raise TypeError(f"echo takes tool calls, not {type(action).__name__}")

    @property
    def state(self) -> State:
        return self._state


class CounterWithTasks(Counter):
    """The counter over a dataset: a task names the total to reach."""

    def list_splits(self) -> list[str]:
        return ["train", "hard"]

    def list_tasks(self, split: str) -> list[dict[str, int]]:
        return [{"goal": GOAL}, {"goal": 2 * GOAL}, {"goal": 3 * GOAL}]

    def num_tasks(self, split: str) -> int:
        return len(self.list_tasks(split))

    def get_task(self, split: str, index: int) -> dict[str, int]:
        return self.list_tasks(split)[index]

    def get_task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[dict[str, int]]:
        return self.list_tasks(split)[start:stop]


def main(framework: str, name: str, port: int) -> None:
    if framework == "openenv":
        from openenv.core.env_server import create_app
    else:
        from paddock import create_app
    if name in ("kinds", "speaking", "whispering"):
        import openenv_kinds

        app = create_app(
            getattr(openenv_kinds, name.capitalize()), Action, Observation, env_name=name, max_concurrent_envs=4
        )
    elif name == "echo":
        app = create_app(Echo, CallToolAction, CallToolObservation, env_name=name, max_concurrent_envs=4)
    else:
        environment = {"counter": Counter, "tasks": CounterWithTasks}[name]
        app = create_app(environment, Add, Total, env_name=name, max_concurrent_envs=4, state_cls=CounterState)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
