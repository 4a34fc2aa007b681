"""Exports a store to a file, in batches of rollouts, so that memory use does not grow with the store."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import orjson

from paddock.capture.trace import Caller
from paddock.errors import ConfigError, StoreError
from paddock.export import FORMS, Form, load_form
from paddock.export.checks import UNSCORED
from paddock.export.policy import Policy
from paddock.export.shared_calls import SharedCalls
from paddock.store import bulk_read, calls, rows, search, tree
from paddock.store.search import Search

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export import RolloutWriter, TreeExport
    from paddock.store import Store
    from paddock.store.record import RolloutRecord

    StoredRollout = tuple[RolloutRecord, list[Call]]

ROLLOUTS_PER_QUERY = 100
WHOLE_ROLLOUTS_PER_QUERY = 4
"""With all their messages: each may be large."""
_ANY = Policy()


@dataclass(slots=True)
class ExportFinding:
    """A fact about a rollout that is checked."""

    rollout_id: str
    kind: str
    """`left out`: the rollout; `call`: one of its calls was left out; `wrong`: what would be written is not right."""
    text: str


@dataclass(slots=True)
class ExportReport:
    """What was written, or would be."""

    rollouts: int = 0
    """Those with something in the file."""
    documents: int = 0
    tokens: int = 0
    foreign: int = 0
    """Calls that were left out because another process than the agent's program made them."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Rollouts that have nothing in the file, counted by the reason."""
    wrong: int = 0
    """Documents with something wrong."""
    accepted: int = 0
    """Documents that the trainer's own package took."""

    def leave_out(self, reason: str) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + 1


def select_keys(store: Store, rollout_ids: Iterable[str] = (), matching: Search | None = None) -> list[int]:
    """The keys of the rollouts with these ids (their first characters are enough), or of all that match."""
    names = list(rollout_ids)
    if not names:
        return store.query(search.page, matching or Search(running=False), order="asc").tolist()
    keys = []
    for rollout_id in names:
        key = store.query(rows.find, rollout_id)
        if key is None:
            raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
        keys.append(key)
    return keys


def read_rollouts(store: Store, keys: Sequence[int], *, whole: bool) -> Iterator[StoredRollout]:
    """Rollouts with their calls, in the order of `keys`. Without `whole`, calls are those of `bulk_read`."""
    size = WHOLE_ROLLOUTS_PER_QUERY if whole else ROLLOUTS_PER_QUERY
    read: Callable[[sqlite3.Connection, Sequence[int]], list[StoredRollout]] = (
        _read_whole if whole else bulk_read.read
    )
    for start in range(0, len(keys), size):
        yield from store.query(read, keys[start : start + size])


def _read_whole(connection: sqlite3.Connection, keys: Sequence[int]) -> list[StoredRollout]:
    return [(rows.read(connection, key), calls.load(connection, key)) for key in keys]


# -- writing --------------------------------------------------------------------------------------


def export(
    store: Store,
    form: str,
    target: Path | str | IO[bytes],
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    progress: Callable[[], None] | None = None,
) -> ExportReport:
    """Write rollouts in a form; `progress` is called for each. Raises ConfigError if there is no such form.

    Without `keys`, all finished rollouts are written, in the order they began."""
    loaded = load_form(form)
    report = ExportReport()
    shared = SharedCalls(store, policy)
    with _open_writer(loaded, form, target, policy) as writer:
        selected = select_keys(store) if keys is None else keys
        for record, sampled in read_rollouts(store, selected, whole=loaded.needs_whole_calls):
            shared.mark(record, sampled)
            documents, tokens = writer.add(record, sampled)
            report.foreign += count_foreign_calls(sampled)
            if documents:
                report.rollouts += 1
                report.documents += documents
                report.tokens += tokens
            else:
                report.leave_out(exclusion_reason(record, sampled, policy))
            if progress is not None:
                progress()
    return report


def export_trees(
    store: Store,
    form: str,
    target: Path | str | IO[bytes],
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    progress: Callable[[], None] | None = None,
) -> ExportReport:
    """Write one document for each tree of rollouts: a rollout with its forks, of those that `keys` name.

    Raises ConfigError for a form that has no trees."""
    make = _tree_maker(form)
    with ExitStack() as stack:
        file = stack.enter_context(Path(target).open("wb")) if isinstance(target, str | Path) else target
        report = ExportReport()
        for documents, members in _read_trees(store, make, keys, policy):
            for document in documents:
                file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
            _count_tree(report, documents, members, policy)
            if progress is not None:
                for _ in members:
                    progress()
    return report


def check_trees(
    store: Store,
    form: str,
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    on_finding: Callable[[ExportFinding], None] = lambda finding: None,
    progress: Callable[[], None] | None = None,
) -> ExportReport:
    """Make everything that `export_trees` would write, and check it by our own rules."""
    make, loaded = _tree_maker(form), load_form(form)
    find_problems = loaded.find_tree_problems or loaded.find_problems
    checker = _DocumentChecker(
        replace(loaded, find_problems=find_problems, validate=None), allows_unscored=policy.unscored == "flag"
    )
    report = ExportReport()
    for documents, members in _read_trees(store, make, keys, policy):
        for problem in checker.find_problems(documents):
            report.wrong += 1
            on_finding(ExportFinding(members[0][0].rollout_id, "wrong", problem))
        _count_tree(report, documents, members, policy)
        if progress is not None:
            for _ in members:
                progress()
    return report


def _tree_maker(form: str) -> TreeExport:
    make = load_form(form).export_tree
    if make is None:
        able = ", ".join(name for name in FORMS if load_form(name).export_tree is not None)
        raise ConfigError(
            f"{form} has no form for trees",
            hint=f"use --to {able}, or leave --tree out: then each branch is a complete sequence,"
            " and what branches share is trained on in one of them",
        )
    return make


def _read_trees(
    store: Store, make: TreeExport, keys: Sequence[int] | None, policy: Policy
) -> Iterator[tuple[list[dict[str, Any]], list[StoredRollout]]]:
    """The documents of each tree, and its rollouts."""
    selected = select_keys(store) if keys is None else keys
    for tree_id, members in store.query(tree.families, selected):
        rollouts = list(read_rollouts(store, members, whole=False))
        if rollouts:
            yield list(make(rollouts, policy, tree_id)), rollouts


def _count_tree(
    report: ExportReport, documents: Sequence[dict[str, Any]], members: Sequence[StoredRollout], policy: Policy
) -> None:
    written = {each["rollout_id"] for document in documents for each in document["rollouts"]}
    report.documents += len(documents)
    report.tokens += sum(sum(node["mask"]) for document in documents for node in document["nodes"])
    for record, sampled in members:
        report.foreign += count_foreign_calls(sampled)
        if record.rollout_id in written:
            report.rollouts += 1
        else:
            report.leave_out(exclusion_reason(record, sampled, policy))


class LineWriter:
    """Writes JSON, one document per line."""

    def __init__(self, form: Form, policy: Policy, file: IO[bytes]) -> None:
        self._form = form
        self._policy = policy
        self._file = file

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        documents = 0
        for document in self._form.export(record, calls, self._policy):
            self._file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))
            documents += 1
        return documents, sum(len(call.completion_token_ids) for call in calls)


@contextmanager
def _open_writer(form: Form, name: str, target: Path | str | IO[bytes], policy: Policy) -> Iterator[RolloutWriter]:
    if form.open_writer is not None:
        if not isinstance(target, str | Path):
            raise ConfigError(f"{name} is written to a file", hint=f"give --out FILE.{form.suffix}")
        with form.open_writer(Path(target), policy) as writer:
            yield writer
    elif isinstance(target, str | Path):
        with Path(target).open("wb", buffering=1 << 20) as file:
            yield LineWriter(form, policy, file)
    else:
        yield LineWriter(form, policy, target)


def count_foreign_calls(calls: Sequence[Call]) -> int:
    return sum(call.caller is Caller.FOREIGN for call in calls)


def exclusion_reason(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> str:
    """Why nothing of a rollout is exported."""
    reason = policy.rejects(record)
    if reason is not None:
        return reason
    reasons = dict.fromkeys(reason for reason in policy.rejections(calls) if reason is not None)
    return "none of its calls can be trained on: " + "; ".join(reasons) if reasons else "it has no calls"


# -- checking -------------------------------------------------------------------------------------


def check(
    store: Store,
    form: str,
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    on_finding: Callable[[ExportFinding], None] = lambda finding: None,
    progress: Callable[[], None] | None = None,
) -> ExportReport:
    """Make everything that `export` would write, and check it: by our own rules, and by the trainer's package if that
    can be imported. `on_finding` is called for everything that is left out or wrong."""
    loaded = load_form(form)
    selected = select_keys(store) if keys is None else keys
    report, checker = ExportReport(), _DocumentChecker(loaded, allows_unscored=policy.unscored == "flag")
    shared = SharedCalls(store, policy)
    for record, sampled in read_rollouts(store, selected, whole=loaded.needs_whole_calls):
        shared.mark(record, sampled)
        documents = list(loaded.export(record, sampled, policy))
        for problem in checker.find_problems(documents):
            report.wrong += 1
            on_finding(ExportFinding(record.rollout_id, "wrong", problem))
        report.documents += len(documents)
        report.foreign += count_foreign_calls(sampled)
        report.rollouts += bool(documents)
        if not documents:
            reason = exclusion_reason(record, sampled, policy)
            report.leave_out(reason)
            on_finding(ExportFinding(record.rollout_id, "left out", reason))
        else:
            for call, rejection in zip(sampled, policy.rejections(sampled), strict=True):
                if rejection is not None:
                    on_finding(ExportFinding(record.rollout_id, "call", f"{call.id}: {rejection}"))
        if progress is not None:
            progress()
    report.accepted = checker.accepted
    return report


class _DocumentChecker:
    def __init__(self, form: Form, *, allows_unscored: bool) -> None:
        self._form = form
        self._allows_unscored = allows_unscored
        self._validate = form.validate
        self.accepted = 0

    def find_problems(self, documents: Iterable[dict[str, Any]]) -> Iterator[str]:
        for document in documents:
            problems = list(self._form.find_problems(document))
            if self._allows_unscored:
                problems = [problem for problem in problems if problem != UNSCORED]
            try:
                orjson.dumps(document)
            except TypeError as error:
                problems.append(f"it cannot be written: {error}")
            if self._validate is not None and not problems:
                problems += self._validate_with_package(document, self._validate)
            yield from dict.fromkeys(problems)

    def _validate_with_package(
        self, document: dict[str, Any], validate: Callable[[dict[str, Any]], object]
    ) -> list[str]:
        try:
            validate(document)
        except ImportError:
            self._validate = None
        except Exception as error:
            return [f"{self._form.package} does not take it: {type(error).__name__}: {error}"]
        else:
            self.accepted += 1
        return []
