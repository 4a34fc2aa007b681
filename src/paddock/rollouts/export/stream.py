"""Rollouts from a store to a file, however many there are: a few in memory at a time."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol

import orjson

from paddock.errors import ConfigError, StoreError
from paddock.rollouts.export import Form, load_form
from paddock.rollouts.export.checks import UNSCORED
from paddock.rollouts.export.policy import Policy
from paddock.rollouts.store import bulk, calls, rows
from paddock.rollouts.trace import Caller

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from paddock.rollouts.record import RolloutRecord
    from paddock.rollouts.store import Store
    from paddock.rollouts.trace import Call

    Kept = tuple[RolloutRecord, list[Call]]

AT_ONCE = 100
"""Rollouts that are read with one question."""
WHOLE_AT_ONCE = 4
"""Rollouts with all their messages: each may be large."""
PART_BYTES = 4_000_000
"""A part of lines is full with this many."""
_ANY = Policy()


@dataclass(slots=True)
class Finding:
    """Something to say about a rollout that is checked."""

    rollout_id: str
    kind: str
    """`left out`: the rollout; `call`: one of its calls was left out; `wrong`: what would be written is not right."""
    text: str


@dataclass(slots=True)
class Report:
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

    @property
    def seen(self) -> int:
        """Rollouts, with something in the file or without."""
        return self.rollouts + sum(self.left_out.values())

    def leave_out(self, reason: str, count: int = 1) -> None:
        self.left_out[reason] = self.left_out.get(reason, 0) + count

    def include(self, other: Report) -> None:
        self.rollouts += other.rollouts
        self.documents += other.documents
        self.tokens += other.tokens
        self.foreign += other.foreign
        for reason, count in other.left_out.items():
            self.leave_out(reason, count)


@dataclass(slots=True)
class Part:
    """What a run of rollouts is in a file."""

    data: bytes | memoryview
    """Lines; for Parquet, a table as a stream of Arrow. Nothing if all were left out."""
    report: Report


class Shaper(Protocol):
    """A part in the making."""

    @property
    def is_full(self) -> bool: ...

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        """How many documents a rollout has, and how many tokens are counted for them."""

    def data(self) -> bytes | memoryview: ...


def rollouts(store: Store, keys: Sequence[int], *, whole: bool) -> Iterator[Kept]:
    """Rollouts with their calls, in the order of `keys`. Without `whole`, as `bulk.read` gives them."""
    size = WHOLE_AT_ONCE if whole else AT_ONCE
    question: Callable[[sqlite3.Connection, Sequence[int]], list[Kept]] = _whole if whole else bulk.read
    for start in range(0, len(keys), size):
        yield from store.ask(question, keys[start : start + size])


def _whole(connection: sqlite3.Connection, keys: Sequence[int]) -> list[Kept]:
    return [(rows.read(connection, key), calls.load(connection, key)) for key in keys]


def chosen(store: Store, rollout_ids: Iterable[str] = (), filters: rows.Filters | None = None) -> list[int]:
    """The keys of the rollouts with these ids (their first characters are enough), or of all that fit."""
    wanted = list(rollout_ids)
    if not wanted:
        return store.ask(bulk.keys, filters or rows.Filters(finished=True))
    found = []
    for rollout_id in wanted:
        key = store.ask(rows.find, rollout_id)
        if key is None:
            raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
        found.append(key)
    return found


def export(
    store: Store,
    form: str,
    target: Path | str | IO[bytes],
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    progress: Callable[[], None] | None = None,
    readers: int | None = None,
) -> Report:
    """Write rollouts in a form; `progress` is called for each. Raises ConfigError if there is no such form.

    `readers` are processes that read beside this one. None takes them where there are many rollouts."""
    load_form(form)
    wanted = chosen(store) if keys is None else keys
    report = Report()
    with _sink(form, target) as write, _parts(store, form, wanted, policy, readers) as parts:
        for part in parts:
            write(part)
            report.include(part.report)
            if progress is not None:
                for _ in range(part.report.seen):
                    progress()
    return report


@contextmanager
def _parts(
    store: Store, form: str, keys: Sequence[int], policy: Policy, readers: int | None
) -> Iterator[Iterable[Part]]:
    from paddock.rollouts.export import crew

    size = WHOLE_AT_ONCE if load_form(form).WHOLE else AT_ONCE
    runs = [keys[start : start + size] for start in range(0, len(keys), size)]
    count = crew.worth(store, len(keys), policy) if readers is None else readers
    if not count:
        yield (part for run in runs for part in shape(store, form, run, policy))
        return
    with crew.Crew(count, store.path, form, policy) as working:
        yield working.parts(runs)


def shape(store: Store, form: str, keys: Sequence[int], policy: Policy) -> Iterator[Part]:
    """The parts of a run of rollouts: one, unless they are large."""
    loaded = load_form(form)
    report, shaper = Report(), _shaper(form, policy)
    for record, sampled in rollouts(store, keys, whole=loaded.WHOLE):
        documents, tokens = shaper.add(record, sampled)
        report.foreign += foreign(sampled)
        if documents:
            report.rollouts += 1
            report.documents += documents
            report.tokens += tokens
        else:
            report.leave_out(why(record, sampled, policy))
        if shaper.is_full:
            yield Part(shaper.data(), report)
            report, shaper = Report(), _shaper(form, policy)
    if report.seen:
        yield Part(shaper.data(), report)


def _shaper(form: str, policy: Policy) -> Shaper:
    if form == "parquet":
        from paddock.rollouts.export.parquet import Rows

        return Rows(policy)
    return Lines(load_form(form), policy)


class Lines:
    """JSON, an object on each line."""

    def __init__(self, form: Form, policy: Policy) -> None:
        self._form = form
        self._policy = policy
        self._lines: list[bytes] = []
        self._size = 0

    @property
    def is_full(self) -> bool:
        return self._size >= PART_BYTES

    def add(self, record: RolloutRecord, calls: Sequence[Call]) -> tuple[int, int]:
        before = len(self._lines)
        for document in self._form.export(record, calls, self._policy):
            line = orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
            self._lines.append(line)
            self._size += len(line)
        return len(self._lines) - before, sum(len(call.completion_token_ids) for call in calls)

    def data(self) -> bytes:
        return b"".join(self._lines)


@contextmanager
def _sink(form: str, target: Path | str | IO[bytes]) -> Iterator[Callable[[Part], object]]:
    """What writes parts, in the order in which it gets them."""
    with ExitStack() as stack:
        if form == "parquet":
            from paddock.rollouts.export.parquet import Writer

            if not isinstance(target, str | Path):
                raise ConfigError("Parquet is written to a file", hint="give --out FILE.parquet")
            writer = stack.enter_context(Writer(Path(target)))
            yield lambda part: writer.add(part.data, part.report.tokens)
        else:
            file = stack.enter_context(Path(target).open("wb")) if isinstance(target, str | Path) else target
            yield lambda part: file.write(part.data)


def check(
    store: Store,
    form: str,
    *,
    keys: Sequence[int] | None = None,
    policy: Policy = _ANY,
    tell: Callable[[Finding], None] = lambda finding: None,
    progress: Callable[[], None] | None = None,
) -> Report:
    """Make everything that `export` would write and judge it: by our own rules, and by the trainer's package if that
    can be imported. `tell` hears of everything left out or wrong, as it is found."""
    loaded = load_form(form)
    wanted = chosen(store) if keys is None else keys
    report, judge = Report(), _Judge(loaded)
    for record, sampled in rollouts(store, wanted, whole=loaded.WHOLE):
        documents = list(loaded.export(record, sampled, policy))
        for wrong in judge(documents, unscored=policy.unscored == "flag"):
            report.wrong += 1
            tell(Finding(record.rollout_id, "wrong", wrong))
        report.documents += len(documents)
        report.foreign += foreign(sampled)
        report.rollouts += bool(documents)
        if not documents:
            reason = why(record, sampled, policy)
            report.leave_out(reason)
            tell(Finding(record.rollout_id, "left out", reason))
        else:
            for call, refused in zip(sampled, policy.refusals(sampled), strict=True):
                if refused is not None:
                    tell(Finding(record.rollout_id, "call", f"{call.id}: {refused}"))
        if progress is not None:
            progress()
    report.accepted = judge.accepted
    return report


def foreign(sampled: Sequence[Call]) -> int:
    return sum(call.caller is Caller.FOREIGN for call in sampled)


def why(record: RolloutRecord, sampled: Sequence[Call], policy: Policy) -> str:
    """Why nothing of a rollout is exported."""
    refused = policy.refuses(record)
    if refused is not None:
        return refused
    reasons = dict.fromkeys(reason for reason in policy.refusals(sampled) if reason is not None)
    return "none of its calls can be trained on: " + "; ".join(reasons) if reasons else "it has no calls"


class _Judge:
    def __init__(self, form: Form) -> None:
        self._form = form
        self._has_package = form.PACKAGE is not None
        self.accepted = 0

    def __call__(self, documents: Iterable[dict[str, Any]], *, unscored: bool) -> Iterator[str]:
        """What is wrong. Where rollouts without a reward were asked for, that is not."""
        for document in documents:
            found = [each for each in self._form.complaints(document) if not (unscored and each == UNSCORED)]
            try:
                orjson.dumps(document)
            except TypeError as error:
                found.append(f"it cannot be written: {error}")
            if self._has_package and not found:
                found += self._ask_package(document)
            yield from dict.fromkeys(found)

    def _ask_package(self, document: dict[str, Any]) -> list[str]:
        try:
            self._form.accept(document)
        except ImportError:
            self._has_package = False
        except Exception as error:
            return [f"{self._form.PACKAGE} does not take it: {type(error).__name__}: {error}"]
        else:
            self.accepted += 1
        return []
