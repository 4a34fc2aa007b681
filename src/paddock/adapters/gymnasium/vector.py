"""Many served episodes as one `gymnasium.vector.VectorEnv`: one frame on the wire carries the steps of all.

An episode that ended begins anew with the next step, whose action is passed by: Gymnasium's NEXT_STEP mode.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from paddock.adapters.gymnasium import spaces
from paddock.adapters.gymnasium.remote import published
from paddock.client.client import Client
from paddock.client.sync import LoopThread
from paddock.client.vector import VectorClient
from paddock.errors import PaddockError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.types import StepResult


class RemoteVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` sessions at `url`. Takes the options of `paddock.VectorClient`. A session that fails raises."""

    def __init__(self, url: str, num_envs: int, **options: Any) -> None:
        self._vector = VectorClient(url, num_envs, **options)
        self._thread = LoopThread()
        self._portal = self._thread.portal
        # One that is never closed ends with its program.
        self._forgotten = finalize(self, self._thread.leave, self._vector.close)
        try:
            schema = self._portal.call(_schema, url, options.get("token"))
            self.single_action_space, self.single_observation_space, _ = published(schema, url)
            self._portal.call(self._vector.open)
        except BaseException:
            self._end()
            raise
        self.num_envs = num_envs
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
        self._ended = numpy.zeros(num_envs, dtype=numpy.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        seeds = [None if seed is None else seed + i for i in range(self.num_envs)] if _is_one(seed) else list(seed)  # type: ignore[operator, arg-type]
        given = {"options": options} if options is not None else {}
        arguments = {i: {**given, **({} if own is None else {"seed": own})} for i, own in enumerate(seeds)}
        self._ended[:] = False
        results = _checked(self._portal.call(self._vector.reset, arguments))
        return self._gather(results)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ended = self._ended
        taken = enumerate(iterate(self.action_space, actions))
        stepped = {
            i: {"action": spaces.offer(self.single_action_space, action)} for i, action in taken if not ended[i]
        }
        begun: dict[int, dict[str, Any]] = {int(i): {} for i in numpy.flatnonzero(ended)}
        results = _checked(self._portal.call(_both, self._vector, stepped, begun))
        observations, infos = self._gather(results)
        rewards = numpy.array([float(result.reward or 0.0) for result in results], dtype=numpy.float64)
        terminated, truncated = (
            numpy.array([bool(result.observation[name]) for result in results], dtype=numpy.bool_)
            for name in ("terminated", "truncated")
        )
        self._ended = terminated | truncated
        return observations, rewards, terminated, truncated, infos

    def close_extras(self, **_: Any) -> None:
        try:
            self._portal.call(self._vector.close)
        finally:
            self._end()

    def _end(self) -> None:
        self._forgotten.detach()
        self._thread.end()

    def _gather(self, results: list[StepResult[Any]]) -> tuple[Any, dict[str, Any]]:
        values = [
            spaces.restore(self.single_observation_space, result.observation["observation"]) for result in results
        ]
        empty: Any = create_empty_array(self.single_observation_space, self.num_envs)
        infos: dict[str, Any] = {}
        for i, result in enumerate(results):
            infos = self._add_info(infos, result.observation["info"], i)
        return concatenate(self.single_observation_space, values, empty), infos


async def _schema(url: str, token: str | None) -> dict[str, Any]:
    client: Client[Any] = Client(url, token=token)
    try:
        return await client.schema()
    finally:
        await client.close()


async def _both(
    vector: VectorClient, stepped: dict[int, dict[str, Any]], begun: dict[int, dict[str, Any]]
) -> list[Any]:
    """Step some sessions and begin others anew, at once; results in the order of the sessions."""
    found = await asyncio.gather(vector.step(stepped), vector.reset(begun))
    named = {**dict(zip(stepped, found[0], strict=True)), **dict(zip(begun, found[1], strict=True))}
    return [named[i] for i in sorted(named)]


def _checked(results: list[Any]) -> list[StepResult[Any]]:
    for result in results:
        if isinstance(result, PaddockError):
            raise result
    return results


def _is_one(seed: Any) -> bool:
    return seed is None or isinstance(seed, int | numpy.integer)
