"""Forks: new rollouts that replay a recorded one up to a call, and continue live from there.

    result = await fork(record, at=5, n=8, temperature=1.2)

A fork runs the same task, agent and config in a new sandbox. The capture answers the first calls from the record (see
`capture.recorded`), so the agent does again what it did, and asks the model from call `at` on. Resuming a batch uses
the same mechanism without a chosen call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.dialects import agent_request
from paddock.capture.errors import BadRequest
from paddock.capture.recorded.replay import FIDELITY_POLICIES, Edit, FidelityPolicy, Replay
from paddock.errors import ConfigError, StoreError, TaskError
from paddock.rollouts.config import RunConfig
from paddock.tasks.task_json import task_from_json, task_to_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from paddock.capture.trace import Call
    from paddock.rollouts.batch import BatchResult
    from paddock.rollouts.rollout import Rollout
    from paddock.store import Store
    from paddock.store.record import RolloutRecord
    from paddock.tasks.task import Task

FORK, RESUME = "fork", "resume"
LARGEST_TASK_BYTES = 32 * 1024 * 1024
"""A larger task is not kept with its rollouts."""
EDIT_KEYS = ("answer", "tool_result", "tool_call_id")
ANSWER_KEYS = ("content", "reasoning_content", "tool_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkPoint:
    """Where a rollout leaves the recorded one. Raises ConfigError for values that cannot be used."""

    source: str
    """The id of the recorded rollout."""
    at: int | None
    """The index of the first call that is sampled live. None: the one after the last recorded answer."""
    policy: FidelityPolicy = "tolerant"
    edit: Edit | None = None
    """A change at call `at`."""

    def __post_init__(self) -> None:
        if self.policy not in FIDELITY_POLICIES:
            raise ConfigError(f"policy is {self.policy!r}", hint=f"use {' or '.join(FIDELITY_POLICIES)}")
        if self.at is not None and self.at < 0:
            raise ConfigError(f"at is {self.at}", hint="calls are counted from 0")

    def describe(self) -> dict[str, Any]:
        """What the record of the new rollout has in its field `fork`."""
        edit = None if self.edit is None else {key: value for key, value in asdict(self.edit).items() if value}
        kind = RESUME if self.at is None else FORK
        return {"kind": kind, "source": self.source, "at": self.at, "policy": self.policy, "edit": edit}


@dataclass(frozen=True, slots=True)
class RecordedCalls:
    """The calls that a fork replays. They go with it to another machine."""

    calls: list[Call]
    are_trained_on: bool
    """Whether the recorded rollout has a reward: then the calls are trained on there."""
    agent_version: str | None = None
    """The version of the agent's program that made them."""


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """What a fork needs of a recorded rollout."""

    source: RolloutRecord
    task: Task
    point: ForkPoint


async def fork(
    record: RolloutRecord | str,
    *,
    at: int | str,
    n: int = 1,
    policy: FidelityPolicy = "tolerant",
    edit: Edit | Mapping[str, Any] | None = None,
    task: Task | None = None,
    config: RunConfig | None = None,
    on_change: Callable[[Rollout], None] | None = None,
    on_settled: Callable[[RolloutRecord], None] | None = None,
    log: Callable[[str], None] | None = None,
    **fields: Any,
) -> BatchResult:
    """Run `n` forks of a recorded rollout, and return their records.

    `at` is the first call that is sampled live, by its index or id. `edit` changes that call. `fields` replace
    fields of the recorded config, for example `model`, `temperature` or `store`. `task` and `config` are needed for
    a rollout that was recorded without them.

    Raises StoreError if there is no such rollout, ConfigError for a call that it does not have, TaskError if its task
    was not kept.
    """
    from paddock.rollouts.api import run_batch
    from paddock.rollouts.context import open_store

    rollout_id = record if isinstance(record, str) else record.rollout_id
    configured = config.store if config is not None else None
    async with open_store(fields.get("store", configured)) as store:
        plan = await store.run(plan_fork, store, rollout_id, at, policy, edit, task)
        changes = {**fields, "n": n, "fork": plan.point, "store": store}
        chosen = config.with_fields(changes) if config is not None else restore_config(plan.source, changes)
        return await run_batch([plan.task], chosen, on_change=on_change, on_settled=on_settled, log=log)


# -- what a fork needs of a recorded rollout --------------------------------------------------------------


def plan_fork(
    store: Store,
    rollout_id: str,
    at: int | str,
    policy: FidelityPolicy,
    edit: Edit | Mapping[str, Any] | None,
    task: Task | None,
) -> ForkPlan:
    """Raises StoreError, ConfigError or TaskError if it cannot be forked so."""
    source = find_source(store, rollout_id)
    calls = store.calls(source.rollout_id)
    change = edit if edit is None or isinstance(edit, Edit) else read_edit(edit)
    point = ForkPoint(source=source.rollout_id, at=find_call(calls, at), policy=policy, edit=change)
    make_replay(point, RecordedCalls(calls, are_trained_on=True))
    return ForkPlan(source, load_task(store, source) if task is None else task, point)


def find_source(store: Store, rollout_id: str) -> RolloutRecord:
    """A recorded rollout. Raises StoreError if there is none, or if it still runs."""
    record = store.get(rollout_id)
    if record is None:
        raise StoreError(f"there is no rollout {rollout_id!r}", hint="paddock trace list shows them")
    if not record.finished:
        raise StoreError(f"rollout {rollout_id} has not ended", hint="wait for its end, or abort it")
    return record


def find_call(calls: list[Call], at: int | str) -> int:
    """The index of a call, from its index or its id; or the index after the last one. Raises ConfigError."""
    text = str(at).removeprefix("c")
    if not text.isdigit() or int(text) > len(calls):
        last = f"c0 to c{len(calls) - 1}" if calls else "none"
        raise ConfigError(
            f"the rollout has no call {at}", hint=f"its calls are {last}; paddock trace show lists them"
        )
    return int(text)


def restore_config(record: RolloutRecord, changes: Mapping[str, Any]) -> RunConfig:
    """The config of a recorded rollout with some fields changed. Raises ConfigError."""
    if not record.run_config and "model" not in changes:
        raise ConfigError(
            f"rollout {record.rollout_id} was recorded without its config", hint="give config=RunConfig(…)"
        )
    values = dict(record.run_config)
    if "model" not in changes and str(values.get("model")).startswith("http"):
        # The server is not asked for its models: a fork may need no live call.
        values.setdefault("model_name", record.config.get("model_name"))
    return RunConfig.from_json(values, **changes)


def write_task(task: Task) -> bytes | None:
    """A task as the store keeps it, without its solution. None if it is too large."""
    size = sum(map(len, (*task.files.values(), *task.tests.values())))
    if size > LARGEST_TASK_BYTES:
        return None
    document = task_to_json(task)
    document.pop("solution", None)
    return orjson.dumps(document, default=str)


def load_task(store: Store, record: RolloutRecord) -> Task:
    """The task that a rollout was run on. Raises TaskError if it was not kept."""
    if record.task_json_blob is None:
        raise TaskError(f"rollout {record.rollout_id} was recorded without its task", hint="give the task again")
    return task_from_json(orjson.loads(store.get_blob(record.task_json_blob)))


def read_edit(document: Mapping[str, Any]) -> Edit:
    """An edit from its JSON form. Raises ConfigError."""
    if not isinstance(document, Mapping):
        raise ConfigError("an edit is an object", hint='write {"answer": {…}} or {"tool_result": "…"}')
    for key in document:
        if key not in EDIT_KEYS:
            raise ConfigError(f"an edit has no key {key!r}", hint=f"use {', '.join(EDIT_KEYS)}")
    for key in ("tool_result", "tool_call_id"):
        if document.get(key) is not None and not isinstance(document[key], str):
            raise ConfigError(f"{key} is not a text", hint=f'write {{"{key}": "…"}}')
    if document.get("tool_call_id") is not None and document.get("tool_result") is None:
        raise ConfigError("tool_call_id says which tool_result is replaced", hint="add tool_result, or leave it out")
    answer = None if document.get("answer") is None else read_answer(document["answer"])
    return Edit(answer=answer, tool_result=document.get("tool_result"), tool_call_id=document.get("tool_call_id"))


def read_answer(document: Any) -> dict[str, Any]:
    """The assistant message of an edit, from its JSON form or from a text. Raises ConfigError."""
    if isinstance(document, str):
        return {"content": document}
    if not isinstance(document, Mapping):
        raise ConfigError("answer is neither a text nor an object", hint='write {"answer": {"content": "…"}}')
    for key in document:
        if key not in ANSWER_KEYS:
            raise ConfigError(f"an answer has no key {key!r}", hint=f"use {', '.join(ANSWER_KEYS)}")
    for key in ("content", "reasoning_content"):
        if document.get(key) is not None and not isinstance(document[key], str):
            raise ConfigError(f"{key} of the answer is not a text", hint=f'write {{"{key}": "…"}}')
    calls = document.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ConfigError("tool_calls is not a list", hint='write [{"name": "bash", "arguments": {…}}]')
    answer = {key: value for key, value in document.items() if key != "tool_calls"}
    if calls:
        answer["tool_calls"] = [read_tool_call(call, number) for number, call in enumerate(calls)]
    return answer


def read_tool_call(call: Any, number: int) -> dict[str, Any]:
    """A tool call as chat completions have it, also from the short form `{"name": …, "arguments": {…}}`."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    name, arguments = function.get("name"), function.get("arguments", {})
    if not isinstance(name, str):
        raise ConfigError(f"tool_calls[{number}] has no name", hint='write {"name": "bash", "arguments": {…}}')
    if not isinstance(arguments, str | Mapping):
        raise ConfigError(f"the arguments of tool_calls[{number}] are no object", hint='write "arguments": {…}')
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()
    call_id = call.get("id") or f"call_{token_hex(8)}"
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": text}}


# -- the replay of one rollout ----------------------------------------------------------------------------


def read_calls(store: Store, rollout_id: str) -> RecordedCalls:
    """The calls of a recorded rollout. Those of an unscored one are trained on nowhere else."""
    source = store.get(rollout_id)
    calls = store.calls(rollout_id)
    if source is None:
        return RecordedCalls(calls, are_trained_on=True)
    return RecordedCalls(calls, source.reward is not None, source.config.get("version"))


def make_replay(point: ForkPoint, recorded: RecordedCalls) -> Replay:
    """The replay for one new rollout. Raises ConfigError if the edit does not fit the call."""
    return Replay(
        point.source,
        recorded.calls,
        read_messages,
        at=point.at,
        policy=point.policy,
        edit=point.edit,
        is_copy=recorded.are_trained_on,
    )


def read_messages(call: Call) -> list[Any]:
    """The messages of a recorded request; empty if its body cannot be read."""
    try:
        return list(agent_request(call)["messages"])
    except BadRequest:
        return []
