"""What an actor that was killed leaves on its node goes when the next one comes."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from paddock.processes import process_start_time
from paddock.scale import instance_actor


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"paddock-instances-{os.getuid()}"


def left_behind(root: Path, name: str, process: subprocess.Popen[bytes]) -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "process").write_text(f"{process.pid} {process_start_time(process.pid)}")
    return folder


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"], start_new_session=True)


def test_the_folder_and_the_process_of_a_killed_actor_are_removed(root: Path) -> None:
    with sleeper() as orphan:
        folder = left_behind(root, "999999999-1", orphan)
        own = instance_actor._own_folder()
        assert orphan.wait(5) == -9
    assert not folder.exists()
    assert [each.name for each in root.iterdir()] == [own.name]


def test_those_of_a_living_actor_stay(root: Path) -> None:
    with sleeper() as other, sleeper() as instance:
        try:
            folder = left_behind(root, f"{other.pid}-{process_start_time(other.pid)}", instance)
            instance_actor._own_folder()
            assert folder.exists()
            assert instance.poll() is None
        finally:
            other.kill()
            instance.kill()
