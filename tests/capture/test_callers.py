"""Whose calls are the agent's: real processes in real sandboxes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Caller
from paddock.store import Store
from paddock.store.outcome import Outcome
from rollouts.played import needs_bwrap, run, shell, speaker, spoken

pytestmark = needs_bwrap

SCRIPT = {"turns": [{"text": "Hello."}]}
CURL = (
    'curl -s -o /dev/null -H "Authorization: Bearer $OPENAI_API_KEY"'
    """ -d '{"messages": [{"role": "user", "content": "%s"}]}' $OPENAI_BASE_URL/chat/completions"""
)
ASK = """
import json, os, urllib.request
def ask(text):
    data = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
    key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data, key)
    urllib.request.urlopen(asked).read()
"""
HELPERS = f"""
import subprocess
{ASK}
def sh(line): subprocess.run(line, shell=True)
def curl(text): sh({CURL!r} % text)
def python(program): subprocess.run([sys.executable, "-c", {ASK!r} + program])
"""
HANGS_UP = """
import socket, urllib.parse
place = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"messages": [{"role": "user", "content": "gone"}]})
key = os.environ["OPENAI_API_KEY"]
lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", "Authorization: Bearer " + key]
lines += ["Content-Length: %d" % len(body), "", body]
socket.create_connection((place.hostname, place.port)).sendall("\\r\\n".join(lines).encode())
os._exit(0)
"""
SHARED = """
connection = http.client.HTTPConnection(place.hostname, place.port)
connection.connect()
connection.sock.set_inheritable(True)
child = subprocess.Popen(["sleep", "5"], close_fds=False)
body = json.dumps({"messages": [{"role": "user", "content": "shared"}]})
connection.request("POST", "/v1/chat/completions", body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
connection.getresponse().read()
child.kill()
"""


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as reopened:
        yield reopened


def calls_of(store: Store, program: str, **options: Any) -> dict[str, Call]:
    """The calls of an agent, by what each asked."""
    record, _ = run(spoken(store, SCRIPT, speaker(HELPERS + program), **options))
    return {call.request["messages"][-1]["content"]: call for call in store.calls(record.rollout_id)}


def labels(calls: dict[str, Call]) -> dict[str, str]:
    return {text: str(call.caller) for text, call in calls.items()}


@pytest.mark.parametrize("options", [{}, {"sandbox": "process", "consent": True}], ids=["bwrap", "process"])
def test_what_the_agents_shell_asks_is_foreign_and_not_trained_on(store: Store, options: dict[str, Any]) -> None:
    program = f"ask('own'); curl('curl'); sh('true; ' + {CURL % 'deeper'!r} + '; true'); ask('own again')"
    calls = calls_of(store, program, **options)
    assert labels(calls) == {"own": "agent", "curl": "foreign", "deeper": "foreign", "own again": "agent"}
    assert [call.trainable for call in calls.values()] == [True, False, False, True]
    reason = "another process than the agent's program made it: curl, started by the agent's program"
    assert calls["curl"].untrainable_because == reason


def test_a_child_that_asks_before_the_agent_does_is_foreign_in_the_end(store: Store) -> None:
    assert labels(calls_of(store, "curl('first'); ask('own')")) == {"first": "foreign", "own": "agent"}


def test_the_same_program_started_again_is_foreign(store: Store) -> None:
    assert labels(calls_of(store, """ask("own"); python("ask('again')")""")) == {"own": "agent", "again": "foreign"}


def test_forks_of_the_agent_are_the_agent(store: Store) -> None:
    program = "ask('own')\nif os.fork() == 0:\n    ask('fork')\n    os._exit(0)\nos.wait()"
    assert labels(calls_of(store, program)) == {"own": "agent", "fork": "agent"}


def test_a_process_that_was_left_behind_is_foreign(store: Store) -> None:
    left = f"(setsid sleep 0.2; {CURL % 'left'}; touch done) &"
    program = f"ask('own'); sh({left!r})\nimport time\nwhile not os.path.exists('done'): time.sleep(0.02)"
    assert labels(calls_of(store, program)) == {"own": "agent", "left": "foreign"}


def test_a_process_that_is_gone_before_it_is_found_is_not_trained_on(store: Store) -> None:
    calls = calls_of(store, f"ask('own'); python({HANGS_UP!r}); ask('own again')")
    assert (calls["own"].caller, calls["own again"].caller) == (Caller.AGENT, Caller.AGENT)
    assert not any(call.trainable for text, call in calls.items() if text == "gone")


def test_a_connection_that_another_process_holds_too_is_foreign(store: Store) -> None:
    assert labels(calls_of(store, "ask('own')\n" + SHARED)) == {"own": "agent", "shared": "foreign"}


def test_a_shell_script_around_one_client_is_an_agent(store: Store) -> None:
    record, _ = run(spoken(store, SCRIPT, shell(f"{CURL % 'one'}; {CURL % 'two'}; true")))
    assert [call.caller for call in store.calls(record.rollout_id)] == [Caller.AGENT, Caller.AGENT]
    assert record.trainable_calls == 2


def test_a_launcher_starts_no_other_kind_of_program_after_the_first_answer(store: Store) -> None:
    record, _ = run(spoken(store, SCRIPT, shell(f"{CURL % 'one'}; python3 -c '{ASK}ask(chr(111))'; true")))
    assert [call.caller for call in store.calls(record.rollout_id)] == [Caller.AGENT, Caller.FOREIGN]


ASKS_TWICE = {"turns": [{"text": "Hello."}], "faults": [{"when": "FAIL", "hang": 600, "times": 10**6}]}
CALLS = """
def own(text, timeout=30):
    sent = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=timeout)
    body = json.dumps({"messages": [{"role": "user", "content": text}]})
    connection.request("POST", "/v1/chat/completions", body, sent)
    return connection.getresponse().read()
"""


def test_a_call_of_the_agents_shell_that_stalls_does_not_blame_the_endpoint(store: Store) -> None:
    """The agent's own calls were answered, and its work counts."""
    hangs_up = CURL.replace("curl -s", "curl -s --max-time 1.5") % "FAIL"
    program = f"own('hello'); sh({hangs_up!r}); sh('echo 42 > answer.txt')"
    record, _ = run(spoken(store, ASKS_TWICE, speaker(HELPERS + CALLS + program), stall_timeout=0.5))
    assert [str(call.caller) for call in store.calls(record.rollout_id)] == ["agent", "foreign"]
    assert (record.outcome, record.reward) == (Outcome.OK, 1.0)


def test_an_answer_to_the_agents_shell_does_not_excuse_the_endpoint(store: Store) -> None:
    refused = {**ASKS_TWICE, "faults": [{"when": "FAIL", "status": 400, "message": "odd", "times": 10**6}]}
    program = f"own('FAIL'); sh({CURL % 'hello'!r}); own('FAIL'); sh('echo 42 > answer.txt')"
    record, _ = run(spoken(store, refused, speaker(HELPERS + CALLS + program)))
    assert [str(call.caller) for call in store.calls(record.rollout_id)] == ["agent", "foreign", "agent"]
    assert (record.outcome, record.reward) == (Outcome.MODEL, None)
