"""A trainer that is killed at any moment, and started again, trains on every group exactly once."""

import subprocess
import sys
from pathlib import Path

import pytest

from paddock.errors import StoreError
from paddock.store import Store
from paddock.train.stream_state import StreamState

GROUPS = 8
TRAINER = """
import asyncio, os, signal, sys
from pathlib import Path
from train.streaming import Place, Streams, tasks

async def work(folder, log, deadly):
    options = {"name": "run", "batch_size": 2, "rounds": 1, "zero_advantage": "keep"}
    async with Streams(folder) as streams:
        async with streams.stream(streams.source(Place(), tasks(8)), **options) as stream:
            while batch := await stream.take():
                if deadly and stream.version == deadly:
                    os.kill(os.getpid(), signal.SIGKILL)
                await stream.acknowledge()
                with log.open("a") as file:
                    file.writelines(f"{group.task.id} {group.staleness}\\n" for group in batch)
                await stream.update_weights(stream.version + 1)

asyncio.run(work(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])))
"""
HOLDER = """
import sys
from pathlib import Path
from paddock.train.stream_state import StreamState

state = StreamState(Path(sys.argv[1]), "run")
print("open", flush=True)
sys.stdin.read()
"""


def train(folder: Path, deadly: int) -> int:
    """Train until the end, or until the version at which the trainer kills itself with a batch in its hands."""
    command = [sys.executable, "-c", TRAINER, folder / "store", folder / "log", str(deadly)]
    tests = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tests)
    assert done.returncode in (0, -9), done.stderr
    return done.returncode


def test_two_processes_do_not_have_one_stream(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    command = [sys.executable, "-c", HOLDER, folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline()
        StreamState(folder, "other").close()
        with pytest.raises(StoreError, match="another process has the stream run open"):
            StreamState(folder, "run")
        holder.kill()
    StreamState(folder, "run").close()


def test_every_group_is_acknowledged_once_if_the_trainer_is_killed(tmp_path: Path) -> None:
    assert [train(tmp_path, deadly) for deadly in (2, 0)] == [-9, 0]
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    assert sorted(task for task, _ in lines) == sorted(f"t{number}" for number in range(GROUPS))
    assert max(int(staleness) for _, staleness in lines) <= 1
    with Store.open(tmp_path / "store", read_only=True) as store:
        finished = [record.task_id for record in store.list() if record.reward is not None]
    assert len(finished) == 2 * GROUPS
