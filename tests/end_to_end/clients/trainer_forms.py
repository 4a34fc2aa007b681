"""Exports of a store, read by the trainers' own packages. Also our integrations with two of them."""

import asyncio
import json
import logging
import sys
import typing
from io import BytesIO
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "grpo_tiny"))

import typing_extensions
from report import report

from paddock.export.policy import Policy
from paddock.export.samples import samples
from paddock.export.stream import check, export, read_rollouts, select_keys
from paddock.store import Store


def opened(folder: str) -> Store:
    return Store.open(folder, read_only=True)


def lines(store: Store, form: str) -> list[dict[str, Any]]:
    out = BytesIO()
    export(store, form, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def checked(folder: str, *_: str) -> dict[str, list[Any]]:
    collected = {}
    with opened(folder) as store:
        for form in ("trl", "skyrl", "verl", "tinker", "verifiers", "atif", "parquet"):
            texts: list[str] = []
            done = check(store, form, on_finding=lambda finding, texts=texts: texts.append(finding.text))
            collected[form] = [done.documents, done.accepted, done.wrong, texts if done.wrong else []]
    return collected


def skyrl_joins(folder: str, *_: str) -> dict[str, Any]:
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.generators.utils import concatenate_generator_outputs

    with opened(folder) as store:
        outputs = lines(store, "skyrl")
    for output in outputs:
        output["trajectory_ids"] = [TrajectoryID(**each) for each in output["trajectory_ids"]]
    whole = concatenate_generator_outputs(outputs, step_wise=True)
    return {"rows": len(whole["response_ids"]), "last": sum(whole["is_last_step"]), "rewards": whole["rewards"]}


def verl_tensors(folder: str, *_: str) -> list[Any]:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    with opened(folder) as store:
        made = [AgentLoopOutput(**line).as_dict() for line in lines(store, "verl")]
    worth = [round(each["rm_scores"].sum().item(), 4) for each in made]
    return [[len(each["prompts"]), each["response_mask"].tolist(), worth[at]] for at, each in enumerate(made)]


def tinker_agrees(folder: str, *_: str) -> list[bool]:
    """The cookbook makes the same data of a trajectory as we do."""
    import tinker
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.types import Trajectory, Transition

    from paddock.export.tinker import datum

    agreed = []
    with opened(folder) as store:
        for about, calls in read_rollouts(store, select_keys(store), whole=False):
            ours = [datum(sample, advantage=0.5) for sample in samples(about, calls)]
            named = {call.id: call for call in calls}
            for sample, mine in zip(samples(about, calls), ours, strict=True):
                turns = [
                    Transition(
                        ob=tinker.ModelInput.from_ints(list(named[name].prompt_token_ids)),
                        ac=TokensWithLogprobs(
                            tokens=list(named[name].completion_token_ids), maybe_logprobs=list(named[name].logprobs)
                        ),
                        reward=0.0,
                        episode_done=False,
                    )
                    for name in sample.calls
                ]
                (theirs,) = trajectory_to_data(Trajectory(turns, tinker.ModelInput.from_ints([])), 0.5)
                same = theirs.model_input.to_ints() == mine["model_input"]["chunks"][0]["tokens"]
                for name, tensor in theirs.loss_fn_inputs.items():
                    values = mine["loss_fn_inputs"][name]["data"]
                    pairs = zip(tensor.tolist(), values, strict=True)
                    same = same and all(abs(one - other) < 1e-6 for one, other in pairs)
                agreed.append(same)
    return agreed


def verifiers_branches(folder: str, *_: str) -> list[Any]:
    from verifiers.v1 import WireTrace

    with opened(folder) as store:
        traces = [WireTrace.model_validate(line) for line in lines(store, "verifiers")]
    return [
        [trace.reward, [[branch.token_ids, [int(each) for each in branch.sampled_mask]] for branch in trace.branches]]
        for trace in traces
    ]


def parquet_reads(folder: str, *_: str) -> list[Any]:
    import tempfile

    from datasets import Dataset

    with opened(folder) as store, tempfile.TemporaryDirectory() as out:
        target = Path(out) / "rollouts.parquet"
        export(store, "parquet", target, policy=Policy())
        rows = Dataset.from_parquet(str(target), cache_dir=out)
        return [[row["rollout_id"], row["reward"], len(row["response_ids"]), sum(row["mask"])] for row in rows]


def skyrl_text_env(_: str, url: str, *__: str) -> dict[str, Any]:
    from skyrl_gym import make, register

    from paddock.train.skyrl import text_env

    register("paddock", entry_point=text_env(url))
    env = make("paddock", env_config={}, extras={"max_turns": 5})
    visible, _ = env.init([{"role": "user", "content": "count"}])
    call = '<tool_call>{"name": "act", "arguments": {"amount": 3}}</tool_call>'
    first = env.step(call)
    second = env.step(call)
    unknown = env.step(call.replace("act", "jump"))
    last = env.step("I am done.")
    metrics = env.get_metrics()
    env.close()
    return {
        "roles": [message["role"] for message in visible],
        "rewards": [first["reward"], second["reward"], last["reward"]],
        "done": [first["done"], second["done"], last["done"]],
        "said": first["observations"][0]["content"],
        "unknown": [unknown["reward"], unknown["observations"][0]["content"]],
        "metrics": metrics,
    }


def skyrl_generator(_: str, url: str, script: str) -> dict[str, Any]:
    import tempfile

    from skyrl.train.generators.base import BatchMetadata, TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from paddock.train.skyrl import generator

    with tempfile.TemporaryDirectory() as store:
        made = generator(f"replay:{script}", environment=url, store=store, parallel=2)
        prompts = [[{"role": "user", "content": "count to six"}]] * 2
        batch = {
            "prompts": prompts,
            "env_classes": ["paddock"] * 2,
            "env_extras": None,
            "sampling_params": None,
            "trajectory_ids": [TrajectoryID("a", 0), TrajectoryID("a", 1)],
            "batch_metadata": BatchMetadata(global_step=7, training_phase="train"),
        }
        output = asyncio.run(made.generate(batch))
        made.close()
        with Store.open(store, read_only=True) as reopened:
            result = [
                call for _, calls in read_rollouts(reopened, select_keys(reopened), whole=True) for call in calls
            ]
            versions = {call.weight_version for call in result}
    validate_generator_output(2, output, step_wise=True)
    return {
        "rewards": output["rewards"],
        "last": output["is_last_step"],
        "metrics": output["rollout_metrics"],
        "versions": sorted(map(str, versions)),
    }


def skyrl_generates_at_once(_: str, url: str, script: str) -> dict[str, Any]:
    """Two agents and two environments, in calls that run beside each other, as in the asynchronous trainer."""
    import tempfile

    from skyrl.train.generators.base import BatchMetadata
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from paddock.train.skyrl import generator
    from paddock.train.sources import Source

    with tempfile.TemporaryDirectory() as store:
        options: dict[str, Any] = {"environment": url, "store": store, "parallel": 4}
        one = Source.create(f"replay:{script}", name="one", **options)
        made = generator([one, Source.create(f"replay:{script}", name="two", max_steps=1, silent=0.0, **options)])

        def batch(name: str, step: int) -> dict[str, Any]:
            prompts = [[{"role": "user", "content": "count to six"}]] * 2
            metadata = BatchMetadata(global_step=step, training_phase="train")
            return {"prompts": prompts, "env_classes": [name] * 2, "batch_metadata": metadata}

        async def both() -> list[dict[str, Any]]:
            return await asyncio.gather(made.generate(batch("one", 3)), made.generate(batch("two", 2)))

        outputs = asyncio.run(both())
        made.close()
    for output in outputs:
        validate_generator_output(2, output, step_wise=True)
    return {
        "rewards": [sorted(set(output["rewards"])) for output in outputs],
        "versions": [output["rollout_metrics"]["paddock/newest_version"] for output in outputs],
        "times": [len(output["trajectory_generation_times"]) for output in outputs],
    }


class VerlServers:
    """In place of verl's servers: each token has the version after the one before."""

    def __init__(self) -> None:
        self.step = 4

    async def generate(self, **_: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        self.step += 1
        return TokenOutput(token_ids=[1], log_probs=[0.0], extra_fields={"global_steps": self.step})


def verl_asks_the_servers(_: str, url: str, script: str) -> dict[str, Any]:
    """The fully asynchronous recipe has no step in its rows; the servers know it."""
    import tempfile

    from paddock.train.verl import PaddockAgentLoop

    with tempfile.TemporaryDirectory() as store:
        sources = {"counting": {"environment": url}, "other": {"environment": "http://127.0.0.1:1"}}
        options: dict[str, Any] = {"model": f"replay:{script}", "sources": sources, "store": store, "tokenizer": None}
        loop = PaddockAgentLoop(None, VerlServers(), versions="server", **options)
        row = {"raw_prompt": [{"role": "user", "content": "count to six"}], "data_source": "counting"}
        output = asyncio.run(loop.run({"temperature": 1.0}, **row))
        loop._rollouts.close()
    return {
        "reward": output.reward_score,
        "steps": [output.extra_fields[f"{n}_global_steps"] for n in ("min", "max")],
    }


def make_counting_task(messages: list[dict[str, Any]]) -> Any:
    from paddock.rollouts import Task

    return Task(messages[-1]["content"], id="counting")


def verl_makes_our_loop(_: str, url: str, script: str) -> dict[str, Any]:
    """As verl's worker does it, from an entry of its config file."""
    import tempfile

    import hydra
    from omegaconf import OmegaConf
    from verl.experimental.agent_loop.agent_loop import DictConfigWrap, ToolListWrap

    from paddock.train import verl

    with tempfile.TemporaryDirectory() as store:
        options = {"_target_": "paddock.train.verl.PaddockAgentLoop", "model": f"replay:{script}", "store": store}
        sources = {"counting": {"environment": url}, "other": {"environment": url, "max_steps": 1}}
        make_task = f"{__name__}.make_counting_task"
        entries = OmegaConf.create(
            [
                {"name": "paddock", **options, "environment": url},
                {"name": "several", **options, "sources": sources, "make_task": make_task},
            ]
        )
        lengths = {"prompt_length": 5, "response_length": 60}
        trainer = OmegaConf.create({"actor_rollout_ref": {"rollout": lengths}, "data": {}})
        row = {"raw_prompt": [{"role": "user", "content": "count to six"}], "data_source": "counting"}

        async def run(entry: Any, **changes: Any) -> Any:
            given = {name: None for name in ("server_manager", "tokenizer", "processor", "dataset_cls")}
            wrapped = {"trainer_config": DictConfigWrap(trainer), "data_config": DictConfigWrap(trainer.data)}
            made = {**given, **wrapped, "hf_model_type": None, "tools": ToolListWrap([])}
            return await hydra.utils.instantiate(config=entry, **made).run({"temperature": 1.0}, **row)

        async def work() -> list[Any]:
            return [await run(entry) for entry in (*entries, entries[0])]

        verl._OPEN.clear()
        outputs = asyncio.run(work())
        shared = len(verl._OPEN)
        for rollouts in verl._OPEN.values():
            rollouts.close()
    return {
        "rewards": [output.reward_score for output in outputs],
        "task": outputs[1].extra_fields["task_id"],
        "lengths": [[len(output.prompt_ids), len(output.response_ids)] for output in outputs],
        "masked": outputs[0].response_mask[0],
        "cut": outputs[0].extra_fields["cut_off_tokens"] > 0,
        "shared": shared,
    }


class Guesser:
    """In place of Tinker's sampling: guesses 4, then what is left above or below."""

    async def __call__(self, model_input: Any, stop: Any, *, max_tokens: int | None = None) -> Any:
        import words
        from tinker_cookbook.completers import TokensWithLogprobs

        text = words.decode(model_input.to_ints())
        number = 4 + 2 * text.count("higher") - 2 * text.count("lower")
        ids = words.call_ids("guess", number)
        return TokensWithLogprobs(tokens=ids, maybe_logprobs=[-0.1] * len(ids))


def tinker_groups(*_: str) -> dict[str, Any]:
    """The cookbook rolls out a group; we run the agent and the environment."""
    import pickle
    import tempfile

    import game
    import words
    from tinker_cookbook.rl.data_processing import trajectory_to_data
    from tinker_cookbook.rl.rollouts import do_group_rollout

    from paddock.rollouts import Task
    from paddock.rollouts.loop import LoopAgent, LoopLimits
    from paddock.train.tinker import PaddockGroupBuilder, close_groups

    async def roll(options: dict[str, Any]) -> Any:
        task = Task(game.PROMPT, id="find", metadata={"seed": 5})
        builder = pickle.loads(pickle.dumps(PaddockGroupBuilder(task, options)))
        try:
            return await do_group_rollout(builder, Guesser())
        finally:
            await close_groups()

    with tempfile.TemporaryDirectory() as folder:
        tokenizer = words.write_tokenizer(Path(folder) / "tokenizer")
        agent = LoopAgent(LoopLimits(steps=game.GUESSES), system=None)
        options = {"environment": game.Game, "agent": agent, "tokenizer": str(tokenizer), "renderer": "default"}
        group = asyncio.run(roll({**options, "n": 2, "store": Path(folder) / "store"}))
    data = [trajectory_to_data(each, 1.0) for each in group.trajectories_G]
    return {
        "rewards": group.get_total_rewards(),
        "turns": [len(each.transitions) for each in group.trajectories_G],
        "data": [len(each) for each in data],
        "calls": [metrics["calls"] for metrics in group.metrics_G],
        "stop": [each.stop_reason for each in group.trajectories_G],
    }


def verl_loop(_: str, url: str, script: str) -> dict[str, Any]:
    import tempfile

    from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

    from paddock.train.verl import PaddockAgentLoop

    with tempfile.TemporaryDirectory() as store:
        loop = PaddockAgentLoop(None, None, model=f"replay:{script}", environment=url, store=store, tokenizer=None)
        row = {"raw_prompt": [{"role": "user", "content": "count to six"}], "global_steps": 3}
        output = asyncio.run(loop.run({"temperature": 1.0}, **row))
        loop._rollouts.close()
    return {
        "kinds": [isinstance(loop, AgentLoopBase), isinstance(output, AgentLoopOutput)],
        "reward": output.reward_score,
        "steps": [output.extra_fields.get("min_global_steps"), output.extra_fields.get("max_global_steps")],
        "lengths": [len(output.response_ids), len(output.response_mask), len(output.response_logprobs)],
        "trained": sum(output.response_mask),
    }


logging.disable(logging.WARNING)
if sys.version_info < (3, 12):
    # SkyRL asks for a newer Python, and for this alone.
    typing.TypedDict = typing_extensions.TypedDict
report(
    checked,
    skyrl_joins,
    verl_tensors,
    tinker_agrees,
    verifiers_branches,
    parquet_reads,
    skyrl_text_env,
    skyrl_generator,
    skyrl_generates_at_once,
    verl_loop,
    verl_asks_the_servers,
    verl_makes_our_loop,
    tinker_groups,
)
