"""A Gymnasium environment behind our interface: typed from its spaces, one instance for each session."""

from __future__ import annotations

import base64
import struct
import uuid
import zlib
from typing import Annotated, Any, ClassVar
from urllib.parse import parse_qsl

import gymnasium
import numpy
from pydantic import Field, PlainValidator, WithJsonSchema, create_model

from paddock.adapters.gymnasium import spaces
from paddock.env import Environment
from paddock.errors import TargetError
from paddock.types import Action, EnvironmentMetadata, Observation, State

SPACE = "x-gymnasium-space"
"""Where a schema carries the description of its space."""
METADATA = "x-gymnasium"
LITERALS = {"true": True, "false": False, "none": None}
PNG_PREFIX = "data:image/png;base64,"
PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_COLOURS = {1: 0, 3: 2, 4: 6}
"""PNG's colour types by the number of channels."""


class GymnasiumState(State):
    """`render` is there when the environment was made with a render mode: text, or a PNG as a data URL."""

    render: str | None = None


class GymnasiumEnvironment(Environment[Action, Observation, GymnasiumState]):
    """Subclasses are made by `environment_class`, one for each Gymnasium environment."""

    concurrent_sessions = True
    env_id: ClassVar[str]
    options: ClassVar[dict[str, Any]]

    def __init__(self) -> None:
        super().__init__()
        self._env = gymnasium.make(self.env_id, **self.options)
        self._episode_id: str | None = None
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, episode_id: str | None = None, options: dict[str, Any] | None = None
    ) -> Observation:
        observation, info = self._env.reset(seed=seed, options=options)
        self._episode_id, self._steps = episode_id or str(uuid.uuid4()), 0
        return self._observe(observation, info, reward=None)

    def step(self, action: Any) -> Observation:
        observation, reward, terminated, truncated, info = self._env.step(action.action)
        self._steps += 1
        return self._observe(observation, info, float(reward), bool(terminated), bool(truncated))

    def _observe(
        self,
        value: Any,
        info: dict[str, Any],
        reward: float | None,
        terminated: bool = False,
        truncated: bool = False,
    ) -> Observation:
        # Not validated: the environment decides what it returns.
        built: Observation = self.observation_type.model_construct(
            observation=spaces.encode(self._env.observation_space, value),
            terminated=terminated,
            truncated=truncated,
            info=plain(info),
            reward=reward,
            done=terminated or truncated,
            metadata={},
        )
        return built

    @property
    def state(self) -> GymnasiumState:
        return GymnasiumState(episode_id=self._episode_id, step_count=self._steps, render=self._render())

    def _render(self) -> str | None:
        if self._env.render_mode is None or self._env.render_mode == "human":
            return None
        frame: Any = self._env.render()
        if isinstance(frame, list):
            frame = frame[-1] if frame else None
        if frame is None or isinstance(frame, str):
            return frame
        return png_url(frame)

    def close(self) -> None:
        self._env.close()

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(name=self.env_id, description=f"{self.env_id} of Gymnasium")


def load(rest: str) -> tuple[type[GymnasiumEnvironment], str]:
    """The class for `ID` or `ID?name=value&…`; the options go to `gymnasium.make`. Raises TargetError."""
    env_id, _, query = rest.partition("?")
    options = {name: _parse_option(text) for name, text in parse_qsl(query, keep_blank_values=True)}
    inline = bool(options.pop("inline", False))
    return environment_class(env_id, options, inline=inline), env_id


def environment_class(env_id: str, options: dict[str, Any], *, inline: bool = False) -> type[GymnasiumEnvironment]:
    """A class that serves one Gymnasium environment. Makes one of them, to see its spaces."""
    options = {"disable_env_checker": True, **options}
    try:
        env: gymnasium.Env[Any, Any] = gymnasium.make(env_id, **options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        hint = "is the id right, and what it needs installed? e.g. pip install 'gymnasium[all]'"
        raise TargetError(f"gymnasium cannot make {env_id!r}: {error}", hint=hint) from error
    try:
        action = action_type(env.action_space)
        observation = observation_type(env.observation_space, env)
        renders = env.render_mode is not None
    finally:
        env.close()
    return type(
        "GymnasiumEnvironment",
        (GymnasiumEnvironment,),
        {
            "__module__": __name__,
            "env_id": env_id,
            "options": options,
            "action_type": action,
            "observation_type": observation,
            "inline": inline,
            # Windows and graphics contexts belong to the thread that made them.
            "thread_affine": renders,
        },
    )


def action_type(space: spaces.AnySpace) -> type[Action]:
    """`{"action": …}`, checked against the space; what does not fit is named."""

    def check(value: Any) -> Any:
        return spaces.decode(space, value)

    described = {**spaces.schema(space), SPACE: spaces.describe(space)}
    checked = Annotated[Any, PlainValidator(check), WithJsonSchema(described)]
    return create_model("GymnasiumAction", __base__=Action, action=(checked, Field(description=str(space)[:500])))


def observation_type(space: spaces.AnySpace, env: gymnasium.Env[Any, Any]) -> type[Observation]:
    metadata = {"render_mode": env.render_mode, "id": env.spec.id if env.spec else None}
    described = {**spaces.schema(space), SPACE: spaces.describe(space), METADATA: metadata}
    return create_model(
        "GymnasiumObservation",
        __base__=Observation,
        observation=(Annotated[Any, WithJsonSchema(described)], ...),
        terminated=(bool, False),
        truncated=(bool, False),
        info=(dict[str, Any], Field(default_factory=dict)),
    )


def plain(value: Any) -> Any:
    """`info` as plain values; what JSON cannot express becomes text."""
    if isinstance(value, dict):
        return {str(key): plain(member) for key, member in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(member) for member in value]
    if isinstance(value, numpy.ndarray):
        return value if value.dtype.kind in "biuf" else plain(value.tolist())
    if isinstance(value, numpy.generic):
        return plain(value.item())
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _parse_option(text: str) -> Any:
    if text.lower() in LITERALS:
        return LITERALS[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- rendered frames as PNG in a data URL, with the standard library alone --------------------------


def png_url(frame: Any) -> str:
    """A frame of 8-bit pixels, height x width (x channels), as a data URL."""
    pixels = numpy.ascontiguousarray(frame, dtype=numpy.uint8)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    height, width, channels = pixels.shape
    # Each row begins with its filter: 0, none.
    rows = numpy.concatenate([numpy.zeros((height, 1), numpy.uint8), pixels.reshape(height, -1)], axis=1)
    header = struct.pack(">IIBBBBB", width, height, 8, PNG_COLOURS[channels], 0, 0, 0)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")
    return PNG_PREFIX + base64.b64encode(PNG_SIGNATURE + chunks).decode()


def pixels_of_url(url: str) -> Any:
    """The pixels in a data URL that `png_url` wrote."""
    data = base64.b64decode(url.removeprefix(PNG_PREFIX))
    width, height, _, colour = struct.unpack(">IIBB", data[16:26])
    channels = next(count for count, kind in PNG_COLOURS.items() if kind == colour)
    (length,) = struct.unpack(">I", data[33:37])
    rows = numpy.frombuffer(zlib.decompress(data[41 : 41 + length]), numpy.uint8).reshape(
        height, 1 + width * channels
    )
    return rows[:, 1:].reshape((height, width, channels) if channels > 1 else (height, width)).copy()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
