"""A rollout as it is read along: its calls, and the transcript that they add up to.

Both only grow. `advance` reads what was written since the last time, so that following a rollout costs what is
new in it. The transcript is in the order in which things were written: a call's items stand where it ended.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store import blobs, calls, events, light, rows
from paddock.rollouts.store.packing import decode
from paddock.web import speech

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.store.light import Head
    from paddock.rollouts.trace import Event

    Item = dict[str, Any]

MANY = 100_000
AT_ONCE = 20
"""More new calls than this are read together."""
LIVE = ("agent_text", "agent_tool", "agent_error", "agent_warning")
"""Events that tell early what a call will show."""


class Trail:
    def __init__(self, key: int, rollout_id: str) -> None:
        self.key = key
        self.id = rollout_id
        self.head: dict[str, Any] = {}
        """The small values of the record, as last read."""
        self.is_orphan = False
        """It has no outcome, and the process that ran it is gone."""
        self.items: list[Item] = []
        self.calls: dict[str, Head] = {}
        self.changed_calls: list[str] = []
        """Ids of calls in the order in which they were written; one that was written again stands there again."""
        self.live: list[Item] = []
        """What the agent told since its last call: items that a call will replace."""
        self.stages: list[tuple[str, float]] = []
        self.prompts = light.Prompts(key)
        self.cache: dict[str, Any] = {}
        """What others have worked out, for as long as no call is added."""
        self._number = 0
        self._histories = light.Histories(key)
        self._digests: dict[int, list[bytes]] = {}
        self._shown: set[bytes] = set()
        self._answers: dict[bytes, dict[str, Any]] = {}
        """What was sampled, by the digest of the conversation that it answers."""
        self._systems: set[bytes] = set()
        self._tools: dict[str, str] = {}

    @property
    def finished(self) -> bool:
        return self.head.get("outcome") is not None

    @property
    def is_live(self) -> bool:
        return not self.finished and not self.is_orphan

    def ordered(self) -> list[Head]:
        """Calls in the order in which they began."""
        return sorted(self.calls.values(), key=lambda head: int(head.values["index"]))

    def advance(self, connection: sqlite3.Connection) -> None:
        """Read what is new. The record is read first: what it says has ended has all its events."""
        was_finished = self.finished
        self.head = rows.head(connection, self.key) or self.head
        new = events.read(connection, self.key, after=self._number, limit=MANY)
        many = sum(event.kind == "call" for _, event in new) > AT_ONCE
        heads = {head.id: head for head in light.heads(connection, self.key)} if many else {}
        for number, event in new:
            self._number = number
            self._take(connection, event, heads)
        if self.finished and not was_finished:
            for head in light.heads(connection, self.key):
                if head.id not in self.calls:
                    self._add(connection, head)
            self.live = []

    # -- events -------------------------------------------------------------------------------------

    def _take(self, connection: sqlite3.Connection, event: Event, heads: dict[str, Head]) -> None:
        kind, data = event.kind, event.data
        if kind == "call":
            name = str(data.get("call"))
            head = heads.get(name) or light.head(connection, self.key, name)
            if head is not None:
                self._add(connection, head)
        elif kind == "stage":
            self.stages.append((str(data.get("stage")), event.at))
            self._append({"kind": "note", "text": f"stage: {data.get('stage')}", "note": "stage"}, event.at)
        elif kind == "warning":
            self._append({"kind": "note", "text": str(data.get("warning")), "note": "warning"}, event.at)
        elif kind == "outcome":
            self._append({"kind": "note", "text": f"outcome: {data.get('outcome')}", "note": "outcome"}, event.at)
        elif kind in LIVE:
            self.live.append(_live(kind, data, event.at))

    def _append(self, item: Item, at: float | None, call: Head | None = None) -> None:
        label = None if call is None else str(call.values["role"])
        own = None if call is None else call.id
        self.items.append({"seq": len(self.items), "at": at, "call": own, "label": label, "role": None, **item})

    # -- calls --------------------------------------------------------------------------------------

    def _add(self, connection: sqlite3.Connection, head: Head) -> None:
        self.cache.clear()
        self.changed_calls.append(head.id)
        if head.id in self.calls:
            # Only what it was for has changed: its items stand already.
            self.calls[head.id] = head
            for item in self.items:
                if item["call"] == head.id:
                    item["label"] = str(head.values["role"])
            return
        self.calls[head.id] = head
        self.live = []
        for item in self._asked(connection, head):
            self._append(item, head.values["started"], head)
        for attempt in head.values.get("attempts") or ():
            self._append({"kind": "note", "text": _attempt(attempt), "note": "retry"}, attempt.get("ended"), head)
        message = head.values.get("message") or {}
        for item in speech.items_of({"role": "assistant", **message}, self._tools):
            self._append({**item, "sampled": True}, head.values["ended"], head)
        if head.values.get("error"):
            self._append(
                {"kind": "note", "text": str(head.values["error"]), "note": "error"}, head.values["ended"], head
            )
        elif head.values.get("aborted"):
            self._append(
                {"kind": "note", "text": "the call was cut off", "note": "error"}, head.values["ended"], head
            )

    def _asked(self, connection: sqlite3.Connection, head: Head) -> list[Item]:
        """What the conversation of a call has that no earlier one had."""
        history = head.history
        if history is None:
            return []
        name, key = history
        encoded, digests, known = self._chain(connection, key)
        new = next((at for at in range(known, len(digests)) if digests[at] not in self._shown), len(encoded))
        before = digests[new - 1] if new else b""
        items: list[Item] = []
        edited = False
        raw = [decode(item) for item in encoded[new:]]
        own = 0
        while before in self._answers and own < len(raw) and speech.is_own(raw[own]):
            own += 1
        dialect = str(head.values.get("dialect") or "chat")
        rest = {each: value for each, kind, value in head.request if kind == "value"}
        if own:
            came = speech.chat_messages(dialect, name, {**rest, name: raw[:own]})
            said = [each for each in came if each.get("role") == "assistant"]
            edited = not speech.is_same(said, self._answers[before])
            if not edited:
                raw = raw[own:]
        for at, message in enumerate(self._messages(connection, head, dialect, name, raw, rest)):
            for item in speech.items_of(message, self._tools):
                items.append({**item, "edited": True} if edited and at < own else item)
        self._shown.update(digests[new:])
        self._answers[digests[-1] if digests else b""] = head.values.get("message") or {}
        return items

    def _messages(
        self,
        connection: sqlite3.Connection,
        head: Head,
        dialect: str,
        name: str,
        raw: list[Any],
        rest: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """New messages in chat form, and the system prompt if the dialect has it beside them and it is new."""
        if dialect == "chat":
            return [message for message in raw if isinstance(message, dict)]
        names = [part for part in head.request if part[0] in SYSTEMS]
        beside = calls.joined(names, {}, blobs.Reader(connection))
        digest = blake2b(repr(beside).encode(errors="replace"), digest_size=16).digest()
        body = {name: raw, **{each: value for each, value in rest.items() if each not in SYSTEMS}}
        if digest not in self._systems:
            self._systems.add(digest)
            body.update(beside)
        return speech.chat_messages(dialect, name, body)

    def _chain(self, connection: sqlite3.Connection, key: int) -> tuple[list[bytes], list[bytes], int]:
        """The messages of a conversation, for each the digest of all up to it, and how many are surely shown."""
        encoded, base, shared = self._histories.get(connection, key)
        known = self._digests.get(base) if base is not None else None
        digests = known[:shared] if known is not None else []
        shown = len(digests)
        last = digests[-1] if digests else b""
        for item in encoded[len(digests) :]:
            last = blake2b(last + item, digest_size=16).digest()
            digests.append(last)
        self._digests[key] = digests
        if len(self._digests) > light.KEPT:
            del self._digests[next(iter(self._digests))]
        return encoded, digests, shown


SYSTEMS = ("system", "instructions", "systemInstruction", "system_instruction")
"""Where dialects have a system prompt beside the conversation."""


def _live(kind: str, data: dict[str, Any], at: float) -> Item:
    known = {name: value for name, value in data.items() if name != "kind"}
    item = {"seq": None, "kind": "event", "at": at, "call": None, "label": None, "role": "assistant", "event": kind}
    return {**known, **item, "what": data.get("kind")}


def _attempt(attempt: dict[str, Any]) -> str:
    status = attempt.get("status")
    how = attempt.get("error") or (f"status {status}" if status else "no answer")
    return f"asked again after: {how}"
