"""The tests that docs/rollouts.md shows to authors of tasks, run as they stand there."""

import re
from pathlib import Path

import pytest

from rollouts.played import needs_bwrap
from rollouts.test_forged_rewards import PRELUDE
from rollouts.test_verifier import sealed, verdict

pytestmark = needs_bwrap

TEXT = Path(__file__).parents[2].joinpath("docs/rollouts.md").read_text()
_, _, EXAMPLE = TEXT.partition("One whole example, `tests/test.sh`:")
SCRIPT, CHECK = re.findall(r"```(?:sh|python)\n(.*?)```", EXAMPLE, re.DOTALL)[:2]
(ONE_LINE,) = re.findall(r'verifier="(.*)",\n', TEXT)
RIGHT = "a, b = map(int, input().split())\nprint(a + b)\n"
ATTACKS = {
    "wrong": "print(5)",
    "reads the tests": "import re\nprint(re.findall(r'\\d+', open('/tests/check.py').read())[0])",
    "writes the reward": "pay()",
    "kills": "os.kill(-1, signal.SIGKILL)",
    "stops": "os.kill(os.getppid(), signal.SIGSTOP); time.sleep(1)",
    "changes its input": "open('/proc/self/fd/0', 'w').write('0 5')\nprint(5)",
    "leaves a racer": "if os.fork() == 0:\n    os.setsid()\n    time.sleep(0.3)\n    pay()\n",
    "prints without end": "while True:\n    print(5)",
}


def score(program: str, **more: str) -> float | None:
    return verdict(SCRIPT, sealed(**{"add.py": program, **more}), timeout=30.0, **{"check.py": CHECK}).reward.value


def test_the_example_scores_a_right_program() -> None:
    assert score(RIGHT) == 1.0
    assert score("print(5)") == 0.5


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_example_is_not_deceived(attack: str) -> None:
    assert score(PRELUDE + ATTACKS[attack]) in (None, 0.0, 0.5)


@pytest.mark.parametrize(
    "name", ["subprocess.py", "pathlib.py", "sitecustomize.py", "usercustomize.py", "python3", "paddock-run"]
)
def test_the_example_takes_nothing_from_the_work_folder(name: str) -> None:
    assert score("", **{name: f"#!/usr/bin/python3\n{PRELUDE}pay()\nos._exit(0)"}) == 0.0


def test_the_verifier_in_one_line_works() -> None:
    assert verdict(ONE_LINE, sealed(**{"hello.py": "print('hello')"})).reward.value == 1.0
    assert verdict(ONE_LINE, sealed(**{"hello.py": "print('hallo')"})).reward.value == 0.0
    assert verdict(ONE_LINE, sealed(**{"hello.py": f"{PRELUDE}pay()"})).reward.value == 0.0
