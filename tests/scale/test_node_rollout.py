"""What a rollout writes on its node, as its driver gets to see it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from paddock.capture.trace import Call, Event, Level
from paddock.errors import StoreError
from paddock.scale.node_link import _FRAME_HEADER
from paddock.scale.node_rollout import CHUNK_BYTES, MessageBuffer, NodeStore, node_folder
from paddock.scale.rollouts import decode_call
from paddock.store import SandboxEntry, Store
from paddock.store.outcome import Outcome
from paddock.store.packing import decode
from paddock.store.record import RolloutRecord


def written(folder: Path, write: Any) -> list[tuple[str, Any, bytes]]:
    """The messages that wait after `write` has used the store."""

    async def use() -> list[bytes]:
        store = NodeStore.open(folder)
        assert isinstance(store, NodeStore)
        store.buffer = MessageBuffer()
        with store:
            await store.run(write, store)
        return store.buffer.take()

    return [parsed(frame) for frame in asyncio.run(use())]


def parsed(frame: bytes) -> tuple[str, Any, bytes]:
    words, raw = _FRAME_HEADER.unpack(frame[: _FRAME_HEADER.size])
    kind, value = decode(frame[_FRAME_HEADER.size : _FRAME_HEADER.size + words])
    assert len(frame) == _FRAME_HEADER.size + words + raw
    return kind, value, frame[_FRAME_HEADER.size + words :]


def test_calls_and_events_go_to_the_driver_whole(tmp_path: Path) -> None:
    call = Call("c0", 0, completion_token_ids=[7], logprobs=[-0.25], level=Level.TOKENS)

    def write(store: NodeStore) -> None:
        store.save_call("r1", call)
        store.add_event("r1", Event(1.0, "stage", {"stage": "agent"}))

    first, second = written(tmp_path, write)
    assert decode_call(first[1]) == call
    assert Event(**second[1]) == Event(1.0, "stage", {"stage": "agent"})
    with Store.open(tmp_path) as here:
        assert here.count() == 0


def test_only_the_last_state_of_a_record_is_sent_and_nothing_after_its_end(tmp_path: Path) -> None:
    record = RolloutRecord("r1", "task")

    def write(store: NodeStore) -> None:
        for stage in ("queued", "install", "agent"):
            record.stage = stage
            store.update(record)
            store.add_event("r1", Event(1.0, stage))
        record.outcome = Outcome.OK
        assert store.finish(record)
        store.add_event("r1", Event(2.0, "outcome"))

    reply = [(kind, value.get("stage") or value["kind"]) for kind, value, _ in written(tmp_path, write)]
    events = [("event", "queued"), ("event", "install")]
    assert reply == [*events, ("record", "agent"), ("event", "agent"), ("finish", "agent")]


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_a_blob_goes_in_pieces_that_add_up(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    *chunks, last = written(tmp_path, lambda store: store.put_blob(data))
    assert b"".join(raw for _, _, raw in chunks) == data
    assert all(len(raw) <= CHUNK_BYTES for _, _, raw in chunks)
    with Store.open(tmp_path / "driver") as driver:
        assert last[:2] == ("blob", driver.put_blob(data))


def test_a_snapshot_goes_to_the_driver_blob_by_blob(tmp_path: Path) -> None:
    contents = {"d1": b"one", "d2": b""}
    sent = written(tmp_path, lambda store: store.put_snapshot("r1", contents))
    assert sent == [("chunk", None, b"one"), ("snapshot", "d1", b""), ("snapshot", "d2", b"")]


def test_sandboxes_are_noted_on_the_node(tmp_path: Path) -> None:
    assert written(tmp_path, lambda store: store.record_sandbox(SandboxEntry("sb-1", "bwrap", "r1"))) == []
    with Store.open(tmp_path) as here:
        assert [entry.sandbox_id for entry in here.open_sandboxes()] == ["sb-1"]


def test_a_folder_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert node_folder().stat().st_mode & 0o777 == 0o700
    node_folder().rmdir()
    (tmp_path / "elsewhere").mkdir()
    node_folder_path = tmp_path / f"paddock-node-{os.getuid()}"
    node_folder_path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="another user"):
        node_folder()
