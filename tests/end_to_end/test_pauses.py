"""A weight update in the middle of a rollout, with the real agent programs."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paddock.agents import find_agent
from paddock.limits import RolloutTimeouts
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.batch import Batch
from paddock.rollouts.config import RunConfig
from paddock.rollouts.context import open_run
from paddock.rollouts.rollout import Rollout
from paddock.store import Store
from rollouts.played import a_task, needs_bwrap, run

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True), needs_bwrap]

KEEP_ALIVE_SECONDS = 0.2
PAUSED_SECONDS = 1.5
TIMEOUTS = RolloutTimeouts(install=60, sandbox=30, setup=30, agent=60, verifier=30)
AGENTS = {
    "opencode": "finish",
    "codex": "abort",
    "claude-code": "abort",
    "gemini-cli": "abort",
    "pi": "finish",
    "qwen-code": "finish",
}


@pytest.fixture
def _many_keep_alives(monkeypatch: pytest.MonkeyPatch) -> None:
    make = RunConfig.capture_settings

    def with_keep_alives(config: RunConfig, **fields: Any) -> Any:
        return replace(make(config, **fields), keep_alive=KEEP_ALIVE_SECONDS)

    monkeypatch.setattr(RunConfig, "capture_settings", with_keep_alives)


def script_for(name: str, in_flight: str) -> dict[str, Any]:
    """Two commands and a text. The second call hangs if it is to be cut off. Otherwise the first one takes a while,
    so that the pause begins during it."""
    tools = find_agent(name).tools
    assert tools is not None
    commands = [tools.run(command) for command in ("echo 4 > answer.txt", "echo 42 > answer.txt")]
    turns = [{"tool": tool, "arguments": arguments} for tool, arguments in commands]
    fault = {"turn": 1, "hang": 60} if in_flight == "abort" else {"turn": 0, "delay": 1.0}
    return {"turns": [*turns, {"text": "Done."}], "faults": [fault]}


@pytest.mark.usefixtures("_many_keep_alives")
@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_does_not_notice_a_weight_update(name: str, tmp_path: Path) -> None:
    in_flight: Any = AGENTS[name]

    async def body() -> tuple[Any, list[Any], ReplayServer]:
        changed = asyncio.Event()
        rollouts: list[Rollout] = []

        def follow(rollout: Rollout) -> None:
            rollouts[:] = [rollout]
            changed.set()

        async def until(condition: Any) -> None:
            while not (rollouts and condition(rollouts[0].record)):
                changed.clear()
                await changed.wait()

        async with ReplayServer(script_for(name, in_flight)) as server:
            endpoint = Endpoint(server.url, "replay", engine="vllm")
            config = RunConfig(model=endpoint, agent=name, store=tmp_path, weight_version=1, retries=0)
            async with open_run(config) as context:
                batch = Batch([a_task(timeouts=TIMEOUTS)], context, on_change=follow)
                running = asyncio.create_task(batch.run())
                if in_flight == "abort":
                    await until(lambda record: record.call_count >= 1)
                while not context.gate.in_flight:
                    await asyncio.sleep(0.01)
                async with batch.paused(in_flight, weight_version=2) as report:
                    assert report.in_flight == 0
                    await until(lambda record: record.stage == "paused")
                    await asyncio.sleep(PAUSED_SECONDS)
                (record,) = (await running).records
                return record, context.store.calls(record.rollout_id), server

    record, calls, server = run(body(), seconds=90)
    assert (str(record.outcome), record.reward) == ("ok", 1.0), record.error
    assert record.pauses["count"] == 1
    assert record.pauses["seconds"] >= PAUSED_SECONDS
    work = [call for call in calls if call.request.get("tools")]
    assert [call.weight_version for call in work] == ["1", "2", "2"]
    assert [call.role for call in work] == ["agent"] * 3
    assert [len(call.attempts) for call in work] == [0, int(in_flight == "abort"), 0]
    assert all(call.trainable for call in work)
    live_turns = [served.turn for served in server.log if served.request.get("tools")]
    assert live_turns == ([0, 1, 1, 2] if in_flight == "abort" else [0, 1, 2])
    with Store.open(tmp_path) as store:
        assert store.open_sandboxes() == []
