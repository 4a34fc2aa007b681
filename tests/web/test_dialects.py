"""The same conversation reads the same in every dialect, each message once."""

import time
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Event
from paddock.config import Access
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.web.mounts import create_view_app
from paddock.web.read_store import ReadStore

from .browser import TOKEN, Browser

TOOL = {"id": "t1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
SAID = [
    {"role": "assistant", "content": "Looking.", "tool_calls": [TOOL]},
    {"role": "assistant", "content": "Done."},
]
TALKS: dict[str, tuple[str, dict[str, Any], list[Any], list[Any]]] = {
    "chat": (
        "messages",
        {},
        [{"role": "system", "content": "Be good."}, {"role": "user", "content": "Go."}],
        [SAID[0], {"role": "tool", "tool_call_id": "t1", "content": "a.txt"}],
    ),
    "anthropic": (
        "messages",
        {"system": [{"type": "text", "text": "Be good."}], "max_tokens": 9},
        [{"role": "user", "content": [{"type": "text", "text": "Go."}]}],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "t1", "name": "bash", "input": {"command": "ls"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "a.txt"}]},
        ],
    ),
    "responses": (
        "input",
        {"instructions": "Be good."},
        [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}],
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Looking."}]},
            {"type": "function_call", "call_id": "t1", "name": "bash", "arguments": '{"command": "ls"}'},
            {"type": "function_call_output", "call_id": "t1", "output": "a.txt"},
        ],
    ),
    "google": (
        "contents",
        {"systemInstruction": {"parts": [{"text": "Be good."}]}},
        [{"role": "user", "parts": [{"text": "Go."}]}],
        [
            {
                "role": "model",
                "parts": [
                    {"text": "Looking."},
                    {"functionCall": {"id": "t1", "name": "bash", "args": {"command": "ls"}}},
                ],
            },
            {
                "role": "user",
                "parts": [{"functionResponse": {"id": "t1", "name": "bash", "response": {"output": "a.txt"}}}],
            },
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("dialect", TALKS)
def test_each_message_once(dialect: str, tmp_path: Path) -> None:
    name, rest, first, more = TALKS[dialect]
    with Store.open(tmp_path) as store:
        record = RolloutRecord("r-one", "task", started_at=time.time())
        store.begin(record)
        for index, history in enumerate((first, [*first, *more])):
            request = {"model": "policy", **rest, name: history}
            store.save_call("r-one", Call(f"c{index}", index, dialect=dialect, request=request, message=SAID[index]))
            store.add_event("r-one", Event(time.time(), "call", {"call": f"c{index}"}))
        record.outcome = Outcome.OK
        store.finish(record)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    items = Browser(app).api("rollouts/r-one/transcript")["items"]
    assert [(item["role"], item["kind"], item.get("text", item.get("arguments"))) for item in items] == [
        ("system", "message", "Be good."),
        ("user", "message", "Go."),
        ("assistant", "message", "Looking."),
        ("assistant", "tool_call", {"command": "ls"}),
        ("tool", "tool_result", "a.txt"),
        ("assistant", "message", "Done."),
    ]
    assert [item["name"] for item in items if "name" in item] == ["bash", "bash"]
    whole = Browser(app).api("rollouts/r-one/calls/c1")
    assert [message["role"] for message in whole["request"]["messages"]] == ["system", "user", "assistant", "tool"]
    app.state.page.close()


def test_a_mark_for_the_cache_that_moves_repeats_no_message(tmp_path: Path) -> None:
    def user(text: str, **mark: object) -> dict[str, object]:
        return {"role": "user", "content": [{"type": "text", "text": text, **mark}]}

    mark = {"cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": [{"type": "text", "text": "Looking."}]}
    histories = ([user("Go.", **mark)], [user("Go."), answer, user("On.", **mark)])
    with Store.open(tmp_path) as store:
        store.begin(record := RolloutRecord("r-one", "task", started_at=time.time()))
        for index, history in enumerate(histories):
            said = {"role": "assistant", "content": "Looking."}
            call = Call(f"c{index}", index, dialect="anthropic", request={"messages": history}, message=said)
            store.save_call("r-one", call)
            store.add_event("r-one", Event(time.time(), "call", {"call": f"c{index}"}))
        record.outcome = Outcome.OK
        store.finish(record)
    app = create_view_app(ReadStore(tmp_path), Access(token=TOKEN))
    items = Browser(app).api("rollouts/r-one/transcript")["items"]
    assert [item["text"] for item in items] == ["Go.", "Looking.", "On.", "Looking."]
    app.state.page.close()
