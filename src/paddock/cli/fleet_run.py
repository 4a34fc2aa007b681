"""`paddock fleet run tasks.json`."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import note
from paddock.cli.fleet_place import explained, fetch, find_plane, plane_options
from paddock.cli.interrupts import run_async
from paddock.errors import TaskError

if TYPE_CHECKING:
    from paddock.fleet.settings import PlaneAddress
    from paddock.rollouts.record import RolloutRecord


@click.command("run")
@click.argument("file", metavar="TASKS.json", type=click.Path(path_type=Path))
@click.option(
    "--model", required=True, help="URL, demo, replay:FILE, local, vllm://REPO or hf-router://REPO:PROVIDER."
)
@click.option("--model-name", help="The model's name at the URL. Default: the first it lists.")
@click.option("--vllm-url", help="Where the server of a vllm:// model is.")
@click.option("--task", "task_keys", multiple=True, metavar="KEY", help="Only this task. Repeatable.")
@click.option("-n", "--repeat", "n", default=1, show_default=True, help="Rollouts of each task.")
@click.option("--parallel", default=8, show_default=True, help="Rollouts at a time.")
@click.option("--max-steps", default=50, show_default=True, help="Tool calls that one rollout may make.")
@click.option("--max-tokens", default=4096, show_default=True, help="Tokens that one model call may sample.")
@click.option("--max-calls", default=200, show_default=True, help="Model calls that one rollout may make.")
@click.option("--max-completion-tokens", type=int, help="Tokens that one rollout may sample in all.")
@click.option("--timeout", "agent_timeout", type=float, help="Seconds for the agent. Default: 900.")
@click.option("--ttl", "ttl_seconds", type=int, help="Seconds that an instance may live. Default: by modality.")
@click.option("--temperature", default=1.0, show_default=True, help="Temperature of every call.")
@click.option("--thinking/--no-thinking", default=None, help="Turn the model's thinking on or off.")
@click.option("--partial-reward", is_flag=True, help="Give a failed task the share of its checks that passed.")
@click.option("--retries", type=int, help="New tries after a failure outside the policy. Default: 2.")
@click.option("--resume", metavar="BATCH", help="Go on with a batch that was stopped.")
@click.option("--batch-id", metavar="NAME", help="Name of the batch. Default: a new one.")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@plane_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rollout, as it ends.")
def run(
    file: Path,
    task_keys: tuple[str, ...],
    max_tokens: int,
    max_calls: int,
    max_completion_tokens: int | None,
    url: str | None,
    api_key: str | None,
    state: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run tasks with a tool-calling agent, capture every token, and have each graded by its verifier.

    TASKS.json is a list of tasks, or {"tasks": […]}: task_key, prompt, env_key, and if you like env_version,
    data_key, data_version, env_variables, task_modality, verifier_code. The key of the model is read from
    PADDOCK_MODEL_API_KEY (or OPENAI_API_KEY, HF_TOKEN). Ends with 0 if every rollout has outcome ok, with 1 if not.
    """
    from paddock.cli.rollout import name_batch, refuse_vllm_url, watched
    from paddock.fleet.run import read_tasks, run_tasks
    from paddock.rollouts.limits import Budget
    from paddock.rollouts.shown import summarize

    refuse_vllm_url(options["model"])
    chosen = select(read_tasks(file), task_keys, file)
    plane = find_plane(url, api_key, state)
    with explained(plane):
        # A plane that is not there would break every rollout, each after its retries.
        offered, limit = run_async(look_at(plane))
    for env_key in sorted({task["env_key"].partition(":")[0] for task in chosen} - offered):
        note(f"warning: {plane.base_url} does not list an environment {env_key!r}")
    if limit is not None and limit < options["parallel"]:
        note(f"the plane allows {limit} instances at once, so {limit} rollouts run at a time")
        options["parallel"] = limit
    # What goes wrong is in the records; a line in between would only tear the picture.
    logging.getLogger("paddock").addHandler(logging.NullHandler())
    batch_id = name_batch(options)
    note(f"run {batch_id} at {plane.base_url}; if it is killed: paddock fleet rm --run {batch_id}")
    budget = Budget(calls=max_calls, completion_tokens=max_completion_tokens, max_tokens_per_call=max_tokens)

    def shown(record: RolloutRecord) -> dict[str, Any]:
        return {**summarize(record), "run_id": batch_id, "metadata": record.metadata}

    work = partial(run_tasks, chosen, plane=plane, budget=budget, **options)
    return watched(work, batch_id, total=len(chosen) * options["n"], as_json=as_json, shown=shown)


async def look_at(plane: PlaneAddress) -> tuple[set[str], int | None]:
    """What the plane offers, and how many instances it allows."""
    offered = {each["env_key"] for each in await fetch(plane, "/v1/env/")}
    limit = (await fetch(plane, "/v1/account")).get("instance_limit")
    return offered, limit if isinstance(limit, int) and limit > 0 else None


def select(tasks: list[dict[str, Any]], keys: tuple[str, ...], file: Path) -> list[dict[str, Any]]:
    known = {task["task_key"] for task in tasks}
    if missing := [key for key in keys if key not in known]:
        raise TaskError(f"{file} has no task {missing[0]!r}", hint=f"there are {', '.join(sorted(known))[:500]}")
    return [task for task in tasks if not keys or task["task_key"] in keys]
