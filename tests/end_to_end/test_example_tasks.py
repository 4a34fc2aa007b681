"""The example tasks with images: built from Debian's and PyPI's packages, solved, and scored."""

import asyncio
from pathlib import Path

import pytest

from paddock.sandbox.images.store import default_store
from paddock.tasks.taskset import TaskSet
from paddock.testing.conformance import failed
from paddock.testing.task import TaskCheck
from rollouts.played import needs_bwrap

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900, func_only=True), needs_bwrap]

BASE = "debian:bookworm-slim"
EXAMPLES = TaskSet.from_folder(Path(__file__).parents[2] / "examples" / "tasks")


@pytest.fixture(scope="module", autouse=True)
def base_image() -> None:
    if default_store().find(BASE) is None:
        pytest.skip(f"{BASE} is not stored: python -m scripts.base_image makes it")


@pytest.mark.parametrize("name", EXAMPLES.ids)
def test_an_example_task_is_sound(name: str) -> None:
    results = asyncio.run(TaskCheck(EXAMPLES.select([name])[0]).run())
    assert failed(results) == []
    mode = "live" if name == "running-service" else "sealed"
    assert results[-1].detail == f"reward 1 ({mode})"
