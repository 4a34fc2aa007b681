"""The entry point of an image runs before the agent, and its waiting command does not count as work of the agent."""

import shlex
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from paddock.agents.command import CommandAgent
from paddock.config import PADDOCK_IMAGES
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.settings import TaskImage
from sandbox.image_roots import make_image

from .played import a_task, needs_bwrap, rolled

TESTS = b"if [ -e /app/prepared ] && [ -e /app/work ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"
DOCKERFILE = "FROM small\nCOPY --chmod=755 entry.sh /entry.sh\nENTRYPOINT {words}\n"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("entrypoint")
        patch.setenv(PADDOCK_IMAGES.name, str(folder / "images"))
        make_image(folder, workdir=PurePosixPath("/app"))
        yield


pytestmark = [needs_bwrap, pytest.mark.usefixtures("images")]


def roll(folder: Path, entry: str, words: str = '["/entry.sh"]') -> RolloutRecord:
    """The rollout of an agent that wants what the entry point prepared."""
    agent = CommandAgent(shlex.join(["/bin/sh", "-c", "[ -e /app/prepared ] && touch /app/work"]))
    files = {"entry.sh": f"#!/bin/sh\n{entry}\n".encode()}
    image = TaskImage(dockerfile=DOCKERFILE.format(words=words))
    with Store.open(folder) as store:
        return rolled(store, agent, task=a_task("", files=files, tests={"test.sh": TESTS}, image=image))


def test_the_entry_point_prepares_the_work(tmp_path: Path) -> None:
    record = roll(tmp_path, 'touch /app/prepared\nexec "$@"')
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error
    assert record.verifier["mode"] == "sealed"


def test_its_services_are_there_for_the_tests(tmp_path: Path) -> None:
    record = roll(tmp_path, 'touch /app/prepared\nsleep 1000 &\nexec "$@"')
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error
    assert record.verifier["mode"] == "live"
    assert "sleep 1000" in record.verifier["reason"]


def test_one_that_fails_does_not_stop_the_rollout(tmp_path: Path) -> None:
    record = roll(tmp_path, "", words='["/missing"]')
    assert (record.outcome, record.reward) == (Outcome.OK, 0.0), record.error
