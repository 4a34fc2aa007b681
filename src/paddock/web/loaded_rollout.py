"""A rollout in memory that is read incrementally: its calls, and the transcript made from them.

Both only grow: `refresh` reads what was written since the last time. The transcript is in the order of writing: a
call adds its items when it has ended.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from paddock.store import blobs, calls, events, partial_read, rows, sequences
from paddock.store.packing import decode, encode
from paddock.web import transcript_items
from paddock.web.tool_spans import ToolSpans

if TYPE_CHECKING:
    import sqlite3

    from paddock.capture.trace import Event
    from paddock.store.partial_read import CallHead

    Item = dict[str, Any]

MAX_EVENTS = 100_000
BULK_CALLS = 20
"""More new calls than this are read with one query."""
PROVISIONAL_EVENTS = ("agent_text", "agent_tool", "agent_error", "agent_warning")
"""Events that announce what a later call will contain."""


class LoadedRollout:
    """One rollout. `live` items are provisional: the next call replaces them."""

    def __init__(self, key: int, rollout_id: str) -> None:
        self.key = key
        self.id = rollout_id
        self.head: dict[str, Any] = {}
        """The small values of the record, as last read."""
        self.is_orphan = False
        """It has no outcome, and its process has ended."""
        self.items: list[Item] = []
        self.calls: dict[str, CallHead] = {}
        self.changed_calls: list[str] = []
        """Ids of calls in the order in which they were written; one that was written again is listed again."""
        self.live: list[Item] = []
        """Items for the events since the last call."""
        self.stages: list[tuple[str, float]] = []
        self.tools = ToolSpans()
        self.prompts = sequences.PromptReader()
        self.cache: dict[str, Any] = {}
        """Derived values of other modules, until a call is added."""
        self._number = 0
        self._conversations = sequences.ConversationReader()
        self._digests: dict[int, list[bytes]] = {}
        self._seen_prefixes: set[bytes] = set()
        self._answers: dict[bytes, dict[str, Any]] = {}
        """Sampled messages, by the digest of the conversation that they answer."""
        self._system_prompts: set[bytes] = set()
        self._tools: dict[str, str] = {}

    @property
    def is_finished(self) -> bool:
        return self.head.get("outcome") is not None

    @property
    def is_live(self) -> bool:
        return not self.is_finished and not self.is_orphan

    def ordered(self) -> list[CallHead]:
        """Calls in the order in which they began."""
        return sorted(self.calls.values(), key=lambda head: int(head.values["index"]))

    def refresh(self, connection: sqlite3.Connection) -> None:
        """Read what is new. The record is read first: if it has an outcome, all events are there."""
        was_finished = self.is_finished
        self.head = rows.head(connection, self.key) or self.head
        new = events.read(connection, self.key, after=self._number, limit=MAX_EVENTS)
        is_bulk = sum(event.kind == "call" for _, event in new) > BULK_CALLS
        heads = {head.id: head for head in partial_read.heads(connection, self.key)} if is_bulk else {}
        for number, event in new:
            self._number = number
            self._add_event(connection, event, heads)
        if self.is_finished and not was_finished:
            for head in partial_read.heads(connection, self.key):
                if head.id not in self.calls:
                    self._add_call(connection, head)
            self.live = []

    # -- events -------------------------------------------------------------------------------------

    def _add_event(self, connection: sqlite3.Connection, event: Event, heads: dict[str, CallHead]) -> None:
        kind, data = event.kind, event.data
        if kind == "call":
            name = str(data.get("call"))
            head = heads.get(name) or partial_read.head(connection, self.key, name)
            if head is not None:
                self._add_call(connection, head)
        elif kind == "stage":
            self.stages.append((str(data.get("stage")), event.at))
            self._append({"kind": "note", "text": f"stage: {data.get('stage')}", "note": "stage"}, event.at)
        elif kind == "pause":
            self._append({"kind": "note", "text": describe_pause(data), "note": "stage"}, event.at)
        elif kind == "warning":
            self._append({"kind": "note", "text": str(data.get("warning")), "note": "warning"}, event.at)
        elif kind == "outcome":
            self._append({"kind": "note", "text": f"outcome: {data.get('outcome')}", "note": "outcome"}, event.at)
        elif kind in PROVISIONAL_EVENTS:
            if kind == "agent_tool":
                self.tools.report(data, event.at)
            self.live.append(_provisional_item(kind, data, event.at))

    def _append(self, item: Item, at: float | None, call: CallHead | None = None) -> None:
        label = None if call is None else str(call.values["role"])
        call_id = None if call is None else call.id
        if item["kind"] == "tool_call":
            self.tools.begin(item, call_id, at)
        elif item["kind"] == "tool_result" and (span := self.tools.end(item, call_id, at)) is not None:
            item = {**item, "seconds": span.seconds} | ({"error": True} if span.error else {})
        self.items.append({"seq": len(self.items), "at": at, "call": call_id, "label": label, "role": None, **item})

    # -- calls --------------------------------------------------------------------------------------

    def _add_call(self, connection: sqlite3.Connection, head: CallHead) -> None:
        self.cache.clear()
        self.changed_calls.append(head.id)
        if head.id in self.calls:
            # Only its role has changed; its items are there.
            self.calls[head.id] = head
            for item in self.items:
                if item["call"] == head.id:
                    item["label"] = str(head.values["role"])
            return
        self.calls[head.id] = head
        self.live = []
        for item in self._new_input(connection, head):
            self._append(item, head.values["started"], head)
        for attempt in head.values.get("attempts") or ():
            self._append(
                {"kind": "note", "text": _describe_attempt(attempt), "note": "retry"}, attempt.get("ended"), head
            )
        message = head.values.get("message") or {}
        for item in transcript_items.message_items({"role": "assistant", **message}, self._tools):
            self._append({**item, "sampled": True}, head.values["ended"], head)
        if head.values.get("error"):
            self._append(
                {"kind": "note", "text": str(head.values["error"]), "note": "error"}, head.values["ended"], head
            )
        elif head.values.get("aborted"):
            self._append(
                {"kind": "note", "text": "the call was cut off", "note": "error"}, head.values["ended"], head
            )

    def _new_input(self, connection: sqlite3.Connection, head: CallHead) -> list[Item]:
        """Items for what the conversation of a call has and no earlier one had."""
        if head.conversation is None:
            return []
        name, key = head.conversation
        encoded, digests, seen = self._prefix_digests(connection, key)
        new = next((at for at in range(seen, len(digests)) if digests[at] not in self._seen_prefixes), len(encoded))
        before = digests[new - 1] if new else b""
        items: list[Item] = []
        edited = False
        raw = [decode(item) for item in encoded[new:]]
        own = 0
        while before in self._answers and own < len(raw) and transcript_items.is_model_output(raw[own]):
            own += 1
        dialect = str(head.values.get("dialect") or "chat")
        rest = {each: value for each, kind, value in head.request if kind == "value"}
        if own:
            messages = transcript_items.chat_messages(dialect, name, {**rest, name: raw[:own]})
            answers = [each for each in messages if each.get("role") == "assistant"]
            edited = not transcript_items.is_same_answer(answers, self._answers[before])
            if not edited:
                raw = raw[own:]
        for at, message in enumerate(self._messages(connection, head, dialect, name, raw, rest)):
            for item in transcript_items.message_items(message, self._tools):
                items.append({**item, "edited": True} if edited and at < own else item)
        self._seen_prefixes.update(digests[new:])
        self._answers[digests[-1] if digests else b""] = head.values.get("message") or {}
        return items

    def _messages(
        self,
        connection: sqlite3.Connection,
        head: CallHead,
        dialect: str,
        name: str,
        raw: list[Any],
        rest: dict[str, Any],
    ) -> list[dict[str, Any]]:
        """New messages in chat form, and the system prompt if the dialect has it beside them and it is new."""
        if dialect == "chat":
            return [message for message in raw if isinstance(message, dict)]
        names = [part for part in head.request if part[0] in SYSTEM_FIELDS]
        system = calls.join_body(names, {}, blobs.Reader(connection))
        digest = blake2b(repr(system).encode(errors="replace"), digest_size=16).digest()
        body = {name: raw, **{each: value for each, value in rest.items() if each not in SYSTEM_FIELDS}}
        if digest not in self._system_prompts:
            self._system_prompts.add(digest)
            body.update(system)
        return transcript_items.chat_messages(dialect, name, body)

    def _prefix_digests(self, connection: sqlite3.Connection, key: int) -> tuple[list[bytes], list[bytes], int]:
        """The messages of a conversation, the digest of each prefix, and how many messages were seen before."""
        encoded, base, shared = self._conversations.get(connection, key)
        base_digests = self._digests.get(base) if base is not None else None
        digests = base_digests[:shared] if base_digests is not None else []
        seen = len(digests)
        last = digests[-1] if digests else b""
        for item in encoded[len(digests) :]:
            last = blake2b(last + _without_cache_marks(item), digest_size=16).digest()
            digests.append(last)
        self._digests[key] = digests
        if len(self._digests) > sequences.CACHED_SEQUENCES:
            del self._digests[next(iter(self._digests))]
        return encoded, digests, seen


SYSTEM_FIELDS = ("system", "instructions", "systemInstruction", "system_instruction")
"""Where dialects have a system prompt beside the conversation."""


def _without_cache_marks(encoded: bytes) -> bytes:
    """A message without `cache_control`, which agents move to the newest message of each request."""
    return encode(_strip_cache_marks(decode(encoded))) if b'"cache_control"' in encoded else encoded


def _strip_cache_marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strip_cache_marks(each) for name, each in value.items() if name != "cache_control"}
    return [_strip_cache_marks(each) for each in value] if isinstance(value, list) else value


def _provisional_item(kind: str, data: dict[str, Any], at: float) -> Item:
    details = {name: value for name, value in data.items() if name != "kind"}
    item = {"seq": None, "kind": "event", "at": at, "call": None, "label": None, "role": "assistant", "event": kind}
    return {**details, **item, "what": data.get("kind")}


def _describe_attempt(attempt: dict[str, Any]) -> str:
    status = attempt.get("status")
    how = attempt.get("error") or (f"status {status}" if status else "no answer")
    return f"asked again after: {how}"


def describe_pause(data: dict[str, Any]) -> str:
    if data.get("is_paused"):
        return "paused: a model call waits"
    return f"resumed; paused for {data.get('seconds')} s so far"
