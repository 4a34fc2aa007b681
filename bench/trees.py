"""What a branch of a tree of rollouts takes in the store: `python -m bench.trees [--branches N]`.

A rollout of 20 calls is forked at call 10 and at call 19. Its tools print times, so the conversations of the forks
differ at many places. The size of a branch is by how much the file grows. It is compared with its new data: by how
much a file grows when the same new calls, and the record, are added to rollouts that have the first calls already.
"""

from __future__ import annotations

import argparse
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.rollout_store import VOCABULARY, growing_calls
from paddock.store import Store
from paddock.store.outcome import Outcome
from paddock.store.record import RolloutRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

    from paddock.capture.trace import Call

CALLS, ANSWER_BYTES = 20, 1000
BRANCH_POINTS = (10, 19)
TARGET = 1.2
LOG_LINES = 200


def with_times(calls: Sequence[Call], run: int) -> list[Call]:
    """The calls as in another run: each output of a tool ends with the time of that run."""
    changed = []
    for call in calls:
        copy = deepcopy(call)
        function = call.message["tool_calls"][0]["function"]
        copy.tokens = f"{call.message['content']} {function['arguments']}".split(" ")
        copy.session, copy.started = f"session-{run:08d}", call.started + 3600.0 * run
        for number, message in enumerate(copy.request["messages"]):
            if message["role"] == "tool":
                message["content"] += f" took {number * 7919 % 1000 + run} ms"
        for earlier in calls[1 : call.index + 1]:
            end = len(earlier.prompt_token_ids) - 1
            copy.prompt_token_ids[end] = (copy.prompt_token_ids[end] + run) % VOCABULARY
        changed.append(copy)
    return changed


def make_fork(source: str, recorded: Sequence[Call], at: int, run: int) -> list[Call]:
    """A fork of a recorded rollout: the replayed calls have the recorded tokens, the others are its own."""
    own = with_times(list(growing_calls(CALLS, answer_bytes=ANSWER_BYTES, branch=at, branch_seed=100 + run)), run)
    replayed = [
        replace(
            call,
            **{name: getattr(answered, name) for name in ("prompt_token_ids", "completion_token_ids", "logprobs")},
            replayed_from=f"{source}/{answered.id}",
            is_copy=True,
        )
        for call, answered in zip(own[:at], recorded[:at], strict=True)
    ]
    return [*replayed, *own[at:]]


def make_record(rollout_id: str, **fields: Any) -> RolloutRecord:
    log = "".join(f"{number} {rollout_id} the agent says what it does\n" for number in range(LOG_LINES))
    return RolloutRecord(rollout_id, "task", instruction="Make the tests pass.", agent_log=log, **fields)


def save(store: Store, record: RolloutRecord, calls: Sequence[Call]) -> None:
    store.begin(record)
    for call in calls:
        store.save_call(record.rollout_id, call)
    record.outcome, record.reward = Outcome.OK, 1.0
    store.finish(record)


def size_of(store: Store) -> int:
    """The size of the file without its log and without free pages."""
    store.prune()
    return store.size_bytes()


def measure_branches(store: Store, at: int, branches: int) -> float:
    """Bytes by which a branch lets the file grow."""
    recorded = with_times(list(growing_calls(CALLS, answer_bytes=ANSWER_BYTES)), 0)
    save(store, make_record("r-source"), recorded)
    before = size_of(store)
    for run in range(1, branches + 1):
        record = make_record(f"r-fork-{run}", fork={"source": "r-source", "at": at})
        calls = make_fork("r-source", recorded, at, run)
        save(store, record, calls)
        assert store.calls(record.rollout_id) == calls
    return (size_of(store) - before) / branches


def measure_new_data(store: Store, at: int, branches: int) -> float:
    """Bytes by which the same calls and records let the file grow in rollouts that are no forks."""
    rollouts = []
    for run in range(1, branches + 1):
        record = make_record(f"r-alone-{run}")
        calls = with_times(
            list(growing_calls(CALLS, answer_bytes=ANSWER_BYTES, branch=at, branch_seed=100 + run)), run
        )
        rollouts.append((record, calls))
        store.begin(RolloutRecord(record.rollout_id, "task"))
        for call in calls[:at]:
            store.save_call(record.rollout_id, call)
    before = size_of(store)
    for record, calls in rollouts:
        for call in calls[at:]:
            store.save_call(record.rollout_id, call)
        record.outcome, record.reward = Outcome.OK, 1.0
        store.finish(record)
    return (size_of(store) - before) / branches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--branches", type=int, default=16)
    options = parser.parse_args()
    for at in BRANCH_POINTS:
        with tempfile.TemporaryDirectory() as folder, Store.open(Path(folder) / "forks") as store:
            stored = measure_branches(store, at, options.branches)
            with Store.open(Path(folder) / "alone") as alone:
                new = measure_new_data(alone, at, options.branches)
        print(
            f"{CALLS} calls, forked at call {at}: {stored / 1000:.1f} kB stored, {new / 1000:.1f} kB new:"
            f" {stored / new:.2f} x (target {TARGET} x)"
        )


if __name__ == "__main__":
    main()
