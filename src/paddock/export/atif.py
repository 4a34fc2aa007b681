"""The Agent Trajectory Interchange Format, version 1.8: one trajectory for each rollout.

Each model call is a step of the agent with its token ids and logprobs. ATIF has no loss mask and no weight version;
both are in `extra`. Sub-agents are embedded trajectories; a history that an agent rewrote comes as copied context.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from paddock.capture.trace import Role, sent_temperature
from paddock.export import Form, checks, conversation
from paddock.models.message_text import content_text
from paddock.rollouts.graph import Graph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from paddock.capture.trace import Call
    from paddock.export.policy import Policy
    from paddock.store.record import RolloutRecord

SCHEMA = "ATIF-v1.8"
OWN_ROLES = (Role.AGENT, Role.COMPACTION)


def export(record: RolloutRecord, calls: Sequence[Call], policy: Policy) -> Iterator[dict[str, Any]]:
    if policy.rejects(record) is not None:
        return
    rejections = dict(zip((call.id for call in calls), policy.rejections(calls), strict=True))
    builder = _TrajectoryBuilder(record, Graph.of(calls), rejections)
    own = [call for call in calls if call.role in OWN_ROLES and call.message]
    if not own:
        return
    subagents = _conversations([call for call in calls if call.role is Role.SUBAGENT and call.message])
    names = {f"{record.rollout_id}/{each[0].id}": each for each in subagents}
    began = {name: each[0].started for name, each in names.items()}
    main = builder.trajectory(own, record.rollout_id, began)
    main["final_metrics"] = {
        "total_prompt_tokens": sum(len(call.prompt_token_ids) for call in calls),
        "total_completion_tokens": sum(len(call.completion_token_ids) for call in calls),
        "total_steps": len(main["steps"]),
        "extra": {"reward": record.reward, "reward_parts": record.reward_parts, "outcome": record.outcome},
    }
    if names:
        main["subagent_trajectories"] = [builder.trajectory(each, name, {}) for name, each in names.items()]
    yield main


def _conversations(calls: Sequence[Call]) -> list[list[Call]]:
    """Calls by the conversation they belong to: by the agent's session id, or by their first messages."""
    conversations: dict[Any, list[Call]] = {}
    for call in calls:
        first = orjson.dumps(conversation.messages(call)[:2])
        conversations.setdefault(call.session or first, []).append(call)
    return list(conversations.values())


class _TrajectoryBuilder:
    def __init__(self, record: RolloutRecord, graph: Graph, rejections: dict[str, str | None]) -> None:
        self._record = record
        self._graph = graph
        self._rejections = rejections

    def trajectory(self, calls: Sequence[Call], name: str, subagents: dict[str, float]) -> dict[str, Any]:
        """`subagents` are the trajectories that were started from this one, with the time when they began."""
        steps: list[dict[str, Any]] = []
        before: list[dict[str, Any]] = []
        for position, call in enumerate(calls):
            now = conversation.messages(call)
            new = now if not before else conversation.new_messages(before, now)
            copied = new is None
            steps += self._input_steps(
                now if new is None else new, steps[-1] if steps and not copied else None, copied
            )
            steps.append(self._agent_step(call))
            until = calls[position + 1].started if position + 1 < len(calls) else float("inf")
            for subagent in [each for each, began in subagents.items() if began < until]:
                del subagents[subagent]
                results = steps[-1].setdefault("observation", {"results": []})["results"]
                results.append({"subagent_trajectory_ref": [{"trajectory_id": subagent}]})
            before = now
        tools = conversation.chat_form(calls[0]).get("tools")
        return {
            "schema_version": SCHEMA,
            "session_id": self._record.rollout_id,
            "trajectory_id": name,
            "agent": {
                "name": self._record.agent,
                "version": str(self._record.config.get("version") or "unknown"),
                "model_name": self._record.model or None,
                "tool_definitions": tools or None,
            },
            "steps": [{"step_id": number, **step} for number, step in enumerate(steps, 1)],
            "extra": {
                "task_id": self._record.task_id,
                "batch_id": self._record.batch_id,
                "member": self._record.member,
            },
        }

    def _input_steps(
        self, messages: Sequence[dict[str, Any]], last: dict[str, Any] | None, copied: bool
    ) -> list[dict[str, Any]]:
        """Input messages as steps; the result of a tool goes to the step that called it."""
        steps = []
        called = {tool["tool_call_id"] for tool in (last or {}).get("tool_calls") or ()}
        for message in messages:
            role, text = message.get("role"), content_text(message.get("content"))
            if role == "tool" and message.get("tool_call_id") in called and last is not None:
                results = last.setdefault("observation", {"results": []})["results"]
                results.append({"source_call_id": message["tool_call_id"], "content": text})
                continue
            source = {"system": "system", "developer": "system", "assistant": "agent"}.get(str(role), "user")
            step: dict[str, Any] = {"source": source, "message": text}
            steps.append({**step, "is_copied_context": True} if copied else step)
        return steps

    def _agent_step(self, call: Call) -> dict[str, Any]:
        node, reason = self._graph.nodes[call.id], self._rejections[call.id]
        step: dict[str, Any] = {
            "source": "agent",
            "timestamp": datetime.fromtimestamp(call.started, UTC).isoformat(),
            "model_name": call.model or None,
            "message": content_text(call.message.get("content")),
            "reasoning_content": call.message.get("reasoning_content"),
            "llm_call_count": 1,
            "metrics": {
                "prompt_tokens": len(call.prompt_token_ids) or call.usage.get("prompt_tokens"),
                "completion_tokens": len(call.completion_token_ids) or call.usage.get("completion_tokens"),
                "prompt_token_ids": list(call.prompt_token_ids) or None,
                "completion_token_ids": list(call.completion_token_ids) or None,
                "logprobs": list(call.logprobs) or None,
            },
            "extra": {
                "call": call.id,
                "role": call.role,
                "label": node.label,
                "continues": node.continues,
                "weight_version": call.weight_version,
                "temperature": sent_temperature(call),
                "logprobs_kind": call.logprobs_kind,
                "caller": call.caller,
                "loss_mask": 1 if reason is None else 0,
                "untrainable_because": reason,
            },
        }
        if tools := [tool_call(each) for each in call.message.get("tool_calls") or ()]:
            step["tool_calls"] = tools
        return {name: value for name, value in step.items() if value is not None}


def tool_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    raw = function.get("arguments")
    try:
        arguments = orjson.loads(raw) if isinstance(raw, str) else raw
    except orjson.JSONDecodeError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"": raw} if raw else {}
    name = str(function.get("name") or "unknown")
    return {"tool_call_id": str(call.get("id") or ""), "function_name": name, "arguments": arguments}


def find_problems(document: dict[str, Any]) -> Iterator[str]:
    for step in document["steps"]:
        metrics = step.get("metrics") or {}
        if metrics.get("completion_token_ids") and step["extra"]["loss_mask"]:
            yield from checks.equal_lengths(metrics, "completion_token_ids", "logprobs")
            yield from checks.logprobs(metrics["logprobs"], f"logprobs of step {step['step_id']}")
    if "final_metrics" in document:
        yield from checks.reward(document["final_metrics"]["extra"]["reward"])
    for each in document.get("subagent_trajectories") or ():
        yield from find_problems(each)


def validate(document: dict[str, Any]) -> None:
    from harbor.models.trajectories import Trajectory

    Trajectory.model_validate(document)


FORM = Form(
    summary="trajectories in ATIF v1.8",
    export=export,
    find_problems=find_problems,
    package="harbor",
    validate=validate,
    needs_whole_calls=True,
)
