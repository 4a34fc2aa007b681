import signal
import time
from pathlib import Path
from typing import Any

import pytest

from paddock.errors import ConfigError
from paddock.fleet.instance.environment import InstanceEnvironment, InstanceSpec, read_spec

from .instances import HERE, MANAGER, Instance, running


def test_a_warm_process_serves_at_once(tmp_path: Path) -> None:
    """Waiting for its spec costs nothing: what it needs is imported by then."""
    instance = Instance(tmp_path)
    try:
        while (tmp_path / "log").stat().st_size == 0 and not _reads(instance.process.pid):
            time.sleep(0.01)
        began = time.monotonic()
        assert instance.begin()["port"] > 0
        assert time.monotonic() - began < 0.5
        assert instance.titles() == ["welcome"]
        assert sorted(path.name for path in tmp_path.glob("*.sqlite")) == ["current.sqlite", "seed.sqlite"]
    finally:
        # The end of its input is its end.
        assert instance.end() == 0


def _reads(pid: int) -> bool:
    return Path(f"/proc/{pid}/wchan").exists() and "pipe" in Path(f"/proc/{pid}/wchan").read_text()


def test_a_process_without_a_spec_ends(tmp_path: Path) -> None:
    assert Instance(tmp_path).end() == 0


def test_sigterm_ends_it_cleanly(tmp_path: Path) -> None:
    instance = Instance(tmp_path)
    try:
        instance.begin()
        instance.process.send_signal(signal.SIGTERM)
        assert instance.process.wait(10) == 0
    finally:
        instance.end()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"target": "nope"}, "no environment is called 'nope'"),
        ({"target": f"{HERE}Unbuilt"}, "no room"),
        ({"folder": "/proc/nowhere"}, "unable to open"),
    ],
    ids=["unknown", "unbuilt", "folder"],
)
def test_a_spec_that_cannot_be_hosted_gets_an_error(tmp_path: Path, spec: dict[str, Any], message: str) -> None:
    instance = Instance(tmp_path, **spec)
    try:
        assert message in instance.begin()["error"]
    finally:
        assert instance.end() == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a JSON object"),
        (b'{"env_key": "a", "target": 3}', "instance_id, target, folder"),
    ],
)
def test_an_invalid_spec_is_refused(line: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_spec(line)


def test_a_spec_never_shows_its_secrets() -> None:
    secret = b'"api_key": "k3y", "runner_token": "t0ken"'
    line = b'{"instance_id": "i", "env_key": "e", "target": "t", "folder": "/f", ' + secret + b"}"
    spec = read_spec(line)
    assert (spec.api_key, spec.runner_token) == ("k3y", "t0ken")
    assert "k3y" not in repr(spec)
    assert "t0ken" not in repr(spec)


def test_only_environments_with_tools_are_hosted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no tools"):
        InstanceEnvironment(InstanceSpec("i", "counter", "counter", tmp_path))


def test_an_environment_finds_its_variables_and_has_no_database(tmp_path: Path) -> None:
    arguments = {"env_variables": {"COLOUR": "blue", "SIZE": 3}, "data_key": "small", "data_version": "v1"}
    with running(tmp_path, target=f"{HERE}Loud", **arguments) as instance:
        values = {
            name: instance.call("variable", name=name)["result"]["structuredContent"]["result"]
            for name in ("COLOUR", "SIZE", "PADDOCK_DATA_KEY", "PADDOCK_DATA_VERSION")
        }
        assert values == {"COLOUR": "blue", "SIZE": "3", "PADDOCK_DATA_KEY": "small", "PADDOCK_DATA_VERSION": "v1"}
        assert instance.ask("GET", f"{MANAGER}/resources").json == []
        assert instance.post(f"{MANAGER}/diff/structured")["diff"] == {}
        assert instance.ask("GET", f"{MANAGER}/resources/sqlite/current/describe").status == 404
        assert instance.post(f"{MANAGER}/reset")["success"]
        assert "it broke" in instance.call("fail")["result"]["content"][0]["text"]
        assert b"no page" in instance.ask("GET", "/").body
    # What it prints is in the log: the output carries the one line of the protocol.
    assert b"a line that nobody waits for" in instance.log.read_bytes()


def test_faults_come_and_go(notes: Instance) -> None:
    notes.tell({"faults": [{"path": "/health$", "status": 503, "times": -1, "headers": {"retry-after": "1"}}]})
    while (answer := notes.ask("GET", f"{MANAGER}/health")).status == 200:
        pass
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert notes.titles() == ["welcome"]
    notes.tell({"nonsense": 1})
    notes.tell({"faults": []})
    while notes.ask("GET", f"{MANAGER}/health").status != 200:
        pass
