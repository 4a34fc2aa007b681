"""Rollouts with snapshots, written to a store without running anything."""

import hashlib
from collections.abc import Mapping, Sequence

from paddock.capture.trace import Call
from paddock.sandbox.folder_scan import FileState
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord
from paddock.store.snapshots import CallSnapshot, encode_changes

Files = Mapping[str, bytes | FileState]


def save_snapshots(store: Store, folders: Sequence[Files], rollout_id: str = "r1234snapshots") -> str:
    """A finished rollout whose work folder held these files at its calls, and at its end."""
    record = RolloutRecord(rollout_id, "task", started_at=1.0)
    store.begin(record)
    before: dict[str, FileState] = {}
    since = None
    for number, files in enumerate(folders):
        name = f"c{number}" if number < len(folders) - 1 else "end"
        contents = {digest(each): each for each in files.values() if isinstance(each, bytes)}
        states = {path: state_of(each) for path, each in files.items()}
        changes: dict[str, FileState | None] = {
            path: each for path, each in states.items() if before.get(path) != each
        }
        changes |= dict.fromkeys(before.keys() - states.keys())
        encoded = encode_changes(changes)
        store.put_snapshot(rollout_id, {**contents, digest(encoded): encoded})
        snapshot = CallSnapshot(since, digest(encoded), len(changes)).to_json()
        if name == "end":
            record.snapshots = {"saved": len(folders), "left_out": {"venv": "why"}, "ends": {"end": snapshot}}
        else:
            message = {"role": "assistant", "content": f"Answer {number}."}
            store.save_call(rollout_id, Call(name, number, snapshot=snapshot, message=message, ended=2.0))
        before, since = states, name
    record.outcome, record.finished_at = Outcome.OK, 3.0
    store.finish(record)
    return rollout_id


def state_of(entry: bytes | FileState) -> FileState:
    return FileState("file", 0o644, len(entry), digest(entry)) if isinstance(entry, bytes) else entry


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
