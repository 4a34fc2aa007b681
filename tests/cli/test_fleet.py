"""`paddock fleet`: what it prints, what it refuses, and how it ends."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fleet.plane_process import PlaneProcess, note_task, plane_process
from paddock.cli.fleet import DEFAULT_ENVIRONMENTS, add_defaults, read_environments
from paddock.cli.fleet_plane import ADDRESS_FILE, find_plane
from paddock.errors import ConfigError
from paddock.fleet.report import percentiles, summarize_rollouts
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

from .processes import paddock

SAFE = """
from paddock import ToolEnvironment, tool

print("importing talks")

class Safe(ToolEnvironment):
    '''A safe to be opened.'''

    @tool
    def turn(self, number: int) -> str:
        return "open" if number == 42 else "click"
"""


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlaneProcess]:
    folder = tmp_path_factory.mktemp("plane")
    (folder / "safe.py").write_text(SAFE)
    hosted = (
        "--env",
        "notes",
        "--env",
        f"safe={folder}/safe.py:Safe@v1.0",
        "--env",
        f"safe={folder}/safe.py:Safe@v1.1",
    )
    with plane_process(folder, "--warm", "1", "--instance-limit", "4", *hosted) as started:
        yield started


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


# -- a plane that runs ------------------------------------------------------------------------------


def test_environments_are_listed(plane: PlaneProcess) -> None:
    done = paddock("fleet", "envs", "--state", str(plane.state), "--json")
    listed = {each["env_key"]: each for each in lines(done.stdout)}
    assert (done.returncode, set(listed)) == (0, {"notes", "safe"})
    assert (listed["safe"]["default_version"], listed["safe"]["description"]) == ("v1.1", "A safe to be opened.")
    assert "v1.0, v1.1" in paddock("fleet", "envs", "--state", str(plane.state)).stdout


def test_instances_are_listed_and_ended(plane: PlaneProcess) -> None:
    state = str(plane.state)
    made = [plane.ask("POST", "/v1/env/instances", {"env_key": "safe", "run_id": run}) for run in ("a", "b", "b")]
    ids = [each["instance_id"] for each in made]
    listed = paddock("fleet", "ls", "--state", state, "--json")
    assert {each["instance_id"] for each in lines(listed.stdout)} >= set(ids)
    assert ids[0] in paddock("fleet", "ls", "--state", state).stdout

    one = paddock("fleet", "rm", ids[0], "--state", state, "--json")
    assert (one.returncode, [each["instance_id"] for each in lines(one.stdout)]) == (0, ids[:1])
    again = paddock("fleet", "rm", ids[0], "--state", state)
    assert (again.returncode, again.stdout) == (0, "")
    run = paddock(
        "fleet", "rm", "--run", "b", FLEET_BASE_URL=plane.address.base_url, FLEET_API_KEY=plane.address.api_key
    )
    assert (run.returncode, sorted(run.stdout.split())) == (0, sorted(ids[1:]))
    assert plane.alive() == []
    assert "it was deleted" in paddock("fleet", "ls", "--all", "--state", state).stdout


def test_everything_can_be_ended(plane: PlaneProcess) -> None:
    made = plane.ask("POST", "/v1/env/instances", {"env_key": "notes"})["instance_id"]
    done = paddock("fleet", "rm", "--all", "--state", str(plane.state))
    assert (done.returncode, done.stdout.split(), plane.alive()) == (0, [made], [])


def test_tasks_are_run_to_a_table(plane: PlaneProcess, tmp_path: Path) -> None:
    code = "def verify(env, final_answer):\n    return 1.0 if final_answer == 'open' else 0.0"
    task = note_task(
        "x", env_key="safe", env_version="v1.0", prompt="Open it, submit_final_answer.", verifier_code=code
    )
    (tmp_path / "tasks.json").write_text(json.dumps([task]))
    turns = [
        {"tool": "turn", "arguments": {"number": 42}},
        {"tool": "submit_final_answer", "arguments": {"answer": "open"}},
    ]
    (tmp_path / "script.json").write_text(json.dumps({"turns": turns}))
    where = ("--state", str(plane.state), "--store", "store", "--model", "replay:script.json")
    done = paddock("fleet", "run", "tasks.json", *where, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[1].split()[1:4] == ["note-x", "ok", "1"]
    assert "note-x #0: ok, reward 1, 2 calls" in done.stderr
    assert "4 rollouts run at a time" in done.stderr
    completed = paddock("fleet", "run", "tasks.json", *where, "--json", cwd=tmp_path)
    assert [(each["reward"], each["metadata"]["env_key"]) for each in lines(completed.stdout)] == [(1.0, "safe")]
    reported = json.loads(paddock("fleet", "report", "--store", "store", "--json", cwd=tmp_path).stdout)
    assert reported["total"]["outcomes"] == {"ok": 2}
    assert reported["environments"][0]["provisioning"]["most"] > 0


def test_a_rollout_that_broke_ends_the_command_with_1(plane: PlaneProcess, tmp_path: Path) -> None:
    (tmp_path / "tasks.json").write_text(json.dumps([note_task("x", env_key="nodes")]))
    (tmp_path / "script.json").write_text(json.dumps({"turns": [{"text": "Done."}]}))
    options = ("--model", "replay:script.json", "--retries", "0", "--store", "store", "--state", str(plane.state))
    done = paddock("fleet", "run", "tasks.json", *options, cwd=tmp_path)
    assert done.returncode == 1
    assert "does not list an environment 'nodes'" in done.stderr
    assert "'nodes' not found" in done.stdout


def test_a_wrong_key_is_reported_with_a_hint(plane: PlaneProcess) -> None:
    done = paddock("fleet", "ls", "--url", f"{plane.address.base_url}/", "--api-key", "wrong-key")
    assert done.returncode == 1
    assert "hint: set FLEET_API_KEY" in done.stderr
    assert "wrong-key" not in done.stderr


def test_an_unknown_instance_is_reported_with_a_hint(plane: PlaneProcess) -> None:
    done = paddock("fleet", "rm", "nope", "--state", str(plane.state))
    assert done.returncode == 1
    assert "hint: `paddock fleet ls --all`" in done.stderr


def test_a_state_folder_holds_one_plane(plane: PlaneProcess) -> None:
    done = paddock("fleet", "up", "--port", "0", "--state", str(plane.state))
    assert done.returncode == 2
    assert "hint:" in done.stderr


# -- no plane ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rm",), "say which instances"),
        (("rm", "--all", "--run", "x"), "say which instances"),
        (("ls",), "no plane runs on this machine"),
        (("up", "--env", "nope"), "no environment is called 'nope'"),
        (("up", "--env", "x=nope.mod:Class"), "cannot import 'nope.mod'"),
        (("up", "--env", "counter"), "counter has no tools"),
        (("run", "none.json", "--model", "replay:x"), "none.json cannot be read"),
    ],
)
def test_mistakes_are_reported_with_a_hint(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    done = paddock("fleet", *arguments, cwd=tmp_path, PADDOCK_FLEET=str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "hint: " in done.stderr


def test_a_plane_that_is_not_there_is_reported_with_a_hint() -> None:
    done = paddock("fleet", "envs", FLEET_BASE_URL="http://127.0.0.1:1", FLEET_API_KEY="a-key")
    assert done.returncode == 1
    assert "paddock fleet up" in done.stderr


def test_every_command_has_help() -> None:
    for name in ("up", "envs", "ls", "run", "rm", "report"):
        done = paddock("fleet", name, "--help")
        assert (done.returncode, "--json" in done.stdout) == (0, True)


# -- which plane is meant ---------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / ADDRESS_FILE).write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
    (tmp_path / "api_key").write_text("local-key\n")
    for name in ("FLEET_BASE_URL", "FLEET_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PADDOCK_FLEET", str(tmp_path))
    return tmp_path


def test_the_plane_of_this_machine_needs_no_options(local: Path) -> None:
    address = find_plane(None, None, None)
    assert (address.base_url, address.api_key) == ("http://127.0.0.1:9", "local-key")


def test_variables_name_another_plane(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLEET_BASE_URL", "http://127.0.0.1:8/")
    monkeypatch.setenv("FLEET_API_KEY", "other-key")
    address = find_plane(None, None, None)
    assert (address.base_url, address.api_key) == ("http://127.0.0.1:8", "other-key")
    assert find_plane(None, None, local).base_url == "http://127.0.0.1:9"


def test_the_local_key_is_sent_to_the_local_plane_alone(local: Path) -> None:
    with pytest.raises(ConfigError, match="key"):
        find_plane("http://127.0.0.1:8", None, None)
    assert find_plane("http://127.0.0.1:9/", None, None).api_key == "local-key"


# -- what is hosted ---------------------------------------------------------------------------------


def test_versions_of_a_key_are_put_together() -> None:
    hosted = read_environments(["notes", "shop=pkg.mod:Shop@v1.0", "shop=pkg.mod:Shop@2.0"])
    assert [(each.env_key, each.target, each.versions) for each in hosted] == [
        ("notes", "notes", ("v0.0.1", "v0.0.2")),
        ("shop", "pkg.mod:Shop", ("v1.0", "v2.0")),
    ]


def test_notes_is_hosted_beside_what_is_asked_for_unless_its_key_is_taken() -> None:
    assert add_defaults(()) == DEFAULT_ENVIRONMENTS
    assert add_defaults(("shop=pkg.mod:Shop",)) == ("notes", "shop=pkg.mod:Shop")
    assert add_defaults(("notes=pkg.mod:Mine@v3",)) == ("notes=pkg.mod:Mine@v3",)


@pytest.mark.parametrize("written", [["a=notes", "a=echo"], ["=notes"], ["a="], ["in stances=notes"], ["a@b=x.y:Z"]])
def test_environments_that_cannot_be_hosted_are_refused(written: list[str]) -> None:
    with pytest.raises(ConfigError):
        read_environments(written)


# -- the report -------------------------------------------------------------------------------------


def ended(number: int, env_key: str, outcome: Outcome, **changes: Any) -> RolloutRecord:
    stages = {"provision": 0.1 * (number + 1), "tools": 0.1}
    return RolloutRecord(
        f"r{number:05}", "t", outcome=outcome, sandbox="fleet", metadata={"env_key": env_key}, stages=stages,
        started_at=1000.0 + number, finished_at=2000.0, **changes,
    )  # fmt: skip


RECORDS = [
    ended(0, "notes", Outcome.OK, reward=1.0),
    ended(1, "notes", Outcome.OK, reward=0.0),
    ended(2, "notes", Outcome.ENVIRONMENT, error="the plane is gone"),
    ended(3, "notes", Outcome.ENVIRONMENT, error="the plane is gone", attempt=1),
    ended(4, "shop", Outcome.VERIFIER, reward_reason="verifier_failed"),
]


def test_a_report_counts_by_environment() -> None:
    report = summarize_rollouts(RECORDS)
    notes, shop = report.environments
    assert (notes.rollouts, notes.outcomes, notes.mean_reward) == (4, {"ok": 2, "environment": 2}, 0.5)
    assert notes.errors == [{"outcome": "environment", "error": "the plane is gone", "count": 2}]
    assert (notes.retried, shop.mean_reward, shop.errors[0]["error"]) == (1, None, "verifier_failed")
    assert report.total.rollouts == 5
    assert report.total.provisioning is not None
    assert report.total.provisioning["p50"] == pytest.approx(0.3)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0]) == {"p50": 3.0, "p90": 3.0, "p99": 3.0, "most": 3.0}
    assert percentiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99, "most": 100}


def test_a_report_is_printed_from_the_store(tmp_path: Path) -> None:
    with closing(Store.open(tmp_path)) as store:
        for record in [*RECORDS, RolloutRecord("r99999", "code", outcome=Outcome.OK, started_at=1.0)]:
            store.begin(record)
            store.finish(record)
    done = paddock("fleet", "report", "--store", str(tmp_path))
    assert done.returncode == 0
    assert done.stdout.splitlines()[1].split()[:2] == ["notes", "4"]
    assert "2 × environment: the plane is gone" in done.stderr
    one = json.loads(paddock("fleet", "report", "--store", str(tmp_path), "--env", "shop", "--json").stdout)
    assert one["total"]["rollouts"] == 1
