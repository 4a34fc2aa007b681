"""What a solution could not reach explains why it fails, also when its programs do not say so."""

import asyncio

from paddock.sandbox.network.connections import ConnectionRecord, describe_failures
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.tasks.settings import TaskNetwork
from paddock.tasks.task import Task
from paddock.testing.task import TaskCheck
from rollouts.played import needs_bwrap

FETCH = "python3 -c 'import urllib.request as u; u.urlopen(\"https://nowhere.invalid/\")' 2>/dev/null || true\n"
TESTS = "if [ -e installed ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n"


def solution_fault(policy: NetworkPolicy) -> tuple[str | None, str]:
    task = Task(
        "Do it.",
        tests={"test.sh": TESTS.encode()},
        solution={"solve.sh": FETCH.encode()},
        network=TaskNetwork(agent=policy),
    )
    result = asyncio.run(TaskCheck(task).run())[-1]
    return result.fault, result.detail


@needs_bwrap
def test_a_host_that_does_not_answer_is_named() -> None:
    fault, detail = solution_fault(NetworkPolicy("public"))
    assert fault == "host-does-not-answer"
    assert "nowhere.invalid" in detail


@needs_bwrap
def test_a_refused_host_is_named() -> None:
    fault, detail = solution_fault(NetworkPolicy("allowlist", ("example.com",)))
    assert fault == "refused-host"
    assert "nowhere.invalid" in detail


def test_each_failure_has_one_line() -> None:
    failed = ConnectionRecord("a.example", 443, True, "agent", 0.0, reason="502")
    refused = ConnectionRecord("b.example", 80, False, "agent", 0.0, reason="no")
    good = ConnectionRecord("c.example", 443, True, "agent", 0.0)
    lines = ["a.example port 443 cannot be reached: 502", "b.example port 80 was refused: no"]
    assert describe_failures([failed, failed, good, refused]) == lines
