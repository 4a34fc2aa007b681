"""Short forms for tests: a task, an environment on the lab plane, and a bus that remembers."""

from collections import Counter
from typing import Any

from paddock.fleet import FleetTaskEnv
from paddock.telemetry.bus import Bus

from .plane import KEY, LabPlane

VERIFIER = "def verify(env, final_answer=None):\n    return 1.0 if 'hello' in env.rows else 0.0\n"


class EventRecorder:
    """All events, in order."""

    def __init__(self) -> None:
        self.bus = Bus()
        self.events: list[Any] = []
        self.bus.subscribe(self.events.append)

    def count(self, name: str) -> int:
        return self.names[name]

    @property
    def names(self) -> Counter[str]:
        return Counter(event.name for event in self.events)

    @property
    def completed(self) -> list[Any]:
        return [event for event in self.events if event.name == "fleet_rollout_completed"]

    @property
    def is_balanced(self) -> bool:
        return self.count("fleet_rollout_started") == len(self.completed)


def task(**more: Any) -> dict[str, Any]:
    return {"task_key": "t-1", "prompt": "say hello", "env_key": "notes", "verifier_code": VERIFIER, **more}


def env_on(
    plane: LabPlane, recorder: EventRecorder | None = None, config: dict[str, Any] | None = None, **options: Any
) -> FleetTaskEnv:
    if recorder is not None:
        options["bus"] = recorder.bus
    return FleetTaskEnv(config or task(), KEY, base_url=plane.url, **options)


async def play(env: FleetTaskEnv, *texts: str) -> tuple[float | None, dict[str, Any]]:
    """A whole episode: each text is added, then the agent is done."""
    await env.reset_async()
    for text in texts:
        await env.step_async({"tool": "add", "params": {"text": text}})
    _, reward, done, info = await env.step_async({"done": True})
    assert done
    return reward, info
