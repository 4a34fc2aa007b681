"""`paddock serve opencode`: real OpenCode, real sandboxes and a scripted model, through the official MCP client."""

import http.client
import json
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paddock.processes import process_start_time
from paddock.rollouts.rollout_json import rollout_to_json
from paddock.store import Store

from .processes import free_port, paddock_command, quiet_environment, run_client, wait_until_healthy

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(150, func_only=True)]

TOKEN = "hf_a_secret_that_is_kept_nowhere"
SCRIPT = {
    "tasks": [
        {
            "when": "slowly",
            "turns": [
                {"tool": "bash", "arguments": {"command": "echo begun"}},
                {"text": "word " * 2000},
            ],
        },
        {
            "when": "",
            "turns": [
                {"tool": "write", "arguments": {"filePath": "/home/user/workdir/hello.txt", "content": "hi\n"}},
                {"tool": "bash", "arguments": {"command": "cat hello.txt seed.txt > both.txt"}},
                {"text": "Done."},
            ],
        },
    ],
    "faults": [{"when": "slowly", "turn": 1, "per_token_delay": 0.2}],
}
TEST = """
mkdir -p /logs/verifier
if [ "$(cat both.txt)" = "$(printf 'hi\\nseed')" ] && [ -e made-by-setup ]; then echo 1.0; else echo 0.0; fi \
> /logs/verifier/reward.txt
echo checked
"""


class Serving:
    """A server process over a store of its own, which another process can take over."""

    def __init__(self, folder: Path) -> None:
        self.store = folder / "store"
        self.log = folder / "server.log"
        self.script = folder / "script.json"
        self.script.write_text(json.dumps(SCRIPT))
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.port = free_port()
        environ = {**quiet_environment(), "PADDOCK_STORE": str(self.store)}
        with self.log.open("ab") as log:
            command = [*paddock_command("opencode", self.port), "--drain-grace", "1"]
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environ)
        wait_until_healthy(f"http://127.0.0.1:{self.port}", self.process, self.log)

    def end(self, number: int) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(30)
        self.process = None
        return code

    def call(self, *calls: tuple[str, dict[str, Any]]) -> list[Any]:
        answers: Any = run_client(
            "mcp1", "opencode_client.py", f"http://127.0.0.1:{self.port}/mcp", json.dumps(calls)
        )
        assert not any(is_error for _, is_error, _ in answers), answers
        return [structured for structured, _, _ in answers]

    def task(self, instruction: str, **more: Any) -> dict[str, Any]:
        return {
            "model_key": f"replay:{self.script}",
            "instruction": instruction,
            "test_script": TEST,
            "setup_shell": "touch made-by-setup",
            "upload_files": {"seed.txt": "seed\n"},
            **more,
        }

    def start_slow(self) -> str:
        """A rollout whose model has begun to say its many words."""
        (state,) = self.call(("start_rollout", self.task("Work slowly")))
        with self.stream(state["rollout_id"]) as events:
            assert next(event for event in events if event["kind"] == "agent_tool")
        return str(state["rollout_id"])

    @contextmanager
    def stream(self, rollout_id: str, **headers: str) -> Iterator[Iterator[dict[str, Any]]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request("GET", f"/rollouts/{rollout_id}/events", headers=named)
            answer = connection.getresponse()
            assert answer.status == 200
            yield (json.loads(line[6:]) for line in answer if line.startswith(b"data: "))
        finally:
            connection.close()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Serving]:
    serving = Serving(tmp_path)
    serving.start()
    yield serving
    if serving.process is not None:
        assert serving.end(signal.SIGTERM) == 0, serving.log.read_text()[-4000:]


def test_a_rollout_is_run_scored_and_found_again(server: Serving) -> None:
    request = server.task("Write hello.txt", task_id="hello", hf_token=TOKEN, idempotency_key="once")
    result, again = server.call(("run_rollout", request), ("run_rollout", request))
    assert (result["outcome"], result["reward"], result["task_id"]) == ("ok", 1.0, "hello")
    assert again == result
    assert (result["verifier_stdout"], result["test_exit_code"]) == ("checked\n", 0)
    assert {"hello.txt", "both.txt", "seed.txt"} <= set(result["workdir_files"])
    turns = [turn for turn in result["proxy_turns"] if turn["role"] == "agent"]
    assert [turn["finish_reason"] for turn in turns] == ["tool_calls", "tool_calls", "stop"]
    for turn in turns:
        assert turn["prompt_token_ids"]
        assert len(turn["completion_token_ids"]) == len(turn["per_token_logps"]) > 0
    finalized, state, messages = server.call(
        ("finalize_rollout", {"rollout_id": result["rollout_id"]}),
        ("get_state", {"rollout_id": result["rollout_id"]}),
        ("get_messages", {"rollout_id": result["rollout_id"]}),
    )
    assert finalized == result
    assert (state["status"], state["proxy_turns_so_far"]) == ("finished", len(result["proxy_turns"]))
    assert [message["info"]["role"] for message in messages["messages"]][:2] == ["user", "assistant"]
    assert TOKEN not in json.dumps([result, messages, kept(server, result["rollout_id"])])
    assert TOKEN not in server.log.read_text()


def kept(server: Serving, rollout_id: str) -> Any:
    with Store.open(server.store, read_only=True) as store:
        record = store.get(rollout_id)
        assert record is not None
        return rollout_to_json(record, store.calls(rollout_id), store.events(rollout_id))


def test_an_aborted_rollout_stops_talking_at_once(server: Serving) -> None:
    rollout_id = server.start_slow()
    state, messages = server.call(
        ("get_state", {"rollout_id": rollout_id}), ("get_messages", {"rollout_id": rollout_id})
    )
    assert (state["status"], state["stage"]) == ("running", "agent")
    assert state["serve_session_id"]
    assert len(messages["messages"]) >= 2
    began = time.time()
    aborted, again = server.call(*[("abort_rollout", {"rollout_id": rollout_id})] * 2)
    assert aborted == again
    assert (aborted["status"], aborted["outcome"]) == ("aborted", "cancelled")
    assert aborted["finished_at"] - began < 5
    result, same = server.call(*[("finalize_rollout", {"rollout_id": rollout_id})] * 2)
    assert result == same
    assert (result["reward"], result["proxy_turns"][-1]["trainable"]) == (None, False)
    assert len(result["proxy_turns"][-1]["completion_token_ids"]) < 1000


def test_a_stream_goes_on_where_it_was_cut_off(server: Serving) -> None:
    (state,) = server.call(("start_rollout", server.task("Write hello.txt")))
    with server.stream(state["rollout_id"]) as events:
        seen = [next(events), next(events)]
    with server.stream(state["rollout_id"], last_event_id=str(seen[-1]["seq"])) as events:
        seen += events
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    assert [event["kind"] for event in seen].count("outcome") == 1
    assert seen[-1]["data"] == {"outcome": "ok", "reward": 1.0}


def test_a_killed_server_leaves_an_outcome_and_no_sandbox(server: Serving) -> None:
    rollout_id = server.start_slow()
    with Store.open(server.store, read_only=True) as store:
        (sandbox,) = store.open_sandboxes()
    server.end(signal.SIGKILL)
    server.start()
    state, result = server.call(
        ("get_state", {"rollout_id": rollout_id}), ("finalize_rollout", {"rollout_id": rollout_id})
    )
    assert (state["status"], result["outcome"], result["reward"]) == ("aborted", "cancelled", None)
    assert result["proxy_turns"][0]["finish_reason"] == "tool_calls"
    with server.stream(rollout_id) as events:
        assert list(events)[-1]["kind"] == "outcome"
    assert_gone(server, sandbox)


def test_a_server_that_is_asked_to_end_cancels_its_rollouts(server: Serving) -> None:
    rollout_id = server.start_slow()
    with Store.open(server.store, read_only=True) as store:
        (sandbox,) = store.open_sandboxes()
    assert server.end(signal.SIGTERM) == 0
    record = kept(server, rollout_id)
    assert (record["outcome"], record["error"]) == ("cancelled", "the server was shut down")
    assert_gone(server, sandbox)


def assert_gone(server: Serving, sandbox: Any) -> None:
    with Store.open(server.store, read_only=True) as store:
        assert store.open_sandboxes() == []
    assert process_start_time(sandbox.host_pid) != sandbox.host_start_time
    assert not any(Path(path).exists() for path in sandbox.paths)
