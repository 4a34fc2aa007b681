"""`paddock rollout TASK…` and `paddock rollout reverify ID`."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from paddock.cli import INTERRUPTED, complain, note, print_json, refuse_unused
from paddock.cli.interrupts import restored_handlers, run_async
from paddock.errors import ConfigError, TaskError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from paddock.rollouts.batch import BatchResult
    from paddock.rollouts.engine import Engine
    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.rollout import Rollout

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


@click.group("rollout", cls=WithDefault)
def command() -> None:
    """Run a coding agent on tasks, capture every token, and score its work.

    \b
    paddock rollout TASK… --model URL [options]     see: paddock rollout run --help
    paddock rollout reverify ID --tests FOLDER      score a finished rollout again
    """


@command.command("run")
@click.argument("tasks", nargs=-1, metavar="TASK…")
@click.option(
    "--agent", default="opencode", show_default=True, help="A name of `paddock agents`, or command:PROGRAM."
)
@click.option("--env", help="Where the agent loop works: a URL, or a target of `paddock serve`.")
@click.option("--prompt", help="The instruction, in place of a TASK.")
@click.option("--seed", type=click.IntRange(min=0), help="Seed of the environment. Default: what the task says.")
@click.option("--max-steps", default=50, show_default=True, help="Tool calls that the agent loop may make.")
@click.option("--driver", type=click.Choice(["run", "serve"]), help="How the agent is driven.")
@click.option(
    "--model", required=True, help="URL, demo, replay:FILE, local, vllm://REPO or hf-router://REPO:PROVIDER."
)
@click.option("--model-name", help="The model's name at the URL. Default: the first it lists.")
@click.option("--vllm-url", help="Where the server of a vllm:// model is.")
@click.option("-n", "--repeat", "n", default=1, show_default=True, help="Rollouts of each task.")
@click.option("--parallel", default=2, show_default=True, help="Rollouts at a time.")
@click.option(
    "--sandbox", default="bwrap", show_default=True, help="bwrap, docker, e2b, or process (isolates nothing)."
)
@click.option("--unsafe", is_flag=True, help="Consent to a sandbox that isolates nothing.")
@click.option("--mode", default="transparent_proxy", show_default=True, help="transparent_proxy, or black_box.")
@click.option("--max-tokens", default=4096, show_default=True, help="Tokens that one call may sample.")
@click.option("--max-calls", default=200, show_default=True, help="Model calls that one rollout may make.")
@click.option("--max-completion-tokens", type=int, help="Tokens that one rollout may sample in all.")
@click.option("--agent-timeout", type=float, help="Seconds for the agent. Default: what the task says.")
@click.option(
    "--stall-timeout",
    type=float,
    help="Seconds without a byte until a model call has stalled. Default: 60, at most a quarter of the agent's.",
)
@click.option("--temperature", default=1.0, show_default=True, help="Temperature of every call.")
@click.option("--top-logprobs", default=1, show_default=True, help="Alternatives to keep for each token, up to 20.")
@click.option("--thinking/--no-thinking", default=None, help="Turn the model's thinking on or off.")
@click.option("--context", "context_tokens", default=32768, show_default=True, help="Context the agent plans with.")
@click.option("--weight-version", help="Version of the model's weights, kept with calls whose engine tells none.")
@click.option("--retries", type=int, help="New tries after a failure outside the policy. Default: 2; lone: 0.")
@click.option("--resume", metavar="BATCH", help="Go on with a batch that was stopped.")
@click.option("--batch-id", metavar="NAME", help="Name of the batch. Default: a new one.")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
@click.option(
    "--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="Where to run."
)
@click.option("--ray-address", help="The Ray cluster. Default: RAY_ADDRESS, or one is started on this machine.")
@click.option("--rollout-cpus", type=click.FloatRange(min=0), help="Processors of its node for each. Default: 1.")
@click.option("--rollout-memory", type=click.IntRange(min=1), help="MiB of its node's memory for each.")
@click.option("--rollout-resources", help='More of its node for each, as JSON: {"sandbox_bwrap": 1}.')
@click.option("--rollouts-per-node", type=click.IntRange(1, 10_000), help="The most at a time on one node.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each rollout, as it ends.")
def run(
    tasks: tuple[str, ...],
    prompt: str | None,
    env: str | None,
    max_steps: int,
    as_json: bool,
    max_tokens: int,
    max_calls: int,
    **options: Any,
) -> int:
    """Run rollouts of TASK: a task folder, a folder of them, a .jsonl file, or a shipped task's name.

    With --agent loop the model works in the environment --env through its tools, and the environment scores it.

    The key of the model is read from PADDOCK_MODEL_API_KEY (or OPENAI_API_KEY, HF_TOKEN), and never
    enters the sandbox. Ends with 0 if every rollout has outcome ok, with 1 if not.
    """
    from paddock.rollouts.agents import load_agent
    from paddock.rollouts.limits import Budget
    from paddock.rollouts.loop.agent import LoopAgent, LoopLimits
    from paddock.rollouts.runs import run_batch
    from paddock.rollouts.shown import summarize
    from paddock.rollouts.task import Task
    from paddock.rollouts.taskset import load_tasks

    chosen = [task for spec in tasks for task in load_tasks(spec)] + ([Task(prompt)] if prompt else [])
    if not chosen:
        raise ConfigError("no task is given", hint="name a TASK, or say --prompt what to do")
    refuse_what_is_idle(options["agent"], options["mode"], scored=any(task.is_scored for task in chosen))
    refuse_vllm_url(options["model"])
    if env is not None:
        options |= {"env": find_environment(env), "env_name": None if is_url(env) else env}
    if options["agent"] == LoopAgent.name:
        load_agent(LoopAgent.name, driver=options.pop("driver"))
        options["agent"] = LoopAgent(LoopLimits(steps=max_steps))
    budget = Budget(
        calls=max_calls,
        completion_tokens=options.pop("max_completion_tokens"),
        max_tokens_per_call=max_tokens,
    )
    consent = options.pop("unsafe")
    options["engine"] = choose_engine(
        options["engine"],
        address=options.pop("ray_address"),
        cpus=options.pop("rollout_cpus"),
        memory=options.pop("rollout_memory"),
        custom=options.pop("rollout_resources"),
        per_node=options.pop("rollouts_per_node"),
    )
    batch_id = name_batch(options)
    work = partial(run_batch, chosen, budget=budget, consent=consent, **options)
    return watched(work, batch_id, total=len(chosen) * options["n"], as_json=as_json, shown=summarize)


def watched(
    work: Callable[..., Coroutine[Any, Any, BatchResult]],
    batch_id: str,
    *,
    total: int,
    as_json: bool,
    shown: Callable[[RolloutRecord], dict[str, Any]],
) -> int:
    """Run a batch before the user's eyes, and tell how it went: the exit code. `work` takes who follows it."""
    from paddock.cli.progress import RolloutProgress

    data = sys.stdout
    begun = False
    # Ray prints its own warnings to the standard output, which is for data only.
    with redirect_stdout(sys.stderr), RolloutProgress(total=total, words=not as_json) as progress:

        def settled(record: RolloutRecord) -> None:
            progress.settle(record)
            if as_json:
                print_json(shown(record), file=data)

        def show(rollout: Rollout) -> None:
            nonlocal begun
            begun = True
            progress.show(rollout)

        result = run_until_signal(work(on_change=show, on_settled=settled, log=progress.say))
    if result is None:
        if not begun:
            complain("interrupted before a rollout had begun")
            return INTERRUPTED
        complain("interrupted; what was under way is recorded as cancelled", f"go on with --resume {batch_id}")
        return INTERRUPTED
    report(result, as_json)
    return 0 if all(record.outcome == "ok" for record in result.records) else BROKEN


def refuse_what_is_idle(agent: str, mode: str, *, scored: bool) -> None:
    """Raise ConfigError for an option that this kind of rollout never looks at."""
    name = agent.partition(":")[0]
    if name != LOOP:
        refuse_unused("seed", "max_steps", why=f"the agent {name} has no environment", hint="add --agent loop")
    else:
        refuse_unused("context_tokens", why="the agent loop learns it from the model", hint="leave it out")
    if name == LOOP and not scored:
        why = "the agent loop works in its environment, and no task has tests to run"
        refuse_unused("sandbox", why=why, hint="leave it out, or give a TASK with tests")
    if mode == BLACK_BOX:
        why = "--mode black_box hands calls through as they are"
        refuse_unused("temperature", "top_logprobs", "thinking", why=why, hint="leave it or the mode out")


def refuse_vllm_url(model: str) -> None:
    if not model.startswith("vllm://"):
        refuse_unused("vllm_url", why="the model is no vllm:// one", hint="give --model vllm://REPO, or leave it out")


def name_batch(options: dict[str, Any]) -> str:
    """The batch to run or to go on with, set in the options. Raises ConfigError if there is none to go on with."""
    from contextlib import closing

    from paddock.rollouts.batch import new_batch_id
    from paddock.rollouts.resume import check_known
    from paddock.rollouts.store import Store

    resume: str | None = options["resume"]
    if resume is None:
        options["batch_id"] = options["batch_id"] or new_batch_id()
        return str(options["batch_id"])
    if options["batch_id"] is not None:
        raise ConfigError("both --resume and --batch-id are given", hint="--resume names the batch already")
    # Before a model is started for it.
    with closing(Store.open(options["store"])) as kept:
        check_known(kept, resume)
    return resume


def choose_engine(name: str, **given: Any) -> str | Engine:
    """The engine with its resources. Raises ConfigError for those of a cluster where there is none."""
    told = {option: value for option, value in given.items() if value is not None}
    if name != RAY:
        if told:
            raise ConfigError("rollouts of this machine take no options of a cluster", hint="add --engine ray")
        return name
    from paddock.scale.cluster import Resources
    from paddock.scale.rollouts import RayEngine

    resources = Resources.read(told.get("cpus", 1.0), told.get("memory"), told.get("custom"))
    return RayEngine(told.get("address"), resources, told.get("per_node"))


def is_url(environment: str) -> bool:
    return environment.startswith(("http://", "https://"))


def find_environment(named: str) -> str | Callable[[], Any]:
    """A URL as it is, a target as what makes its environments."""
    if is_url(named):
        return named
    from paddock.targets import load_target

    return load_target(named)[0]


@command.command("reverify")
@click.argument("rollout_id", metavar="ID")
@click.option("--tests", type=click.Path(path_type=Path, exists=True), help="A tests folder, or a test.sh.")
@click.option("--task", "task_spec", help="A task whose tests to use, as in `paddock rollout TASK`.")
@click.option("--timeout", default=300.0, show_default=True, help="Seconds for the tests.")
@click.option(
    "--sandbox", default="bwrap", show_default=True, help="bwrap, docker, e2b, or process (isolates nothing)."
)
@click.option("--unsafe", is_flag=True, help="Consent to a sandbox that isolates nothing.")
@click.option("--store", type=click.Path(path_type=Path), help="Where rollouts are kept. Also: PADDOCK_STORE.")
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
    from paddock.rollouts.runs import reverify

    files = read_tests(tests, task_spec, sandbox)
    work = reverify(rollout_id, files, store=store, sandbox=sandbox, consent=unsafe, timeout=timeout)
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


def read_tests(tests: Path | None, task_spec: str | None, sandbox: str) -> dict[str, bytes]:
    """The verifier's files, from a folder, from one script, or from a task."""
    from paddock.rollouts.task_needs import check_can_run
    from paddock.rollouts.taskset import load_tasks

    if (tests is None) == (task_spec is None):
        raise ConfigError("say which tests to use", hint="give --tests FOLDER, or --task TASK")
    if task_spec is not None:
        found = load_tasks(task_spec)
        if len(found) != 1:
            raise ConfigError(f"{task_spec} holds {len(found)} tasks", hint="name one task")
        check_can_run(found[0], sandbox)
        return dict(found[0].tests)
    assert tests is not None
    if tests.is_file():
        return {"test.sh": tests.read_bytes()}
    files = {str(path.relative_to(tests)): path.read_bytes() for path in tests.rglob("*") if path.is_file()}
    if "test.sh" not in files:
        raise TaskError(f"{tests} has no test.sh", hint="its test.sh is what gets run")
    return files


def run_until_signal(work: Coroutine[Any, Any, BatchResult]) -> BatchResult | None:
    """The result, or None after Ctrl-C or SIGTERM, once everything under way has been put away."""

    async def guarded() -> BatchResult | None:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, task.cancel)
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
            str(record.calls),
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
    found: dict[str, list[str]] = {}
    for record in result.records:
        if record.error or record.reward is None:
            found.setdefault(str(record.error or record.reward_reason), []).append(record.rollout_id)
    return found


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
