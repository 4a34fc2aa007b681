"""A trainer that holds Paddock's client in one hand and the real Fleet SDK in the other."""

import asyncio
import sys
from collections.abc import Iterator

import pytest

from paddock.fleet import FleetTaskEnv, TaskEvaluator, evaluate_task, upload_trace
from paddock.fleet.client.errors import FleetError, FleetTimeout
from paddock.fleet.client.jobs import Evaluation
from paddock.fleet.client.plane_client import PlaneClient
from paddock.fleet.client.settings import plane_address

from .processes import HERE, Server, free_port, run_client, serving

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120, func_only=True)]

KEY = "key-of-the-plane"
TASK = {"task_key": "t-1", "env_key": "notes", "prompt": "p", "verifier_code": "def verify(env):\n    return 1.0\n"}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port, folder = free_port(), tmp_path_factory.mktemp("plane")
    command = [sys.executable, HERE / "servers" / "fleet_plane.py", str(port), folder / "state", KEY]
    with serving("paddock", command, port, folder / "log", ends_with=0) as server:
        yield server


def test_the_sdk_verifies_on_our_handle(plane: Server) -> None:
    assert run_client("fleet_and_paddock", "fleet_by_hand.py", plane.url, KEY)["by_hand"] == {
        "keyword": [True, 1.0, "asked for milk\n", True],
        "positional": [True, 0.0, "asked for None\n", True],
        "broken": [False, None],
        "score": 1.0,
        "tools": None,
        "task_env": [True, 1.0, "asked for None\n", True],
        "running": 0,
        "unmatched": [],
    }


def test_a_job_that_does_not_run_is_a_timeout_that_names_it(plane: Server) -> None:
    evaluator = TaskEvaluator(KEY, 2, ["a", "b"], poll_interval_s=0.05, max_wait_s=0.5, base_url=plane.url)
    with pytest.raises(FleetTimeout, match="job"):
        asyncio.run(evaluator.evaluate(TASK))


def test_scores_are_read_by_model_and_unknown_ones_are_none(plane: Server) -> None:
    async def main() -> Evaluation:
        async with FleetTaskEnv(TASK, KEY, base_url=plane.url) as env:
            await env.reset_async()
            await env.step_async({"done": True})
            execution = env._last_verifier_execution_id
        options = {"models": ["a", "b", "c"], "poll_interval_s": 1.0, "base_url": plane.url}
        evaluating = asyncio.create_task(evaluate_task({**TASK, "task_key": "t-2"}, KEY, **options))
        job = await job_of(plane, "evaluate t-2")
        for model, expected in (("provider/a", execution), ("b", None)):
            chat = [{"role": "user", "content": "p"}]
            await upload_trace(KEY, job, "t-2", model, chat, verifier_execution_id=expected, base_url=plane.url)
        return await evaluating

    completed = asyncio.run(main())
    assert (completed.status, completed.scores) == ("completed", {"a": [1.0], "b": [None], "c": []})
    assert completed.means == {"a": 1.0, "b": None, "c": None}


async def job_of(plane: Server, name: str) -> str:
    control = PlaneClient(plane_address(KEY, plane.url))
    while True:
        listed = await control.get_json("/v1/jobs", seconds=5.0)
        for job in listed["jobs"]:
            if job["name"] == name:
                return str(job["id"])


def test_a_refused_evaluation_is_an_error(plane: Server) -> None:
    with pytest.raises(FleetError):
        asyncio.run(evaluate_task(TASK, "wrong-key", models=["a"], base_url=plane.url))
