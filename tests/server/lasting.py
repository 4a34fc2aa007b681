"""Environments whose steps outlast a server that has been told to end. Served by the tests of that end."""

import asyncio
import time
from pathlib import Path

from paddock import Action, Environment, Observation, State


class Lasting(Environment[Action, Observation, State]):
    """Sleeps in a step on one of the server's threads, and notes its close in the present folder."""

    concurrent_sessions = True

    def reset(self, *, seed: int | None = None, episode_id: str | None = None) -> Observation:
        return Observation()

    def step(self, action: Action) -> Observation:
        time.sleep(30)
        return Observation()

    def close(self) -> None:
        with Path("closed").open("a") as closed:
            closed.write("x")


class Stubborn(Lasting):
    """Does not let itself be cancelled."""

    async def step_async(self, action: Action) -> Observation:
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue
        return Observation()


class OnAnotherThread(Lasting):
    """Waits for a thread that nobody can end."""

    async def step_async(self, action: Action) -> Observation:
        await asyncio.to_thread(time.sleep, 30)
        return Observation()
