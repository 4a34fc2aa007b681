import subprocess
import sys
from pathlib import Path

import pytest

from paddock.tasks.datasets.cache import DatasetCache

MAKE = """
import sys, time
from pathlib import Path
from paddock.tasks.datasets.cache import DatasetCache
def make(folder):
    with open(sys.argv[2], "a") as file:
        file.write("made\\n")
    (folder / "one").write_text("1")
    time.sleep(0.3)
    (folder / "two").write_text("2")
print(sorted(path.name for path in DatasetCache(Path(sys.argv[1])).folder("git/k", make).iterdir()))
"""


def fail(folder: Path) -> None:
    (folder / "half").write_text("")
    raise KeyboardInterrupt


def test_an_interrupted_download_leaves_nothing(tmp_path: Path) -> None:
    cache = DatasetCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.folder("git/k", fail)
    assert [path.name for path in (tmp_path / "git").iterdir()] == ["k.lock"]


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "git/k.partial").mkdir(parents=True)
    (tmp_path / "git/k.partial/half").write_text("")
    folder = DatasetCache(tmp_path).folder("git/k", lambda place: (place / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_of_two_processes_one_fetches_and_both_have_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", MAKE, str(tmp_path / "cache"), str(log)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=30)[0] for process in running] == ["['one', 'two']\n"] * 2
    assert log.read_text() == "made\n"
