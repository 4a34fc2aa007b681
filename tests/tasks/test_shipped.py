"""The shipped tasks: solved they score 1.0, untouched and cheated they do not."""

import json
from pathlib import Path
from typing import Any

import pytest

from paddock.tasks.shipped import replay_file, shipped
from paddock.tasks.task import Task
from paddock.tasks.task_folder import read_task_folder
from paddock.tasks.unprotected_runs import find_unprotected_runs
from tasks.verifying import WORKDIR, Place

LINGER = """
if os.fork() == 0:
    os.setsid()
    while True:
        exec(open(__file__).read().partition("if os.fork")[0])
"""
FORGE = """
import os
try:
    with open("/logs/verifier/reward.txt", "w") as file:
        file.write("1.0")
except OSError:
    pass
"""
FORGE_AND_LOCK = f"""{FORGE}
os.chmod("/logs/verifier/reward.txt", 0o444)
os.chmod("/logs/verifier", 0o555)
"""
STEAL = """
import sys
sys.argv[1:] = []
for place in ("/tests/check.py", "/home/user/tests/check.py", "/proc/1/root/tests/check.py"):
    try:
        exec(open(place).read().partition("parts =")[0])
        print(report(totals(sys.stdin.read())))
    except OSError:
        pass
"""
NAMES = ["data-work", "fix-test", "refactor", "shell-work", "write-program"]


def place(name: str, root: Path) -> Place:
    return Place(read_task_folder(shipped()[name]), root)


def script() -> list[dict[str, Any]]:
    data = json.loads(replay_file().read_text())
    assert data["model"] == "replay"
    recorded: list[dict[str, Any]] = data["tasks"]
    return recorded


def test_five_tasks_are_shipped() -> None:
    assert list(shipped()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_task_is_complete(name: str) -> None:
    task = Task.from_folder(shipped()[name])
    assert task.id == name
    assert task.is_scored
    assert task.has_solution
    assert task.metadata["description"]
    assert "unknown_keys" not in task.metadata
    assert not any("check" in path or "solve" in path for path in task.files)


def test_what_the_checks_share_is_the_same_everywhere() -> None:
    for shared in ("test.sh", "call.py"):
        assert (
            len(
                {
                    path.read_bytes()
                    for path in (folder / "tests" / shared for folder in shipped().values())
                    if path.exists()
                }
            )
            == 1
        )
    fix_test = shipped()["fix-test"]
    given, receipt = fix_test / "environment" / "test_intervals.py", fix_test / "tests" / "test_intervals.txt"
    assert given.read_bytes() == receipt.read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_agents_programs_run_apart(name: str) -> None:
    assert find_unprotected_runs(read_task_folder(shipped()[name])) == []


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_scores_one(name: str, tmp_path: Path) -> None:
    at = place(name, tmp_path)
    at.solve()
    reward = at.verify()
    assert (reward.value, set(reward.parts.values())) == (1.0, {1.0})


@pytest.mark.parametrize("name", NAMES)
def test_doing_nothing_scores_nothing(name: str, tmp_path: Path) -> None:
    assert place(name, tmp_path).verify().value == 0.0


# -- replay ---------------------------------------------------------------------------------------


def test_each_task_has_one_replay() -> None:
    instructions = [read_task_folder(folder).instruction for folder in shipped().values()]
    for recorded in script():
        assert [recorded["when"] in text for text in instructions].count(True) == 1
    assert len({recorded["when"] for recorded in script()}) == len(instructions)


@pytest.mark.parametrize("recorded", script(), ids=lambda recorded: recorded["when"][:30])
def test_a_replay_solves_its_task(recorded: dict[str, Any], tmp_path: Path) -> None:
    task = next(task for task in map(read_task_folder, shipped().values()) if recorded["when"] in task.instruction)
    at = Place(task, tmp_path)
    assert 4 <= len(recorded["turns"]) <= 5
    assert list(recorded["turns"][-1]) == ["text"]
    assert len({turn["tool"] for turn in recorded["turns"][:-1]}) >= 3
    for turn in recorded["turns"][:-1]:
        use(at, turn["tool"], turn["arguments"])
    assert at.score() == 1.0


def use(at: Place, tool: str, given: dict[str, str]) -> None:
    """What the agent's tool of that name does."""
    inside = given.get("filePath", WORKDIR)
    assert inside.startswith(WORKDIR)
    path = at.workdir / inside.removeprefix(WORKDIR).lstrip("/")
    if tool == "write":
        path.write_text(given["content"])
    elif tool == "edit":
        assert path.read_text().count(given["oldString"]) == 1
        path.write_text(path.read_text().replace(given["oldString"], given["newString"]))
    elif tool == "bash":
        at.run("bash", "-c", given["command"])
    else:
        # Searching tools are left out: they need ripgrep, which a sandbox need not have.
        assert tool == "read"
        assert path.is_file()


# -- cheats ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "program",
    [
        "print('ada 3:00\\nbob 2:05\\ntotal 5:05')",
        FORGE + LINGER,
        FORGE + "os.kill(os.getppid(), 9)",
        FORGE + "os.kill(os.getppid(), 19)",
        FORGE_AND_LOCK,
        STEAL,
    ],
    ids=[
        "the example by heart",
        "forges the reward in the background",
        "forges it and kills the check",
        "forges it and stops the check",
        "forges it and locks it",
        "reads the reference",
    ],
)
def test_a_cheating_program_scores_low(program: str, tmp_path: Path) -> None:
    at = place("write-program", tmp_path)
    at.write("timesheet.py", program)
    assert at.score() < 0.5


BY_HEART = """
def merge(intervals):
    return {2: [(1, 6)], 3: [(1, 2)]}.get(len(intervals), [(0, 10), (12, 13)])
def gaps(intervals, start, end):
    return [(start, end)]
"""


@pytest.mark.parametrize("module", [BY_HEART, FORGE + "os._exit(0)", FORGE + "print('[]')"])
def test_a_cheating_module_scores_nothing(module: str, tmp_path: Path) -> None:
    at = place("fix-test", tmp_path)
    at.write("intervals.py", module)
    assert at.score() == 0.0


def test_one_of_two_bugs_is_half_of_the_work(tmp_path: Path) -> None:
    at = place("fix-test", tmp_path)
    source = (at.workdir / "intervals.py").read_text()
    at.write("intervals.py", source.replace("(merged[-1][0], end)", "(merged[-1][0], max(merged[-1][1], end))"))
    assert at.score() == 0.5


def test_changing_the_given_tests_is_worth_nothing(tmp_path: Path) -> None:
    at = place("fix-test", tmp_path)
    at.solve()
    at.write("test_intervals.py", "")
    assert at.score() == 0.0


def test_a_refactoring_that_changes_behaviour_is_worth_nothing(tmp_path: Path) -> None:
    at = place("refactor", tmp_path)
    at.solve()
    at.write("quote.py", (at.workdir / "quote.py").read_text().replace("you save", "You save"))
    assert at.score() == 0.0


def test_compiled_code_does_not_stand_in_for_its_source(tmp_path: Path) -> None:
    at = place("refactor", tmp_path)
    good = (at.workdir / "receipt.py").read_text()
    at.write("receipt.py", good.replace("RECEIPT", "receipt"))
    at.run("bash", "-c", "touch -d @1 *.py && python3 -m compileall -q .")
    at.write("receipt.py", good)
    at.run("touch", "-d", "@1", "receipt.py")
    assert at.run("python3", "-c", "import receipt; print(receipt.render([], 0, 0))").stdout.startswith("receipt")
    assert at.verify().parts["unchanged"] == 1.0


def test_arithmetic_in_yet_another_module_is_not_pulled_together(tmp_path: Path) -> None:
    at = place("refactor", tmp_path)
    at.solve()
    at.write("shared.py", "def add(a, b):\n    return a + b\n")
    assert at.score() == 0.75


def test_a_module_that_keeps_its_arithmetic_does_not_count(tmp_path: Path) -> None:
    at = place("refactor", tmp_path)
    receipt = (at.workdir / "receipt.py").read_text()
    at.solve()
    at.write("receipt.py", f"from totals import *\nif 0:\n    compute_totals([]), format_money(0)\n{receipt}")
    assert at.score() == 0.75


def test_a_module_that_replaces_its_source_while_it_runs_does_not_count(tmp_path: Path) -> None:
    at = place("refactor", tmp_path)
    receipt = (at.workdir / "receipt.py").read_text()
    at.solve()
    solved = (at.workdir / "receipt.py").read_text()
    at.write("receipt.py", f"{receipt}\nopen('receipt.py', 'w').write({solved!r})\n")
    assert at.score() == 0.75


def test_copied_logs_are_not_moved_logs(tmp_path: Path) -> None:
    at = place("shell-work", tmp_path)
    at.run("cp", "-r", "inbox", "copy")
    at.solve()
    at.run("bash", "-c", "cp copy/web* inbox/")
    assert at.verify().parts["inbox"] == 0.0


def test_linked_logs_are_not_moved_logs(tmp_path: Path) -> None:
    at = place("shell-work", tmp_path)
    at.solve()
    at.run("bash", "-c", "mv sorted hidden && ln -s hidden sorted")
    assert at.verify().parts["sorted"] == 0.0


def test_numbers_written_as_text_are_wrong(tmp_path: Path) -> None:
    at = place("data-work", tmp_path)
    at.solve()
    summary = json.loads((at.workdir / "summary.json").read_text())
    at.write("summary.json", json.dumps({**summary, "orders": str(summary["orders"])}))
    assert at.score() == 0.8


def test_a_link_to_the_known_answer_is_no_answer(tmp_path: Path) -> None:
    at = place("data-work", tmp_path)
    at.run("ln", "-s", "/tests/expected.json", "summary.json")
    assert at.score() == 0.0


def test_a_pipe_in_place_of_the_answer_does_not_hang_the_check(tmp_path: Path) -> None:
    at = place("data-work", tmp_path)
    at.run("mkfifo", "summary.json")
    assert at.score() == 0.0
