"""`paddock fleet run tasks.json`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note
from paddock.cli.field_options import field_options, read_field_options
from paddock.cli.fleet_plane import add_hints, find_plane, get_json, plane_options
from paddock.cli.interrupts import run_async
from paddock.errors import TaskError
from paddock.rollouts.config import RunConfig

if TYPE_CHECKING:
    from paddock.fleet.client.settings import PlaneAddress
    from paddock.store.record import RolloutRecord

SANDBOX_FIELDS = (
    *("agent", "driver", "env", "seed", "sandbox", "network", "verifier_mode", "consent", "context_tokens"),
    *("snapshots", "snapshot_limits_total_bytes", "snapshot_limits_days"),
)
NOT_FOR_FLEET = (*SANDBOX_FIELDS, "mode", "stall_timeout", "top_logprobs", "weight_version", "engine")


@click.command("run")
@click.argument("file", metavar="TASKS.json", type=click.Path(path_type=Path))
@click.option("--task", "task_keys", multiple=True, metavar="KEY", help="Only this task. Repeatable.")
@field_options(
    RunConfig,
    without=NOT_FOR_FLEET,
    defaults={"parallel": 8},
    helps={
        "max_steps": "Tool calls that one rollout may make.",
        "agent_timeout": "Seconds for the agent. Default: 900.",
        "retries": "Retries after a failure that is not the agent's. Default: 2.",
    },
    flags={"agent_timeout": ("--timeout",)},
)
@click.option("--ttl", "ttl_seconds", type=int, help="Seconds that an instance may live. Default: by modality.")
@click.option("--partial-reward", is_flag=True, help="Give a failed task the share of its checks that passed.")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rollout, as it ends.")
def run(
    file: Path,
    task_keys: tuple[str, ...],
    ttl_seconds: int | None,
    partial_reward: bool,
    url: str | None,
    api_key: str | None,
    state: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run tasks with a tool-calling agent.

    Every token is captured, and each rollout is graded by the verifier of its task.

    TASKS.json is a list of tasks, or {"tasks": […]}: task_key, prompt, env_key, and optionally env_version,
    data_key, data_version, env_variables, task_modality, verifier_code. The key of the model is read from
    PADDOCK_MODEL_API_KEY (or OPENAI_API_KEY, HF_TOKEN). Ends with 0 if every rollout has outcome ok, with 1 if not.
    """
    from paddock.cli.rollout import name_batch, refuse_vllm_url, run_with_progress
    from paddock.fleet.run import read_tasks, run_tasks
    from paddock.rollouts.rollout_json import summarize

    refuse_vllm_url(options["model"])
    chosen = select(read_tasks(file), task_keys, file)
    plane = find_plane(url, api_key, state)
    with add_hints(plane):
        # A plane that is not there would break every rollout, each after its retries.
        offered, limit = run_async(look_at(plane))
    for env_key in sorted({task["env_key"].partition(":")[0] for task in chosen} - offered):
        note(f"warning: {plane.base_url} does not list an environment {env_key!r}")
    if limit is not None and limit < options["parallel"]:
        note(f"the plane allows {limit} instances at once, so {limit} rollouts run at a time")
        options["parallel"] = limit
    # Errors are in the records; log lines would tear the progress display.
    logging.getLogger("paddock").addHandler(logging.NullHandler())
    config = name_batch(read_field_options(RunConfig, options, agent="loop"))
    run_id = config.resume or config.batch_id
    note(f"run {run_id} at {plane.base_url}; if it is killed: paddock fleet rm --run {run_id}")

    def to_json(record: RolloutRecord) -> dict[str, Any]:
        return {**summarize(record), "run_id": run_id, "metadata": record.metadata}

    work = partial(run_tasks, chosen, config, plane=plane, ttl_seconds=ttl_seconds, partial_reward=partial_reward)
    return run_with_progress(work, config, total=len(chosen) * config.n, as_json=as_json, to_json=to_json)


async def look_at(plane: PlaneAddress) -> tuple[set[str], int | None]:
    """What the plane offers, and how many instances it allows."""
    offered = {each["env_key"] for each in await get_json(plane, "/v1/env/")}
    limit = (await get_json(plane, "/v1/account")).get("instance_limit")
    return offered, limit if isinstance(limit, int) and limit > 0 else None


def select(tasks: list[dict[str, Any]], keys: tuple[str, ...], file: Path) -> list[dict[str, Any]]:
    present = {task["task_key"] for task in tasks}
    if missing := [key for key in keys if key not in present]:
        raise TaskError(f"{file} has no task {missing[0]!r}", hint=f"there are {', '.join(sorted(present))[:500]}")
    return [task for task in tasks if not keys or task["task_key"] in keys]
