"""`paddock rollout TASK…`, `paddock rollout fork ID` and `paddock rollout reverify ID`."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import INTERRUPTED, note, plural, print_error, print_json, refuse_unused
from paddock.cli.field_options import field_options, read_field_options
from paddock.cli.interrupts import restored_handlers, run_async
from paddock.cli.rollout_fork import fork_command
from paddock.cli.store_options import store_option
from paddock.cli.task_selection import read_tasks, select_tasks, selection_options, set_options
from paddock.errors import ConfigError, TaskError
from paddock.rollouts.config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from paddock.rollouts.api import PlacementBackend
    from paddock.rollouts.batch import BatchResult
    from paddock.rollouts.rollout import Rollout
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

BROKEN = 1
RAY = "ray"
LOOP = "loop"
BLACK_BOX = "black_box"


class WithDefault(click.Group):
    """A group whose first word may be left out: `paddock rollout TASK` is `paddock rollout run TASK`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args.insert(0, "run")
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["TASK… [OPTIONS]"]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options of `run`, then the other commands."""
        run = self.commands["run"]
        run.format_options(click.Context(run, parent=ctx, info_name="run"), formatter)
        self.format_commands(ctx, formatter)


@click.group("rollout", cls=WithDefault)
def command() -> None:
    """Run a coding agent on tasks, capture every token, and score its work.

    \b
    paddock rollout fix-test --model demo           recorded answers, no GPU
    paddock rollout TASK… --model URL -n 4          four rollouts of each task
    paddock rollout fork ID --at CALL -n 8          replay a rollout up to a call, and continue live
    paddock rollout reverify ID --tests FOLDER      score a finished rollout again

    TASK is a task folder, a folder of them, a .jsonl file, a shipped task's name, or another set (paddock tasks).
    """


command.add_command(fork_command)


@command.command("run")
@click.argument("tasks", nargs=-1, metavar="TASK…")
@click.option("--prompt", help="The instruction, in place of a TASK.")
@field_options(RunConfig, defaults={"parallel": 2})
@selection_options
@click.option("--ray-address", help="The Ray cluster. Default: RAY_ADDRESS, or one is started on this machine.")
@click.option(
    "--rollout-cpus", type=click.FloatRange(min=0), help="Processors that a rollout takes of its node. Default: 1."
)
@click.option("--rollout-memory", type=click.IntRange(min=1), help="MiB of memory that a rollout takes of its node.")
@click.option("--rollout-resources", help='Custom resources that a rollout takes, as JSON: {"sandbox_bwrap": 1}.')
@click.option("--rollouts-per-node", type=click.IntRange(1, 10_000), help="Rollouts at a time on one node, at most.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rollout, as it ends.")
def run(
    tasks: tuple[str, ...],
    prompt: str | None,
    pattern: str | None,
    shard: str | None,
    limit: int | None,
    registry: str | None,
    ray_address: str | None,
    rollout_cpus: float | None,
    rollout_memory: int | None,
    rollout_resources: str | None,
    rollouts_per_node: int | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Run rollouts of TASK: a task folder, a folder of them, a .jsonl file, a shipped task's name, or another set.

    See paddock tasks --help for sets in git repositories, registries and SWE-bench rows.

    With --agent loop the model works in the environment --env through its tools, and the environment scores it.

    The key of the model is read from PADDOCK_MODEL_API_KEY (or OPENAI_API_KEY, HF_TOKEN), and never
    enters the sandbox. Ends with 0 if every rollout has outcome ok, with 1 if not.
    """
    from paddock.rollouts.api import run_batch
    from paddock.tasks.task import Task

    chosen = [task for spec in tasks for task in read_tasks(spec, set_options(registry))] + (
        [Task(prompt)] if prompt else []
    )
    if not chosen:
        raise ConfigError("no task is given", hint="name a TASK, or say --prompt what to do")
    chosen = select_tasks(chosen, pattern=pattern, shard=shard, limit=limit)
    refuse_unused_options(options["agent"], options["mode"], scored=any(task.is_scored for task in chosen))
    refuse_vllm_url(options["model"])
    values: dict[str, Any] = {}
    if (env := options["env"]) is not None:
        values |= {"env": find_environment(env), "env_name": None if is_url(env) else env}
    values["engine"] = choose_backend(
        options["engine"],
        address=ray_address,
        cpus=rollout_cpus,
        memory=rollout_memory,
        custom=rollout_resources,
        per_node=rollouts_per_node,
    )
    config = name_batch(read_field_options(RunConfig, options, **values))
    return run_with_progress(
        partial(run_batch, chosen, config), config, total=len(chosen) * config.n, as_json=as_json
    )


def run_with_progress(
    work: Callable[..., Coroutine[Any, Any, BatchResult]],
    config: RunConfig,
    *,
    total: int,
    as_json: bool,
    to_json: Callable[[RolloutRecord], dict[str, Any]] | None = None,
) -> int:
    """Run a batch with its progress on stderr, and return the exit code. `work` takes the callbacks of a batch."""
    from paddock.cli.progress import RolloutProgress
    from paddock.rollouts.rollout_json import summarize

    data = sys.stdout
    has_begun = False
    # Ray prints its own warnings to the standard output, which is for data only.
    with redirect_stdout(sys.stderr), RolloutProgress(total=total, lines=not as_json) as progress:

        def settle(record: RolloutRecord) -> None:
            progress.settle(record)
            if as_json:
                print_json((to_json or summarize)(record), file=data)

        def show(rollout: Rollout) -> None:
            nonlocal has_begun
            if not has_begun:
                has_begun = True
                progress.log(f"batch {config.resume or config.batch_id}: {plural(total, 'rollout')}")
            progress.show(rollout)

        result = run_until_signal(work(on_change=show, on_settled=settle, log=progress.log))
    if result is None:
        if not has_begun:
            print_error("interrupted before a rollout had begun")
            return INTERRUPTED
        batch_id = config.resume or config.batch_id
        print_error("interrupted; what was under way is recorded as cancelled", f"go on with --resume {batch_id}")
        return INTERRUPTED
    report(result, as_json)
    return 0 if all(record.outcome == "ok" for record in result.records) else BROKEN


def refuse_unused_options(agent: str, mode: str, *, scored: bool) -> None:
    """Raise ConfigError for an option that this kind of rollout does not use."""
    name = agent.partition(":")[0]
    if name != LOOP:
        refuse_unused("seed", "max_steps", why=f"the agent {name} has no environment", hint="add --agent loop")
    else:
        refuse_unused("context_tokens", why="the agent loop learns it from the model", hint="leave it out")
    if name == LOOP and not scored:
        why = "the agent loop works in its environment, and no task has tests to run"
        refuse_unused("sandbox", why=why, hint="leave it out, or give a TASK with tests")
    if mode == BLACK_BOX:
        why = "--mode black_box passes calls on unchanged"
        refuse_unused(
            "temperature", "top_logprobs", "thinking", "token_mode", why=why, hint="leave it or the mode out"
        )


def refuse_vllm_url(model: str) -> None:
    if not model.startswith("vllm://"):
        refuse_unused("vllm_url", why="the model is no vllm:// one", hint="give --model vllm://REPO, or leave it out")


def name_batch(config: RunConfig) -> RunConfig:
    """The config with a name for its batch. Raises ConfigError if there is no batch to go on with."""
    from contextlib import closing

    from paddock.rollouts.batch import new_batch_id
    from paddock.rollouts.resume import check_batch_exists
    from paddock.store import Store

    if config.resume is None:
        return replace(config, batch_id=config.batch_id or new_batch_id())
    # Before a model is started for it.
    assert not isinstance(config.store, Store)
    with closing(Store.open(config.store)) as store:
        check_batch_exists(store, config.resume)
    return config


def choose_backend(name: str, **options: Any) -> str | PlacementBackend:
    """The placement backend with its resources. Raises ConfigError for those of a cluster where there is none."""
    chosen = {option: value for option, value in options.items() if value is not None}
    if name != RAY:
        if chosen:
            raise ConfigError("rollouts of this machine take no options of a cluster", hint="add --engine ray")
        return name
    from paddock.scale.cluster import Resources
    from paddock.scale.rollouts import RayBackend

    resources = Resources.read(chosen.get("cpus", 1.0), chosen.get("memory"), chosen.get("custom"))
    return RayBackend(chosen.get("address"), resources, chosen.get("per_node"))


def is_url(environment: str) -> bool:
    return environment.startswith(("http://", "https://"))


def find_environment(target: str) -> str | Callable[[], Any]:
    """A URL as it is, another target as what makes its environments."""
    if is_url(target):
        return target
    from paddock.targets import load_target

    return load_target(target)[0]


def load_one_task(spec: str) -> Task:
    tasks = read_tasks(spec)
    if len(tasks) != 1:
        raise ConfigError(f"{spec} holds {len(tasks)} tasks", hint="name one task")
    return tasks[0]


@command.command("reverify")
@click.argument("rollout_id", metavar="ID")
@click.option("--tests", type=click.Path(path_type=Path, exists=True), help="A tests folder, or a test.sh.")
@click.option("--task", "task_spec", help="A task whose tests to use, as in `paddock rollout TASK`.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for the tests.")
@click.option(
    "--sandbox", default="bwrap", show_default=True, help="bwrap, docker, e2b, or process (isolates nothing)."
)
@click.option("--unsafe", is_flag=True, help="Allow --sandbox process, which isolates nothing.")
@store_option()
@click.option("--json", "as_json", is_flag=True, help="Print the score as JSON.")
def reverify_command(
    rollout_id: str,
    tests: Path | None,
    task_spec: str | None,
    timeout: float,
    sandbox: str,
    unsafe: bool,
    store: Path | None,
    as_json: bool,
) -> int:
    """Score the sealed work folder of rollout ID again, without the agent. The first score is kept."""
    from paddock.rollouts.api import reverify

    files, task = read_tests(tests, task_spec)
    work = reverify(rollout_id, files, store=store, task=task, sandbox=sandbox, consent=unsafe, timeout=timeout)
    verdict = run_async(work)
    if as_json:
        print_json(
            {
                "rollout_id": rollout_id,
                **verdict.reward.to_json(),
                "reward": verdict.reward.value,
                "exit_code": verdict.exit_code,
                "stdout": verdict.stdout,
                "stderr": verdict.stderr,
            }
        )
    elif verdict.reward.value is None:
        click.echo(f"no reward: {verdict.reward.reason}")
    else:
        click.echo(f"{verdict.reward.value:g}")
    return 0 if verdict.reward.value is not None else BROKEN


def read_tests(tests: Path | None, task_spec: str | None) -> tuple[dict[str, bytes], Task | None]:
    """The verifier's files, from a folder, from one script, or from a task, and that task."""
    if (tests is None) == (task_spec is None):
        raise ConfigError("say which tests to use", hint="give --tests FOLDER, or --task TASK")
    if task_spec is not None:
        task = load_one_task(task_spec)
        return dict(task.tests), task
    assert tests is not None
    if tests.is_file():
        return {"test.sh": tests.read_bytes()}, None
    files = {str(path.relative_to(tests)): path.read_bytes() for path in tests.rglob("*") if path.is_file()}
    if "test.sh" not in files:
        raise TaskError(f"{tests} has no test.sh", hint="its test.sh is what gets run")
    return files, None


def run_until_signal(work: Coroutine[Any, Any, BatchResult]) -> BatchResult | None:
    """The result, or None after Ctrl-C or SIGTERM, once every rollout has ended as cancelled."""

    async def guarded() -> BatchResult | None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def cancel() -> None:
            if not task.cancelling():
                note("interrupted: waiting until agents and sandboxes have ended and all calls are stored …")
            task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, cancel)
        try:
            return await task
        except asyncio.CancelledError:
            return None

    with restored_handlers():
        return asyncio.run(guarded())


def report(result: BatchResult, as_json: bool) -> None:
    summary = result.summary()
    if not as_json:
        print_tables(result)
    outcomes = ", ".join(f"{count} {name}" for name, count in summary["outcomes"].items())
    note(f"batch {result.batch_id}: {outcomes}; {summary['rewarded']} rewarded, {summary['trainable']} trainable")
    if result.records:
        note(f"look closer: paddock trace show {result.records[0].rollout_id}")


def print_tables(result: BatchResult) -> None:
    from rich.console import Console
    from rich.table import Table

    rollouts = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("rollout", "task", "outcome", "reward", "calls", "trainable", "tokens", "seconds"):
        rollouts.add_column(name, justify="left" if name in ("rollout", "task", "outcome") else "right")
    for record in result.records:
        rollouts.add_row(
            record.rollout_id,
            record.task_id,
            str(record.outcome),
            "–" if record.reward is None else f"{record.reward:g}",
            str(record.call_count),
            str(record.trainable_calls),
            str(record.completion_tokens),
            f"{record.wall_s or 0:.1f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(rollouts)
    for reason, ids in reasons(result).items():
        which = ids[0] if len(ids) == 1 else f"{len(ids)} rollouts"
        console.print(f"{which}: {reason}", style="yellow", markup=False)
    if len(result.records) > len(result.groups):
        console.print(group_table(result))


def reasons(result: BatchResult) -> dict[str, list[str]]:
    """What went wrong, each once, and in which rollouts."""
    ids: dict[str, list[str]] = {}
    for record in result.records:
        if record.error or record.reward is None:
            ids.setdefault(str(record.error or record.reward_reason), []).append(record.rollout_id)
    return ids


def group_table(result: BatchResult) -> Any:
    """Mean reward and pass@k of each task, over the members that have a reward."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    sizes = sorted({1, max(len(group.records) for group in result.groups)})
    table.add_column("task")
    for name in ("rewarded", "mean", *(f"pass@{k}" for k in sizes)):
        table.add_column(name, justify="right")
    for group in result.groups:
        chances = [group.pass_at(k) for k in sizes]
        table.add_row(
            group.task_id,
            f"{len(group.rewards)} of {len(group.records)}",
            "–" if group.mean is None else f"{group.mean:.2f}",
            *("–" if chance is None else f"{chance:.2f}" for chance in chances),
        )
    return table
