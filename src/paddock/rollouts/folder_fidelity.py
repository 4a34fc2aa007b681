"""Whether a fork has the same files as the recorded rollout, at each call that it repeats and where it goes live.

Snapshots are compared at equal calls. A file whose texts differ only in times, ids and the like (see `volatile`), and
what git and Python keep with times in it, is not a difference but is named.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, Any

from paddock.capture.recorded.conversation import diff
from paddock.capture.recorded.volatile import mask_volatile
from paddock.errors import StoreError
from paddock.rollouts.folder_changes import LARGEST_TEXT_BYTES, decode_text, readable_path, repository_of
from paddock.store.snapshots import FileChange, SnapshotHistory, compare_folders

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from paddock.capture.trace import Call
    from paddock.store import Store

VOLATILE_SUFFIXES = (".pyc", ".pyo")
MOST_PATHS = 50


def compare_with_source(
    store: Store, source_id: str, own: Sequence[Call], pairs: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """The result for the record of a fork. `own` are its calls, `pairs` those to compare, with the recorded ones."""
    source = store.get(source_id)
    if source is None:
        return unknown(f"rollout {source_id} is no longer in the store")
    recorded = store.calls(source.rollout_id)
    history, own_history = (
        SnapshotHistory([(call.id, call.snapshot) for call in calls], store.get_blob) for calls in (recorded, own)
    )
    if not history:
        return unknown(f"rollout {source_id} was recorded without snapshots")
    uncertain = find_interleaved(recorded), find_interleaved(own)
    chosen = [pair for pair in pairs if pair[0] not in uncertain[1] and pair[1] not in uncertain[0]]
    if pairs and not chosen:
        return unknown("several conversations went on at the same time")
    try:
        result = compare_histories(history, own_history, chosen, store.get_blob)
    except StoreError as error:
        return unknown(f"the snapshots of rollout {source_id} cannot be read: {error.message}")
    return {**result, "uncertain_calls": len(pairs) - len(chosen)}


def find_interleaved(calls: Sequence[Call]) -> set[str]:
    """The calls at which another conversation may have been running a tool.

    It made a call before and a call after, and was not just waiting for this conversation, as an agent does for its
    sub-agent: then all calls of this conversation are between the two."""
    ordered = sorted(calls, key=lambda call: call.started)
    roots: dict[str, str] = {}
    for call in ordered:
        roots[call.id] = roots.get(call.parent or "", call.id)
    places: dict[str, list[int]] = {}
    for place, call in enumerate(ordered):
        places.setdefault(roots[call.id], []).append(place)
    interleaved = set()
    for place, call in enumerate(ordered):
        own = places[roots[call.id]]
        for others in places.values():
            index = bisect(others, place)
            if others is own or not 0 < index < len(others):
                continue
            if not others[index - 1] < own[0] <= own[-1] < others[index]:
                interleaved.add(call.id)
    return interleaved


def unknown(reason: str) -> dict[str, Any]:
    return {"state": None, "reason": reason}


def compare_later(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """In place of the result where the recorded snapshots are missing. Who has them compares these calls."""
    return {**unknown("the recorded snapshots are at the driver"), "pairs": pairs}


def compare_histories(
    recorded: SnapshotHistory,
    own: SnapshotHistory,
    pairs: Sequence[tuple[str, str]],
    read_blob: Callable[[str], bytes],
) -> dict[str, Any]:
    """`state` is `equal`, `volatile` (only volatile parts differ), `different`, or None with a `reason`."""
    compared = equal = 0
    problem = "no call was repeated"
    differences: dict[str, dict[str, Any]] = {}
    volatile: dict[str, None] = {}
    for name, recorded_name in pairs:
        before, after = recorded.folder(recorded_name), own.folder(name)
        if before is None or after is None:
            problem = find_problem(recorded, recorded_name) or find_problem(own, name) or "a snapshot is missing"
            continue
        compared += 1
        changes = compare_folders(before, after)
        real = [change for change in changes if not is_volatile(change, read_blob)]
        equal += not real
        volatile |= dict.fromkeys(
            repository_of(each.path) or readable_path(each.path) for each in changes if each not in real
        )
        for change in real:
            place = {"call": name, "recorded": recorded_name}
            differences.setdefault(change.path, describe(change, read_blob) | place)
    state = "different" if differences else "volatile" if volatile else "equal"
    return {
        "state": state if compared else None,
        "reason": None if compared else problem,
        "compared_calls": compared,
        "equal_calls": equal,
        "different_paths": len(differences),
        "paths": list(differences.values())[:MOST_PATHS],
        "volatile": [path for path in volatile if path not in differences][:MOST_PATHS],
    }


def find_problem(history: SnapshotHistory, name: str) -> str | None:
    snapshot = history.get(name)
    return None if snapshot is None else snapshot.problem


def is_volatile(change: FileChange, read_blob: Callable[[str], bytes]) -> bool:
    """Whether an entry differs only in what differs from one run to the next."""
    if repository_of(change.path) is not None or change.path.endswith(VOLATILE_SUFFIXES):
        return True
    before, after = change.before, change.after
    if before is None or after is None or (before.kind, before.mode) != (after.kind, after.mode):
        return False
    texts = read_texts(change, read_blob)
    return texts is not None and mask_volatile(texts[0]) == mask_volatile(texts[1])


def read_texts(change: FileChange, read_blob: Callable[[str], bytes]) -> tuple[str, str] | None:
    """Both contents of a file, if they are texts that are not too long."""
    texts = []
    for state in (change.before, change.after):
        if state is None or state.digest is None or state.size > LARGEST_TEXT_BYTES:
            return None
        text = decode_text(read_blob(state.digest))
        if text is None:
            return None
        texts.append(text)
    return texts[0], texts[1]


def describe(change: FileChange, read_blob: Callable[[str], bytes]) -> dict[str, Any]:
    """One difference, for people."""
    texts = read_texts(change, read_blob)
    difference = None if texts is None else diff(texts[0].splitlines(), texts[1].splitlines())
    kind = {"added": "only in the fork", "removed": "missing in the fork"}.get(change.kind, "different")
    if change.before is not None and change.after is not None and change.before.mode != change.after.mode:
        kind = f"mode {change.before.mode:o} was recorded, it is {change.after.mode:o}"
    return {"path": readable_path(change.path), "kind": kind, "difference": difference}


def describe_files(files: Mapping[str, Any]) -> str:
    """The result on one line."""
    if files["state"] is None:
        return f"files not compared: {files['reason']}"
    calls = f"{files['equal_calls']} of {files['compared_calls']} calls"
    if files["state"] == "different":
        first = files["paths"][0]
        more = f" and {files['different_paths'] - 1} more" if files["different_paths"] > 1 else ""
        return f"files differ from {first['call']} on ({first['path']}{more}); equal at {calls}"
    if files["state"] == "volatile":
        return f"files equal at {calls}, but for times and ids"
    return f"files equal at {calls}"
