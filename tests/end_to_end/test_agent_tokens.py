"""Every shipped agent in token mode: one conversation is one sample, and the engine's log is what is stored."""

import asyncio
import json
from itertools import pairwise
from pathlib import Path

import pytest

from capture.token_engine import Reply, TokenEngine, tool_call
from capture.tokens.harness import tokenizer_folder
from paddock.agents import AGENTS, find_agent
from paddock.agents.base import AgentTools, ToolUse
from paddock.capture.trace import Call, Role
from paddock.export.samples import samples
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.rollouts import RunConfig, Task, run_rollout
from paddock.rollouts.graph import Graph
from paddock.sandbox.base import WORKDIR
from paddock.store import Store
from rollouts.played import needs_bwrap

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(150, func_only=True), needs_bwrap]

SHIPPED = [name for name in AGENTS if find_agent(name).tools is not None]
TIMEOUTS = RolloutTimeouts(agent=90, verifier=30, model_call=60)
THOUGHT = "<think>\nThe rollouts and their files are next, I suppose.\n</think>\n\n"
TASK = Task(
    "Write 42 to answer.txt, without a line break at its end.\nThen copy it to copy.txt.",
    id="tokens",
    verifier='[ "$(cat copy.txt)" = 42 ] && right=1; echo "${right:-0}" > /logs/verifier/reward.txt',
    timeouts=TIMEOUTS,
)


def turn(use: ToolUse) -> str:
    name, arguments = use
    return f"{THOUGHT}I am at it, step by step.\n{tool_call(name, **arguments)}"


def script_of(tools: AgentTools) -> list[str]:
    uses = [tools.write(str(WORKDIR / "answer.txt"), "42"), tools.run("cp answer.txt copy.txt"), tools.run("ls -la")]
    last = f"{THOUGHT}It is done." if tools.finish is None else turn(tools.finish)
    return [*map(turn, uses), last]


async def run_agent(name: str, folder: Path, engine: str) -> tuple[Store, str, TokenEngine]:
    agent = find_agent(name)
    assert agent.tools is not None
    turns = script_of(agent.tools)

    def answer(prompt: str, calls: int) -> Reply | str:
        """The turn after so many answers of this conversation; a title for whoever asks with no tools."""
        if "<tools>" not in prompt:
            return "A short title"
        return turns[min(prompt.count("<|im_start|>assistant") - 1, len(turns) - 1)]

    store = Store.open(folder)
    async with TokenEngine(answer, engine) as model:
        endpoint = Endpoint(model.url, "real", engine=engine)
        config = RunConfig(
            model=endpoint, agent=name, token_mode=True, tokenizer=tokenizer_folder(), renderer="qwen3", store=store
        )
        record = await run_rollout(TASK, config)
    return store, record.rollout_id, model


def check_one_sample(calls: list[Call]) -> None:
    main = [call for call in calls if call.role is Role.AGENT]
    assert [(call.token_mode or {}).get("render") for call in main] == ["first"] + ["bridge"] * (len(main) - 1)
    for earlier, later in pairwise(main):
        ids = earlier.prompt_token_ids + earlier.completion_token_ids
        assert later.prompt_token_ids[: len(ids)] == ids, json.dumps(later.token_mode)
    nodes = Graph.of(main).nodes
    assert [node.drift.first_difference for node in nodes.values() if node.drift is not None] == [None] * (
        len(main) - 1
    )


@pytest.mark.parametrize("name", SHIPPED)
def test_a_rollout_of_an_agent_is_one_sample(name: str, tmp_path: Path) -> None:
    engine = ("vllm", "sglang", "llamacpp")[SHIPPED.index(name) % 3]
    store, rollout_id, model = asyncio.run(run_agent(name, tmp_path / "store", engine))
    try:
        calls, record = store.calls(rollout_id), store.get(rollout_id)
        assert record is not None
        assert (record.outcome, record.reward) == ("ok", 1.0), record.error
        assert len([call for call in calls if call.role is Role.AGENT]) >= 4
        ordered = sorted(calls, key=lambda call: call.prompt_token_ids)
        logged = sorted(model.calls, key=lambda each: each.prompt)
        assert [call.prompt_token_ids for call in ordered] == [each.prompt for each in logged]
        assert [call.completion_token_ids for call in ordered] == [each.sampled for each in logged]
        check_one_sample(calls)
        assert len(list(samples(record, [call for call in calls if call.role is Role.AGENT]))) == 1
    finally:
        store.close()
