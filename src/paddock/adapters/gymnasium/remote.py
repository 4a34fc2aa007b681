"""A served environment as a `gymnasium.Env`: the same spaces, the same values, the episode elsewhere."""

from __future__ import annotations

from typing import Any

import gymnasium

from paddock.adapters.gymnasium import images, spaces
from paddock.adapters.gymnasium.environment import METADATA, SPACE
from paddock.client.sync import SyncClient
from paddock.errors import ConfigError

RENDERS = {None: None, "rgb_array": "rgb_array", "rgb_array_list": "rgb_array", "ansi": "ansi", "ansi_list": "ansi"}
"""What a local caller gets for each render mode of the server."""


class RemoteEnv(gymnasium.Env[Any, Any]):
    """One episode at a time at `url`, where `paddock serve gymnasium:…` (or any server that publishes its spaces) is.

    Takes the options of `paddock.Client`: token, timeouts, reconnect. Raises its errors.
    """

    def __init__(self, url: str, **options: Any) -> None:
        self._client: SyncClient[dict[str, Any]] = SyncClient(url, **options)
        self._opened = True
        try:
            self.action_space, self.observation_space, mode = published(self._client.schema(), url)
        except BaseException:
            self.close()
            raise
        self.render_mode = RENDERS.get(mode)
        self.metadata = {"render_modes": [self.render_mode] if self.render_mode else [], "render_fps": 30}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        given: dict[str, Any] = {"seed": seed, "options": options}
        result = self._client.reset(**{name: value for name, value in given.items() if value is not None})
        return self._read(result.observation["observation"]), result.observation["info"]

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = self._client.step({"action": spaces.offer(self.action_space, action)})
        seen = result.observation
        value = self._read(seen["observation"])
        return value, float(result.reward or 0.0), seen["terminated"], seen["truncated"], seen["info"]

    def render(self) -> Any:
        shown = self._client.state()["render"] if self.render_mode else None
        return images.from_url(shown) if shown and self.render_mode == "rgb_array" else shown

    def close(self) -> None:
        """End the session. May be called again."""
        if self._opened:
            self._opened = False
            self._client.close()

    def _read(self, value: Any) -> Any:
        return spaces.restore(self.observation_space, value)


def published(schema: dict[str, Any], url: str) -> tuple[spaces.Kinds, spaces.Kinds, str | None]:
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
