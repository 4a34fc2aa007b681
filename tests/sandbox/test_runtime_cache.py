"""Folders that are made once per machine, and removed when nobody uses them any more."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from paddock.sandbox import runtime_cache
from paddock.sandbox.runtime_cache import UNUSED_SECONDS, remove_unused, use_folder

LATER = UNUSED_SECONDS + 60
USER = """
import sys
from pathlib import Path
from paddock.sandbox.runtime_cache import use_folder
use_folder(Path(sys.argv[1]), lambda ready: (ready / "content").write_text("made"))
print("used", flush=True)
sys.stdin.read()
"""


def fill(ready: Path) -> None:
    (ready / "content").write_text("made")


@pytest.fixture(autouse=True)
def no_folders_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_cache, "_used", {})


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    made: list[Path] = []
    for _ in range(3):
        use_folder(tmp_path / "cache" / "made", made.append)
    assert len(made) == 1


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    use_folder(tmp_path / "made", fill)
    (tmp_path / "made" / "content").unlink()
    (tmp_path / "made").rmdir()
    use_folder(tmp_path / "made", fill)
    assert (tmp_path / "made" / "content").exists()


def test_an_unused_folder_is_removed_after_a_while(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    with subprocess.Popen(
        [sys.executable, "-c", USER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"used\n"
        assert remove_unused(tmp_path, now=time.time() + LATER) == []
        user.communicate(timeout=20)
    assert remove_unused(tmp_path) == []
    assert remove_unused(tmp_path, now=time.time() + LATER) == [folder]
    assert not folder.exists()


def test_what_a_killed_process_left_goes_after_a_day(tmp_path: Path) -> None:
    (tmp_path / ".scratch-x" / "ready").mkdir(parents=True)
    remove_unused(tmp_path)
    assert (tmp_path / ".scratch-x").exists()
    remove_unused(tmp_path, now=time.time() + 2 * 86400)
    assert not (tmp_path / ".scratch-x").exists()
