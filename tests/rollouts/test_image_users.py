"""Users that a sandbox cannot have are a fault of the task, found before the agent starts."""

import os
from pathlib import Path

import pytest

from paddock.agents.command import CommandAgent
from paddock.config import PADDOCK_IMAGES
from paddock.sandbox import bwrap_image
from paddock.sandbox.images import store as image_store
from paddock.sandbox.user_namespace import NOBODY, Identity, IdRange
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.tasks.settings import AgentSettings, TaskImage, TaskSettings, VerifierSettings
from sandbox.image_roots import make_image

from .played import a_task, needs_bwrap, rolled

pytestmark = needs_bwrap


@pytest.mark.parametrize(
    ("settings", "is_single", "reason"),
    [
        (TaskSettings(agent=AgentSettings("ghost")), False, "user ghost: there is no such user"),
        (TaskSettings(verifier=VerifierSettings(user="ghost")), False, "user ghost: there is no such user"),
        (TaskSettings(verifier=VerifierSettings(user="bob")), True, "cannot run as bob: this machine"),
    ],
)
def test_a_user_that_a_sandbox_cannot_have_is_reported_before_the_agent_starts(
    settings: TaskSettings, is_single: bool, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PADDOCK_IMAGES.name, str(tmp_path / "images"))
    if is_single:
        uid, gid = (NOBODY, NOBODY) if os.geteuid() == 0 else (os.geteuid(), os.getegid())
        single = Identity("single", (IdRange(0, uid, 1),), (IdRange(0, gid, 1),), "chosen by the test")
        monkeypatch.setattr(image_store, "find_identity", lambda: single)
        monkeypatch.setattr(bwrap_image, "find_identity", lambda: single)
    make_image(tmp_path)
    task = a_task("", tests={"test.sh": b"exit 0"}, image=TaskImage("small"), settings=settings)
    with Store.open(tmp_path) as store:
        record = rolled(store, CommandAgent("true"), task=task)
    assert (record.outcome, record.reward) == (Outcome.TASK, None)
    assert reason in str(record.error)
