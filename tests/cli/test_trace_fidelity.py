"""What `paddock trace show` prints about the requests of a fork."""

import pytest

from paddock.cli.trace_fidelity import SHOWN_CALLS, SHOWN_LINES, describe_fork, print_differences
from paddock.store.record import RolloutRecord


def fork_with(*differences: str) -> RolloutRecord:
    different = [
        {"call": f"c{number}", "recorded": f"c{number}", "fidelity": "tool_output", "difference": text}
        for number, text in enumerate(differences)
    ]
    fidelity = {"state": "tool_output", "replayed_calls": 9, "different_calls": different}
    return RolloutRecord("r2", task_id="t", fork={"kind": "fork", "source": "r1", "at": 9, "fidelity": fidelity})


def test_a_fork_says_what_it_replays() -> None:
    assert describe_fork(fork_with("x")) == {"replays": "r1 up to c9; 9 calls replayed, tool_output"}
    assert describe_fork(RolloutRecord("r1", task_id="t")) == {}


def test_differences_are_printed_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    print_differences(fork_with("message 2 (tool):\n-a\n+b", *["\n".join("x" * 20)] * SHOWN_CALLS))
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "--- requests that differ from those of r1 ---",
        "c0 (tool_output, recorded as c0)",
        "message 2 (tool):",
        "-a",
        "+b",
    ]
    assert f"… {20 - SHOWN_LINES} more lines; --json has all" in lines
    assert lines[-1] == "… 1 more requests differ; --json has all"


def test_equal_requests_need_no_words(capsys: pytest.CaptureFixture[str]) -> None:
    print_differences(fork_with())
    assert capsys.readouterr().out == ""
