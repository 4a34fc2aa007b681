"""Which recorded call answers a request of the agent, and how alike the two rollouts are so far.

A request is matched by its masked conversation, not by the order of arrival: sub-agents run in parallel. Of several
recorded calls that are equally alike, the one whose unmasked text is nearest is taken. Each recorded call is used
once. Calls from `at` on, and calls that were not answered, are sampled live. No IO.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from paddock.capture.recorded.conversation import (
    FIDELITIES,
    Fidelity,
    MessageReader,
    MessageView,
    compare,
    describe_difference,
    describe_new_differences,
    distance,
    is_continued_by,
)
from paddock.capture.recorded.tool_lines import ToolLines
from paddock.capture.recorded.tool_results import find_results, replace_results
from paddock.capture.trace import Call, Role
from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FidelityPolicy = Literal["strict", "tolerant"]
FIDELITY_POLICIES: tuple[FidelityPolicy, ...] = ("strict", "tolerant")
"""`strict` stops at the first request that is not equal. `tolerant` continues while the conversation has the same
shape: the same roles, tool names and tool arguments."""
WRITTEN_BY_HAND = "its answer was written by hand"
"""The `token_problem` of a call with an edited answer."""


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A call of the source, and what the replay does when the agent makes it again."""

    call: Call
    view: tuple[MessageView, ...]
    is_answer: bool
    """Whether its answer, or its error, is sent again. Otherwise it is sampled live."""
    begins_live: bool
    """Whether the live part of the rollout begins here. Not with a call that the agent abandoned before it."""


@dataclass(frozen=True, slots=True)
class Match:
    """What a request is answered with."""

    recorded: Call | None = None
    """The call whose answer is sent. None: the request is sampled live."""
    divergence: str | None = None
    """Why the rollout cannot continue."""


@dataclass(slots=True)
class FidelityReport:
    """How a rollout compares with the recorded one, call by call."""

    calls: list[dict[str, Any]] = field(default_factory=list)
    """For each replayed request: `call`, `recorded`, `fidelity`, and `difference` if it is not equal."""
    diverged_at: str | None = None
    """The first recorded call that has no equivalent."""
    divergence: str | None = None
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """The calls until live sampling begins, with the recorded ones: both rollouts must have the same files there."""

    @property
    def state(self) -> str:
        """The worst of its calls, or `diverged`."""
        if self.divergence is not None:
            return "diverged"
        worst = max((FIDELITIES.index(entry["fidelity"]) for entry in self.calls), default=0)
        return str(FIDELITIES[worst])

    def to_json(self) -> dict[str, Any]:
        different = [entry for entry in self.calls if entry["fidelity"] != Fidelity.EQUAL]
        return {
            "state": self.state,
            "replayed_calls": len(self.calls),
            "different_calls": different,
            "diverged_at": self.diverged_at,
            "divergence": self.divergence,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change at the call where a fork begins: another answer, or another result of a tool before it."""

    answer: dict[str, Any] | None = None
    """The assistant message in place of the recorded one, as chat completions have it."""
    tool_result: str | None = None
    """The text in place of what the last tool before the call returned."""
    tool_call_id: str | None = None
    """Which tool call's result is replaced. None: the last one."""

    def __post_init__(self) -> None:
        if (self.answer is None) == (self.tool_result is None):
            raise ConfigError("an edit has an answer or a tool_result, and not both", hint="give one of them")


class Replay:
    """The recorded calls for one new rollout."""

    def __init__(
        self,
        source: str,
        calls: Sequence[Call],
        read_messages: Callable[[Call], Iterable[Any]],
        *,
        at: int | None,
        policy: FidelityPolicy = "tolerant",
        edit: Edit | None = None,
        is_copy: bool = True,
    ) -> None:
        """`source` is the id of the recorded rollout, `read_messages` gives a call's messages as chat completions.

        `at` is the first call that is sampled live. None continues after the last answer: then requests without an
        equivalent are new, because the record ends in the middle. `is_copy`: the recorded rollout trains on its
        calls, so this one must not."""
        self.source = source
        self.is_copy = is_copy
        self._edit = edit
        self._at = at
        self._results: dict[str, str] = {}
        """The results of tools that the model gets in place of the agent's, by the keys of `find_results`."""
        self.report = FidelityReport()
        self._policy = policy
        self._is_continuation = at is None
        self._reader = MessageReader()
        self._tool_lines = ToolLines(), ToolLines()
        """What the tools of the recorded rollout printed, and those of this one."""
        self._described: set[tuple[str, str]] = set()
        """The texts of the messages whose difference is in the report."""
        self._pending: list[RecordedCall] = []
        for call in calls:
            if edit is not None and call.index == at and call.role is Role.RETRIED:
                raise ConfigError(f"the agent repeated {call.id}", hint="choose the call that was answered")
            if call.role is Role.RETRIED:
                continue
            if at is None or call.index <= at:
                self._results |= call.tool_results
            is_before = at is not None and call.index < at
            is_answer = can_replay(call) if at is None else is_before and (can_replay(call) or was_refused(call))
            view = self._reader.read(read_messages(call))
            self._tool_lines[0].add(view)
            if edit is not None and call.index == at:
                call, is_answer = self._apply_edit(edit, call, list(read_messages(call)), is_answer)
            begins_live = not is_answer if at is None else not is_before
            self._pending.append(RecordedCall(call, view, is_answer, begins_live))
        if edit is not None and at == len(calls):
            raise ConfigError(f"the rollout has no call c{at} to edit", hint=f"its last call is c{len(calls) - 1}")
        self._used: list[RecordedCall] = []
        self._is_live = False
        """Whether a call was sampled live. From then on, requests need no equivalent."""

    def match(self, call_id: str, messages: Iterable[Any]) -> Match:
        """What answers the request `call_id`."""
        view = self._reader.read(messages)
        self._tool_lines[1].add(view)
        fidelity, recorded = self._find(view, self._pending)
        if fidelity is not Fidelity.EQUAL and not self._is_live:
            repeated = self._find(view, self._used)
            if repeated[0] is Fidelity.EQUAL and repeated[1] is not None:
                return Match(repeated[1].call)
        if recorded is None:
            return self._match_unknown(view)
        if not self._is_live:
            self.report.pairs.append((call_id, recorded.call.id))
        if not recorded.is_answer:
            self._is_live = self._is_live or recorded.begins_live
            self._pending.remove(recorded)
            return Match()
        assert fidelity is not None
        if self._is_live and fidelity is Fidelity.SAME_SHAPE:
            # Another conversation that began after the fork may have this shape.
            return Match()
        entry: dict[str, Any] = {"call": call_id, "recorded": recorded.call.id, "fidelity": str(fidelity)}
        if fidelity is not Fidelity.EQUAL:
            if self._policy == "strict":
                return self._diverge(recorded, describe_difference(recorded.view, view))
            entry["difference"] = describe_new_differences(recorded.view, view, self._described)
        self.report.calls.append(entry)
        self._pending.remove(recorded)
        self._used.append(recorded)
        self._is_live = self._is_live or recorded.begins_live
        return Match(recorded.call)

    def rewrite(self, messages: list[Any]) -> tuple[list[Any], dict[str, str]]:
        """The messages with the replaced results of tools, and which these are."""
        return replace_results(messages, self._results)

    def is_edited(self, call: Call) -> bool:
        """Whether the answer of this call comes from the edit."""
        return self._edit is not None and self._edit.answer is not None and call.index == self._at

    def _apply_edit(self, edit: Edit, call: Call, messages: list[Any], is_answer: bool) -> tuple[Call, bool]:
        """The call with the edited answer. An edited tool result is kept for `rewrite`. Raises ConfigError."""
        if edit.answer is not None:
            return make_edited(call, edit.answer), True
        keys = {call_id: key for _, call_id, key in find_results(messages)}
        chosen = edit.tool_call_id or next(reversed(keys), None)
        if chosen is None or chosen not in keys:
            listed = ", ".join(keys) or "there is none before this call"
            raise ConfigError(
                f"{call.id} follows no tool result {chosen or ''}".rstrip(), hint=f"tool calls: {listed}"
            )
        assert edit.tool_result is not None
        self._results[keys[chosen]] = edit.tool_result
        return call, is_answer

    def _find(
        self, view: tuple[MessageView, ...], candidates: Sequence[RecordedCall]
    ) -> tuple[Fidelity | None, RecordedCall | None]:
        """The most similar candidate, of several the one with the nearest text, then the earliest."""
        alike: list[tuple[int, RecordedCall]] = []
        for candidate in candidates:
            fidelity = compare(candidate.view, view, self._tool_lines)
            if fidelity is not None:
                alike.append((FIDELITIES.index(fidelity), candidate))
        if not alike:
            return None, None
        best = min(rank for rank, _ in alike)
        nearest = [candidate for rank, candidate in alike if rank == best]
        if len(nearest) > 1:
            nearest.sort(key=lambda candidate: distance(candidate.view, view))
        return FIDELITIES[best], nearest[0]

    def _match_unknown(self, view: tuple[MessageView, ...]) -> Match:
        """A request without an equivalent: live sampling has begun, the record ends here, or the agent diverged."""
        due = [each for each in self._pending if each.is_answer]
        if self._is_live or not due:
            self._is_live = True
            return Match()
        parents = [each for each in self._used if is_continued_by(each.view, view)]
        parent = max(parents, key=lambda each: len(each.view), default=None)
        following = [each for each in due if parent is not None and is_continued_by(parent.view, each.view)]
        if self._is_continuation and not following:
            self._is_live = True
            return Match()
        expected = (following or due)[0]
        return self._diverge(expected, describe_difference(expected.view, view))

    def _diverge(self, expected: RecordedCall, difference: str) -> Match:
        report = self.report
        if report.divergence is None:
            report.diverged_at, report.divergence = expected.call.id, difference
        return Match(divergence=f"the rollout diverged from {self.source} at call {report.diverged_at}: {difference}")


def make_edited(call: Call, answer: dict[str, Any]) -> Call:
    """The call with another answer, which has no tokens."""
    message = {"role": "assistant", "content": None, **answer}
    return replace(
        call,
        message=message,
        finish_reason="tool_calls" if message.get("tool_calls") else "stop",
        completion_token_ids=[],
        logprobs=[],
        tokens=[],
        top_logprobs=[],
        usage={},
        token_problem=WRITTEN_BY_HAND,
        error=None,
        aborted=False,
    )


def can_replay(call: Call) -> bool:
    """Whether the agent got an answer that can be sent again."""
    return call.ok and call.ended is not None and bool(call.message)


def was_refused(call: Call) -> bool:
    """Whether the agent got an error, for example because its conversation was too long."""
    return call.error is not None and not call.aborted and call.ended is not None
