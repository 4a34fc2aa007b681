"""Served environments behind Gymnasium's interfaces: `RemoteEnv` is a `gymnasium.Env`, `RemoteVectorEnv` a vector.

Spaces and values are the same as on the server. One frame carries the steps of a whole vector. An episode of a vector
that ended begins anew with the next step, whose action is ignored: Gymnasium's NEXT_STEP mode.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import gymnasium
import numpy
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array, iterate

from paddock.adapters.gymnasium import spaces
from paddock.adapters.gymnasium.environment import METADATA, SPACE, pixels_of_url
from paddock.client.client import Client
from paddock.client.sync import SyncClient
from paddock.client.vector import VectorClient
from paddock.errors import ConfigError, PaddockError
from paddock.loop_thread import LoopThread

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.types import StepResult

RENDER_MODES = {
    None: None,
    "rgb_array": "rgb_array",
    "rgb_array_list": "rgb_array",
    "ansi": "ansi",
    "ansi_list": "ansi",
}
"""The local render mode for each of the server."""


class RemoteEnv(gymnasium.Env[Any, Any]):
    """One episode at a time at `url`, where `paddock serve gymnasium:…` (or any server that publishes its spaces) is.

    Takes the options of `paddock.Client`: token, timeouts, reconnect. Raises its errors.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._client: SyncClient[dict[str, Any]] = SyncClient(url, **options)
        self._is_open = True
        try:
            self.action_space, self.observation_space, mode = published_spaces(self._client.schema(), url)
        except BaseException:
            self.close()
            raise
        self.render_mode = RENDER_MODES.get(mode)
        self.metadata = {"render_modes": [self.render_mode] if self.render_mode else [], "render_fps": 30}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        arguments: dict[str, Any] = {"seed": seed, "options": options}
        result = self._client.reset(**{name: value for name, value in arguments.items() if value is not None})
        return self._read(result.observation["observation"]), result.observation["info"]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._client.step({"action": spaces.encode_action(self.action_space, action)})
        fields = result.observation
        value = self._read(fields["observation"])
        return value, float(result.reward or 0.0), fields["terminated"], fields["truncated"], fields["info"]

    def render(self) -> Any:
        frame = self._client.state()["render"] if self.render_mode else None
        return pixels_of_url(frame) if frame and self.render_mode == "rgb_array" else frame

    def close(self) -> None:
        """End the session. May be called again."""
        if self._is_open:
            self._is_open = False
            self._client.close()

    def _read(self, value: Any) -> Any:
        return spaces.decode_unchecked(self.observation_space, value)


def published_spaces(schema: dict[str, Any], url: str) -> tuple[spaces.AnySpace, spaces.AnySpace, str | None]:
    """The action space, the observation space and the render mode that a server's schemas carry."""
    try:
        action = schema["action"]["properties"]["action"][SPACE]
        observation = schema["observation"]["properties"]["observation"]
        described, about = observation[SPACE], observation.get(METADATA) or {}
    except (KeyError, TypeError):
        raise ConfigError(
            f"{url} publishes no Gymnasium spaces", hint="serve it with: paddock serve gymnasium:ID"
        ) from None
    return spaces.rebuild(action), spaces.rebuild(described), about.get("render_mode")


class RemoteVectorEnv(VectorEnv[Any, Any, Any]):
    """`num_envs` sessions at `url`. Takes the options of `paddock.VectorClient`. A session that fails raises."""

    def __init__(self, url: str, num_envs: int, **options: Any) -> None:
        self._vector = VectorClient(url, num_envs, **options)
        self._thread = LoopThread("paddock-client", cleanup=self._vector.close)
        try:
            schema = self._thread.call(_schema, url, options.get("token"))
            self.single_action_space, self.single_observation_space, _ = published_spaces(schema, url)
            self._thread.call(self._vector.open)
        except BaseException:
            self._thread.close()
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
        shared = {"options": options} if options is not None else {}
        arguments = {i: {**shared, **({} if own is None else {"seed": own})} for i, own in enumerate(seeds)}
        self._ended[:] = False
        results = _checked(self._thread.call(self._vector.reset, arguments))
        return self._gather(results)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        ended = self._ended
        indexed = enumerate(iterate(self.action_space, actions))
        actions_by_index = {
            i: {"action": spaces.encode_action(self.single_action_space, action)}
            for i, action in indexed
            if not ended[i]
        }
        resets: dict[int, dict[str, Any]] = {int(i): {} for i in numpy.flatnonzero(ended)}
        results = _checked(self._thread.call(_step_and_reset, self._vector, actions_by_index, resets))
        observations, infos = self._gather(results)
        rewards = numpy.array([float(result.reward or 0.0) for result in results], dtype=numpy.float64)
        terminated, truncated = (
            numpy.array([bool(result.observation[name]) for result in results], dtype=numpy.bool_)
            for name in ("terminated", "truncated")
        )
        self._ended = terminated | truncated
        return observations, rewards, terminated, truncated, infos

    def close_extras(self, **_: Any) -> None:
        self._thread.close()

    def _gather(self, results: list[StepResult[Any]]) -> tuple[Any, dict[str, Any]]:
        values = [
            spaces.decode_unchecked(self.single_observation_space, result.observation["observation"])
            for result in results
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


async def _step_and_reset(
    vector: VectorClient, actions: dict[int, dict[str, Any]], resets: dict[int, dict[str, Any]]
) -> list[Any]:
    """Step some sessions and reset others at the same time. Results come in the order of the sessions."""
    stepped, begun = await asyncio.gather(vector.step(actions), vector.reset(resets))
    results = {**dict(zip(actions, stepped, strict=True)), **dict(zip(resets, begun, strict=True))}
    return [results[i] for i in sorted(results)]


def _checked(results: list[Any]) -> list[StepResult[Any]]:
    for result in results:
        if isinstance(result, PaddockError):
            raise result
    return results


def _is_one(seed: Any) -> bool:
    return seed is None or isinstance(seed, int | numpy.integer)
