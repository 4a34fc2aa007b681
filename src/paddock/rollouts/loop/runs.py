"""Batches of the loop in an environment, from the options that `run_batch` takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from paddock.errors import ConfigError, TaskError
from paddock.rollouts.loop.batch import LoopBatch
from paddock.rollouts.loop.environment import EnvironmentScene
from paddock.rollouts.loop.plan import LoopPlan
from paddock.rollouts.loop.verified import VerifiedScene
from paddock.rollouts.sandbox import choose_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paddock.rollouts.loop.agent import LoopAgent
    from paddock.rollouts.loop.scene import Scene
    from paddock.rollouts.models.endpoint import Endpoint
    from paddock.rollouts.store import Store
    from paddock.rollouts.task import Task


def environment_batch(
    tasks: Sequence[Task],
    agent: LoopAgent,
    endpoint: Endpoint,
    *,
    env: str | Callable[[], Any] | None,
    env_name: str | None = None,
    seed: int | None,
    settings: dict[str, Any],
    **options: Any,
) -> LoopBatch:
    """A batch whose rollouts each get a session of `env`: a URL, or what makes an environment.

    A task may say in its metadata how to begin: `seed`, and `reset` with more arguments. Its verifier, if it has one,
    scores the work; else the environment does.
    """
    if env is None:
        raise ConfigError("the agent loop needs an environment", hint="add --env TARGET or --env URL")
    sandbox, consent = settings.pop("sandbox", "bwrap"), bool(settings.pop("consent", False))
    if any(task.is_scored for task in tasks):
        choose_backend(sandbox, consent=consent)
    scene_settings = {"env": env_name or environment_name(env), "seed": seed}
    plan = LoopPlan(agent, endpoint, sandbox=EnvironmentScene.kind, scene=scene_settings, **settings)
    store: Store = options["store"]

    def make_scene(task: Task) -> Scene:
        scene = EnvironmentScene(env, task.instruction, seed=begins(task, seed), arguments=reset_arguments(task))
        return VerifiedScene(scene, task, store, sandbox=sandbox, consent=consent) if task.is_scored else scene

    return LoopBatch(tasks, plan, make_scene, **options)


def environment_name(env: str | Callable[[], Any]) -> str | None:
    """A URL without its credentials, or where a class or function is defined. None for what has no name."""
    if isinstance(env, str):
        parts = urlsplit(env)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()
    name = getattr(env, "__qualname__", None)
    return None if name is None else f"{getattr(env, '__module__', None)}:{name}"


def begins(task: Task, seed: int | None) -> int | None:
    own = task.metadata.get("seed", seed)
    if own is not None and (isinstance(own, bool) or not isinstance(own, int) or own < 0):
        raise TaskError(f"the seed of task {task.id} is {own!r}", hint="write a whole number, 0 or more")
    return own


def reset_arguments(task: Task) -> dict[str, Any]:
    given = task.metadata.get("reset", {})
    if not isinstance(given, dict):
        raise TaskError(f"reset of task {task.id} is {given!r}", hint="write an object of arguments")
    return given
