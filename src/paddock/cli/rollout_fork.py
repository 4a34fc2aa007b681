"""`paddock rollout fork ID`: the task, the agent and the place where it works are those of the recorded rollout."""

from __future__ import annotations

import json
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.capture.recorded.replay import FIDELITY_POLICIES, FidelityPolicy
from paddock.cli.store_options import store_option
from paddock.errors import ConfigError
from paddock.rollouts.config import BACKENDS, LOCAL, RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from paddock.rollouts.batch import BatchResult
    from paddock.store.record import RolloutRecord

ENVIRONMENT = "environment"


@click.command("fork")
@click.argument("rollout_id", metavar="ID")
@click.option("--at", required=True, metavar="CALL", help="The first call that is sampled live: c5, or 5.")
@click.option("-n", "--repeat", "n", default=1, show_default=True, type=click.IntRange(min=1), help="Forks to run.")
@click.option("--parallel", default=2, show_default=True, type=click.IntRange(min=1), help="Forks at a time.")
@click.option("--model", help="Another model, as in `paddock rollout`.")
@click.option("--model-name", help="The name of the model at its URL.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Another temperature of the live calls.")
@click.option("--agent-timeout", type=click.FloatRange(min=0, min_open=True), help="Seconds for the agent.")
@click.option(
    "--policy",
    type=click.Choice(FIDELITY_POLICIES),
    default="tolerant",
    show_default=True,
    help="strict: stop at the first request that differs. tolerant: go on while the conversation has the same shape.",
)
@click.option(
    "--edit",
    "edit_file",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="A JSON file with another answer at CALL, or another tool result before it.",
)
@click.option("--task", "task_spec", help="The task, if the rollout was recorded without it.")
@click.option("--env", help="Where the agent loop works, if the recorded environment cannot be found again.")
@click.option("--engine", type=click.Choice(tuple(BACKENDS)), default=LOCAL, show_default=True, help="Where to run.")
@click.option("--ray-address", help="The Ray cluster. Default: RAY_ADDRESS, or one is started on this machine.")
@click.option("--resume", metavar="BATCH", help="Continue a batch of forks that was stopped.")
@click.option("--unsafe", is_flag=True, help="Allow --sandbox process, which isolates nothing.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each fork, as it ends.")
def fork_command(
    rollout_id: str,
    at: str,
    n: int,
    parallel: int,
    policy: FidelityPolicy,
    edit_file: Path | None,
    task_spec: str | None,
    env: str | None,
    engine: str,
    ray_address: str | None,
    resume: str | None,
    unsafe: bool,
    store: Path | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run forks of rollout ID: replay its calls before CALL, and continue live from there.

    Task, agent and settings are those of the recorded rollout. The replayed calls cost no model tokens, and are not
    trained on again. A Fleet task gets new instances at the plane of FLEET_BASE_URL, or of this machine.
    """
    from paddock.cli.rollout import choose_backend, load_one_task, name_batch, run_with_progress

    batch = name_batch(RunConfig(model="", resume=resume, store=store))
    fields = {name: value for name, value in options.items() if value is not None}
    fields |= {"parallel": parallel, "batch_id": batch.batch_id, "resume": resume, "store": store}
    fields["engine"] = choose_backend(engine, address=ray_address)
    if unsafe:
        fields["consent"] = True
    work = partial(
        choose_fork(read_record(rollout_id, store), env, task_spec, fields),
        at=at,
        n=n,
        policy=policy,
        edit=None if edit_file is None else read_edit_file(edit_file),
        **({} if task_spec is None else {"task": load_one_task(task_spec)}),
        **fields,
    )
    return run_with_progress(work, batch, total=n, as_json=as_json, to_json=fork_to_json)


def fork_to_json(record: RolloutRecord) -> dict[str, Any]:
    """The summary of a rollout, and how it compares with the recorded one, without the differences."""
    from paddock.rollouts.rollout_json import summarize

    fidelity = record.fork.get("fidelity") or {}
    result = {name: value for name, value in fidelity.items() if name not in ("different_calls", "files")}
    if files := fidelity.get("files"):
        result["files"] = files["state"]
    return {**summarize(record), "fork": {**record.fork, "fidelity": result or None}}


def choose_fork(
    record: RolloutRecord, env: str | None, task_spec: str | None, fields: dict[str, Any]
) -> Callable[..., Coroutine[Any, Any, BatchResult]]:
    """What forks this kind of rollout. Adds the environment of the agent loop to the fields."""
    from paddock.fleet.run import FLEET, fork_task
    from paddock.rollouts.fork import fork

    if record.sandbox == FLEET:
        if env is not None or task_spec is not None or fields["engine"] != LOCAL:
            raise ConfigError("the rollout is of a Fleet task", hint="leave --env, --task and --engine out")
        from paddock.cli.fleet_plane import find_plane

        return partial(fork_task, record, plane=find_plane(None, None, None))
    if record.sandbox == ENVIRONMENT:
        fields |= find_recorded_environment(record, env)
    elif env is not None:
        raise ConfigError(f"the rollout has no environment, but a sandbox ({record.sandbox})", hint="leave --env out")
    return partial(fork, record)


def read_record(rollout_id: str, store: Path | None) -> RolloutRecord:
    from paddock.rollouts.fork import find_source
    from paddock.store import Store

    with closing(Store.open(store, read_only=True)) as opened:
        return find_source(opened, rollout_id)


def find_recorded_environment(record: RolloutRecord, env: str | None) -> dict[str, Any]:
    """The fields `env` and `env_name`. Raises ConfigError if the record does not tell where the environment is."""
    from paddock.cli.rollout import find_environment, is_url

    target = env or record.run_config.get("env") or record.config.get("env")
    if not target or "***@" in target:
        raise ConfigError(
            f"the environment of {record.rollout_id} is not known", hint="give --env TARGET or --env URL"
        )
    return {"env": find_environment(target), "env_name": None if is_url(target) else target}


def read_edit_file(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}", hint='write {"answer": {"content": "…"}}') from error
