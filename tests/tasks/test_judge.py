"""What the checks of the shipped tasks share, run in a process of its own as they run it."""

import subprocess
import sys
import time
from pathlib import Path

from paddock.tasks import shipped


def judge(code: str) -> str:
    """What `code` prints, with everything of the judge at hand."""
    tests = shipped()["write-program"] / "tests"
    program = f"import sys; sys.path.insert(0, {str(tests)!r}); import judge; from judge import *\n{code}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", program], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout.strip()


def test_a_program_that_hangs_is_ended() -> None:
    assert judge("print(run(['sleep', '60'], timeout=0.3)[0])") == "None"


def test_all_runs_together_have_an_end() -> None:
    began = time.monotonic()
    assert (
        judge("judge.ALL_RUNS_SECONDS = 0.5\nprint([run(['sleep', '60'])[0] for _ in range(50)].count(None))") == "50"
    )
    assert time.monotonic() - began < 20


def test_output_without_end_is_cut() -> None:
    assert judge("print(len(run(['yes'])[1]))") == "1000000"


def test_what_went_into_the_background_is_ended_and_not_waited_for() -> None:
    code = "print(run(['bash', '-c', 'setsid sleep 60 & echo hello'])[:2], judge._children())"
    began = time.monotonic()
    assert judge(code) == "(0, b'hello\\n') []"
    assert time.monotonic() - began < 20


def test_a_program_cannot_put_a_byte_into_a_file(tmp_path: Path) -> None:
    forged = tmp_path / "reward.txt"
    judge(f"run(['bash', '-c', 'echo 1.0 > {forged}'])")
    assert forged.read_bytes() == b""


def test_a_link_and_a_folder_are_not_read() -> None:
    assert judge("print(read('/proc/self/exe'), read('/'), read('/nowhere'))") == "None None None"
