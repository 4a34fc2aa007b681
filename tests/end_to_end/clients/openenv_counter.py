"""The counter through OpenEnv's own clients. Usage: openenv_counter.py URL"""

import asyncio
import time
from typing import Any

from openenv.core import EnvClient, GenericEnvClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.types import Action, Observation, State
from report import report

SLOTS = 4
PATIENCE_SECONDS = 20.0


class Add(Action):
    amount: int


class Total(Observation):
    total: int


class CounterState(State):
    total: int


class CounterClient(EnvClient[Add, Total, CounterState]):
    def _step_payload(self, action: Add) -> dict[str, Any]:
        return {"amount": action.amount}

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[Total]:
        outcome = {"reward": payload["reward"], "done": payload["done"]}
        return StepResult(observation=Total(**payload["observation"], **outcome), **outcome)

    def _parse_state(self, payload: dict[str, Any]) -> CounterState:
        return CounterState(**payload)


def plain(result: StepResult[Any]) -> dict[str, Any]:
    return {"observation": result.observation, "reward": result.reward, "done": result.done}


async def generic_async(url: str) -> Any:
    async with GenericEnvClient(base_url=url) as env:
        reset = await env.reset(seed=1, episode_id="mine")
        steps = [await env.step({"amount": amount}) for amount in (3, 4, 5)]
        return {"reset": plain(reset), "steps": [plain(step) for step in steps], "state": await env.state()}


def generic_sync(url: str) -> Any:
    with GenericEnvClient(base_url=url).sync() as env:
        reset = env.reset(seed=1, episode_id="mine")
        steps = [env.step({"amount": amount}) for amount in (3, 4, 5)]
        return {"reset": plain(reset), "steps": [plain(step) for step in steps], "state": env.state()}


async def typed(url: str) -> Any:
    async with CounterClient(base_url=url) as env:
        first = await env.reset()
        last = await env.step(Add(amount=12))
        state = await env.state()
        return [first.observation.total, last.observation.total, last.reward, last.done, state.total]


async def two_at_once(url: str) -> Any:
    async with GenericEnvClient(base_url=url) as one, GenericEnvClient(base_url=url) as two:
        await asyncio.gather(one.reset(episode_id="one"), two.reset(episode_id="two"))
        await asyncio.gather(one.step({"amount": 1}), two.step({"amount": 2}))
        await asyncio.gather(one.step({"amount": 3}), two.step({"amount": 4}))
        return [await one.state(), await two.state()]


async def refused_action(url: str) -> Any:
    async with GenericEnvClient(base_url=url) as env:
        await env.reset()
        await env.step({"amount": 2})
        try:
            await env.step({"amount": -1})
            refusal = None
        except RuntimeError as error:
            refusal = str(error)
        return {"refusal": refusal, "total_after": (await env.step({"amount": 1})).observation["total"]}


async def no_free_slot(url: str) -> Any:
    holders = [await seated(url) for _ in range(SLOTS)]
    try:
        async with GenericEnvClient(base_url=url) as env:
            await env.reset()
            refusal = None
    except RuntimeError as error:
        refusal = str(error)
    await holders.pop().close()
    latecomer = await seated(url)
    step = await latecomer.step({"amount": 3})
    for env in [*holders, latecomer]:
        await env.close()
    return {"refusal": refusal, "latecomer": plain(step)}


async def seated(url: str) -> GenericEnvClient:
    """A client that has a session, tried again until a slot is free."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        env = GenericEnvClient(base_url=url)
        try:
            await env.connect()
            await env.reset()
            return env
        except RuntimeError:
            await env.close()
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.05)


report(generic_async, generic_sync, typed, two_at_once, refused_action, no_free_slot)
