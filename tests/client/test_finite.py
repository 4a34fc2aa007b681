"""Clients refuse a number that is not finite before they send it."""

import math
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from environments import AsyncScripted, Kit, Script, Watched
from paddock import Client, VectorClient
from paddock.errors import InvalidMessage, PaddockError
from running import Serve

pytestmark = pytest.mark.anyio
WAYS = ["ws", "http", "memory"]


@pytest.fixture(params=WAYS)
async def env(request: Any, serve: Serve) -> AsyncIterator[Client[Any]]:
    made: Any = (
        Client(AsyncScripted)
        if request.param == "memory"
        else Client(serve(AsyncScripted).url, transport=request.param)
    )
    async with made:
        await made.reset()
        yield made


@pytest.mark.parametrize(
    ("action", "field"),
    [
        ({"value": math.nan}, "value"),
        ({"value": {"a": [None, math.inf]}}, "value.a.1"),
        ({"value": np.array([1.0, math.nan])}, "value.1"),
        (Script(value=math.nan), "value"),
        (Script(metadata={"a": math.inf}), "metadata.a"),
    ],
)
async def test_an_action(env: Client[Any], lives: list[Watched], action: Any, field: str) -> None:
    with pytest.raises(InvalidMessage, match=f"{field}: Input should be a finite number"):
        await env.step(action)
    assert lives[0].steps == 0
    assert (await env.step({"value": [None, "NaN"]})).reward is None


async def test_an_argument_of_a_reset(env: Client[Any]) -> None:
    with pytest.raises(InvalidMessage, match="seed"):
        await env.reset(seed=math.nan)


@pytest.mark.parametrize("way", WAYS)
async def test_an_argument_of_a_tool(serve: Serve, lives: list[Watched], way: str) -> None:
    env: Any = Client(Kit) if way == "memory" else Client(serve(Kit).url, transport=way)
    async with env:
        await env.reset()
        with pytest.raises(PaddockError, match="amount: Input should be a finite number"):
            await env.call_tool("add", amount=math.nan)
    assert lives[0].steps == 0


async def test_a_non_finite_action_of_a_vector_affects_only_its_session(serve: Serve) -> None:
    async with VectorClient(serve(AsyncScripted).url, 3) as envs:
        await envs.reset_all()
        first, refused, last = await envs.step_all([{"value": None}, {"value": math.nan}, {"value": 2}])
        assert isinstance(refused, InvalidMessage)
        assert "value: Input should be a finite number" in str(refused)
        assert (first.observation["value"], last.observation["value"]) == (None, 2)  # type: ignore[union-attr]


async def test_a_deadline_may_be_infinite(env: Client[Any]) -> None:
    assert (await env.step({"value": 1}, timeout=math.inf)).done is False
