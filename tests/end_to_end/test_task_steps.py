"""Tasks with steps as whole rollouts in real sandboxes. The agent runs its instruction as a shell script."""

import io
import json
import shlex
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from paddock.agents.command import CommandAgent
from paddock.config import PADDOCK_IMAGES
from paddock.models.endpoint import Endpoint
from paddock.models.replay import ReplayServer
from paddock.rollouts.fork import fork
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.tasks.settings import AgentSettings, RewardStrategy, TaskImage, TaskSettings, TaskStep, VerifierSettings
from paddock.tasks.task import Task
from rollouts.played import LIMITS, NOBODY_THERE, SPEAKING, TIMEOUTS, needs_bwrap, rolled, run, spoken
from sandbox.image_roots import make_image

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(120), needs_bwrap]

PYTHON = "/run/paddock/runtime/bin/python3"
OBEYS = CommandAgent(shlex.join(["/bin/sh", "-c", 'exec /bin/sh "$PADDOCK_INSTRUCTION_FILE"']))
CALLS_AND_OBEYS = """
message, _ = read(post({"model": "policy", "messages": [{"role": "user", "content": "go"}], "stream": True})[1])
assert "error" not in message, message
os.execv("/bin/sh", ["sh", os.environ["PADDOCK_INSTRUCTION_FILE"]])
"""
CALLER = CommandAgent(shlex.join([PYTHON, "-c", SPEAKING + CALLS_AND_OBEYS]))
GIVES = "echo {} > /logs/verifier/reward.txt"


def scored_by(test: str) -> str:
    """A test that writes 1 if the command succeeds, else 0."""
    return f"cd /app\nif {test}; then echo 1; else echo 0; fi > /logs/verifier/reward.txt"


def step(name: str, instruction: str, test: str = "", **parts: Any) -> TaskStep:
    tests = {"test.sh": test.encode()} if test else {}
    return TaskStep(name, instruction, **{"tests": tests, **parts})


def a_task(*steps: TaskStep, strategy: RewardStrategy = "mean", **parts: Any) -> Task:
    parts = {"sandbox": LIMITS, "timeouts": TIMEOUTS, "settings": TaskSettings(reward_strategy=strategy), **parts}
    return Task("unused", "steps", image=TaskImage("small"), steps=steps, **parts)


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(PADDOCK_IMAGES.name, str(folder / "store"))
        make_image(folder, workdir=PurePosixPath("/app"))
        yield


def rolled_steps(store: Path, *steps: TaskStep, agent: CommandAgent = OBEYS, **parts: Any) -> RolloutRecord:
    return rolled(store, agent, task=a_task(*steps, **parts))


def rewards(record: RolloutRecord) -> list[tuple[str, float | None]]:
    return [(each["name"], each["reward"]) for each in record.steps]


def read_kept(store: Path, digest: str) -> dict[str, str]:
    """The files of a work folder in the store."""
    with Store.open(store) as opened, tarfile.open(fileobj=io.BytesIO(opened.get_blob(digest))) as archive:
        plain = [member for member in archive if member.isfile()]
        contents = {member.name: archive.extractfile(member) for member in plain}
        return {name.removeprefix("./"): file.read().decode() for name, file in contents.items() if file is not None}


def test_steps_continue_from_the_files_of_the_agent_and_not_of_the_tests(tmp_path: Path) -> None:
    spies = "ls /tests > seen.txt 2>&1; ls -A /logs/verifier >> seen.txt; ls left /tmp/left >> seen.txt; cat one.txt"
    first = scored_by("test -e one.txt") + "\ntouch left /tmp/left; rm one.txt"
    record = rolled_steps(
        tmp_path,
        step("one", "echo 1 > one.txt; echo temporary > /tmp/mine", first),
        step("two", f"{spies}; cat /tmp/mine > mine.txt", scored_by("test -e one.txt -a -e mine.txt")),
    )
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error
    assert record.workdir_blob is not None
    assert {each["verifier"]["mode"] for each in record.steps} == {"sealed"}
    lines = read_kept(tmp_path, record.workdir_blob)["seen.txt"].splitlines()
    assert all("No such file" in line or "cannot access" in line for line in lines), lines
    assert read_kept(tmp_path, record.steps[0]["workdir_blob"]) == {"one.txt": "1\n"}


def test_live_tests_leave_processes_and_nothing_else(tmp_path: Path) -> None:
    record = rolled_steps(
        tmp_path,
        step("one", "sleep 60 & echo $! > pid", scored_by('test -d "/proc/$(cat pid)"')),
        step("two", "ls -A /tests /logs/verifier > seen", scored_by('test -d "/proc/$(cat pid)" -a ! -s hidden')),
        step("three", "cat seen", scored_by('test "$(cat seen)" = "$(printf \'/logs/verifier:\\n\\n/tests:\')"')),
    )
    assert record.outcome is Outcome.OK, record.error
    assert rewards(record) == [("one", 1.0), ("two", 1.0), ("three", 1.0)]
    assert {each["verifier"]["mode"] for each in record.steps} == {"live"}


def test_a_step_is_prepared_by_its_own_files(tmp_path: Path) -> None:
    files = {"setup.sh": b"cat data.txt > prepared.txt", "data.txt": b"42\n", "run": b"echo ran > ran.txt\n"}
    modes = {"run": 0o755}
    record = rolled_steps(
        tmp_path,
        step("one", "test ! -e data.txt && touch first", scored_by("test -e first")),
        step("two", "./run", scored_by('test "$(cat prepared.txt ran.txt)" = "42\nran"'), files=files, modes=modes),
    )
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error


def test_a_failed_set_up_is_the_fault_of_the_task(tmp_path: Path) -> None:
    broken = step("two", "true", GIVES.format(1), files={"setup.sh": b"echo no disk >&2; exit 3"})
    record = rolled_steps(tmp_path, step("one", "true", GIVES.format(1)), broken)
    assert (record.outcome, record.reward) == (Outcome.TASK, None)
    assert "setup.sh of step two failed: exit code 3: no disk" in str(record.error)
    assert rewards(record) == [("one", 1.0), ("two", None)]


def test_a_low_reward_ends_the_rollout(tmp_path: Path) -> None:
    record = rolled_steps(
        tmp_path,
        step("one", "true", GIVES.format(0.5), min_reward={"reward": 0.6}),
        step("two", "touch reached", GIVES.format(1)),
    )
    assert (record.outcome, record.reward) == (Outcome.OK, 0.5)
    assert "below its min_reward of 0.6" in record.steps[1]["reward_reason"]
    assert record.steps[1]["started_at"] is None
    assert record.workdir_files == []


def test_an_unknown_reward_ends_the_rollout(tmp_path: Path) -> None:
    record = rolled_steps(tmp_path, step("one", "true", "true"), step("two", "true", GIVES.format(1)))
    assert (record.outcome, record.reward) == (Outcome.VERIFIER, None)
    assert record.error == "step one: the verifier wrote no reward"
    assert rewards(record) == [("one", None), ("two", None)]


def test_the_test_of_a_step_replaces_that_of_the_task(tmp_path: Path) -> None:
    shared = {"test.sh": GIVES.format(1).encode(), "score": b"0.25\n"}
    record = rolled_steps(
        tmp_path,
        step("one", "true", "cat /tests/score > /logs/verifier/reward.txt"),
        step("two", "true"),
        tests=shared,
    )
    assert rewards(record) == [("one", 0.25), ("two", 1.0)]


def test_a_step_without_any_test_has_no_reward(tmp_path: Path) -> None:
    forged = "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh"
    record = rolled_steps(tmp_path, step("one", forged), step("two", forged, GIVES.format(1)))
    assert (record.outcome, record.reward, record.steps[0]["reward_reason"]) == (
        Outcome.VERIFIER,
        None,
        "there is no tests/test.sh",
    )


def test_a_step_has_its_own_deadline_and_user(tmp_path: Path) -> None:
    record = rolled_steps(
        tmp_path,
        step("slow", "echo 1 > one.txt; sleep 30", GIVES.format(0.5), agent=AgentSettings(timeout=1.0)),
        step("bob", "id -un > /tmp/user", scored_by('test "$(cat /tmp/user)" = bob'), agent=AgentSettings("bob")),
        step("root", "id -un > /tmp/user", scored_by('test "$(cat /tmp/user)" = root')),
    )
    assert (record.outcome, record.error) == (Outcome.TIMEOUT, "step slow: the agent did not finish in time")
    assert rewards(record) == [("slow", 0.5), ("bob", 1.0), ("root", 1.0)]


def test_calls_belong_to_their_step_and_the_budget_to_the_rollout(tmp_path: Path) -> None:
    names = ("one", "two", "three")
    steps = [step(name, f"echo {name}", f"echo test of {name}; {GIVES.format(1)}") for name in names]
    script: dict[str, Any] = {"turns": [{"text": "1"}, {"text": "2"}, {"text": "3"}]}

    with Store.open(tmp_path) as store:
        record, _ = run(spoken(store, script, CALLER, task=a_task(*steps)))
        calls = store.calls(record.rollout_id)
        events = [event.data["step"] for _, event in store.events(record.rollout_id) if event.kind == "step"]
    assert (record.outcome, record.reward, record.call_count) == (Outcome.OK, 1.0, 3), record.error
    assert [(call.id, call.step, call.caller, call.role) for call in calls] == [
        ("c0", "one", "agent", "agent"),
        ("c1", "two", "agent", "agent"),
        ("c2", "three", "agent", "agent"),
    ]
    assert [each["calls"] for each in record.steps] == [1, 1, 1]
    assert events == ["one", "two", "three"]
    assert "== step one ==\ntest of one" in record.verifier_stdout
    assert record.instruction.startswith("# one\n\necho one\n\n# two")
    assert json.dumps(record.steps)


def test_a_dead_model_in_a_later_step_leaves_no_reward(tmp_path: Path) -> None:
    steps = [step("one", "true", GIVES.format(1)), step("two", "true", GIVES.format(1))]
    agent = CommandAgent(shlex.join([PYTHON, "-c", SPEAKING + "sys.exit(post({'messages': []})[0] != 200)"]))
    record = rolled(tmp_path, agent, task=a_task(*steps), model=NOBODY_THERE)
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)
    assert rewards(record) == [("one", None), ("two", None)]


def test_sealed_ends_the_processes_of_a_step(tmp_path: Path) -> None:
    sealed = VerifierSettings(mode="sealed")
    unseen = 'case "$(cat seen)" in *sleep*) false;; *) true;; esac'
    record = rolled_steps(
        tmp_path,
        step("one", "sleep 60 &", GIVES.format(1), verifier=sealed),
        step("two", "cat /proc/[0-9]*/cmdline > seen", scored_by(unseen), verifier=sealed),
    )
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0), record.error


def test_a_fork_repeats_the_steps_before_its_call(tmp_path: Path) -> None:
    """Both steps send the same request; the second step's call is the one that is sampled live."""
    steps = (step("one", "echo 1 > one.txt", scored_by("test -e one.txt")), step("two", "true", scored_by("true")))

    async def play() -> None:
        script = {"turns": [{"text": "Go."}]}
        with Store.open(tmp_path) as store:
            source, _ = await spoken(store, script, CALLER, task=a_task(*steps))
            async with ReplayServer(script) as server:
                model = Endpoint(server.url, "replay", engine="vllm")
                result = await fork(source, at="c1", model=model, agent=CALLER, store=store)
                (record,) = result.records
                assert (record.outcome, rewards(record)) == (Outcome.OK, [("one", 1.0), ("two", 1.0)]), record.error
                assert [call.replayed_from for call in store.calls(record.rollout_id)] == [
                    f"{source.rollout_id}/c0",
                    None,
                ]
                assert len(server.log) == 1

    run(play())
