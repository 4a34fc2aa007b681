import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from docs.session import HERE, Session, is_foreign
from paddock.models.replay import ReplayServer
from paddock.tasks import shipped

# Real agents take seconds of processor time. A page that needs one says `unset PADDOCK_OPENCODE`.
OPENCODE = HERE / "programs" / "opencode"
TASKS = ("fix-test", "shell-work")


@dataclass(frozen=True, slots=True)
class Stored:
    """A store with a batch of two rollouts."""

    folder: Path
    batch: str


def model_script() -> dict[str, Any]:
    """What the model behind a URL plays: the shipped tasks, and those that pages make up."""
    script = json.loads((Path(shipped.__file__).parent / "replay.json").read_text())
    script["tasks"] += json.loads((HERE / "replay.json").read_text())
    return dict(script)


@pytest.fixture(scope="session")
def model_url() -> Iterator[str]:
    """A model behind a URL."""
    started, ended = threading.Event(), asyncio.Event()
    server = ReplayServer(model_script())

    async def serve() -> None:
        async with server:
            started.set()
            await ended.wait()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    yield server.url
    loop.call_soon_threadsafe(ended.set)
    thread.join(30)
    loop.close()


@pytest.fixture(scope="session")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("docs") / "store"
    command = [sys.executable, "-m", "paddock", "rollout", *TASKS, "--model", "demo", "--store", folder, "--json"]
    variables = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    done = subprocess.run(
        command, env={**variables, "PADDOCK_OPENCODE": str(OPENCODE)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return Stored(folder, json.loads(done.stdout.splitlines()[0])["batch_id"])


@pytest.fixture
def session(tmp_path: Path, model_url: str, stored: Stored) -> Session:
    shutil.copytree(stored.folder, tmp_path / "store")
    return Session(tmp_path, model_url, stored.batch, {"PADDOCK_OPENCODE": str(OPENCODE)})
