"""One rollout in full, without its calls: what it was asked, how it went, and what it left behind."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from paddock.rollouts.store import events, rows, search
from paddock.web import workdir
from paddock.web.shelf import shown, summaries

if TYPE_CHECKING:
    import sqlite3

    from paddock.rollouts.record import RolloutRecord
    from paddock.web.trail import Trail

MOST_SIBLINGS = 200


def whole(connection: sqlite3.Connection, trail: Trail) -> dict[str, Any]:
    record = rows.read(connection, trail.key)
    return {
        **shown(trail.head),
        "task_hash": record.task_hash,
        "instruction": record.instruction,
        "config": record.config,
        "metadata": record.metadata,
        "agent_session": record.agent_session,
        "usage": record.usage,
        "timeline": timeline(trail, record),
        "verifier": {
            "stdout": record.verifier_stdout,
            "stderr": record.verifier_stderr,
            "exit_code": record.test_exit_code,
        },
        "logs": {"agent": record.agent_log, "proxy": record.proxy_log, "install": record.install_log},
        "files": workdir.listed(connection, trail, record),
        "has_workdir": record.workdir_blob is not None,
        "scores": events.scores(connection, trail.key),
        "rerun": rerun(record),
        "siblings": siblings(connection, trail),
        "live": trail.is_live,
        "orphan": trail.is_orphan and not trail.finished,
    }


def timeline(trail: Trail, record: RolloutRecord) -> list[dict[str, Any]]:
    """When each stage began and ended; None where it goes on."""
    spans = []
    for at, (name, start) in enumerate(trail.stages):
        following = trail.stages[at + 1][1] if at + 1 < len(trail.stages) else record.finished_at
        took = record.stages.get(name)
        end = start + took if took is not None else following
        spans.append({"name": name, "start": start, "end": end})
    return spans


def siblings(connection: sqlite3.Connection, trail: Trail) -> list[dict[str, Any]]:
    """The other rollouts of its group."""
    batch = trail.head.get("batch_id")
    if not batch:
        return []
    keys = search.members(connection, str(batch), str(trail.head["task_id"]), MOST_SIBLINGS)
    return summaries(connection, [key for key in keys if key != trail.key])


def rerun(record: RolloutRecord) -> str:
    """The command that runs the same again; what was left at its usual value is left out."""
    config = record.config
    command = config.get("command")
    agent = f"command:{shlex.join(map(str, command))}" if isinstance(command, list) else record.agent
    words = [
        "paddock",
        "rollout",
        record.task_id,
        "--agent",
        agent,
        "--model",
        str(config.get("model") or record.model),
    ]
    for option, value, usual in (
        ("--model-name", config.get("model_name"), None),
        ("--sandbox", record.sandbox, "bwrap"),
        ("--mode", record.mode, "transparent_proxy"),
        ("--temperature", config.get("temperature"), 1.0),
        ("--top-logprobs", config.get("top_logprobs"), 1),
        ("--agent-timeout", config.get("agent_timeout"), None),
    ):
        if value is not None and value != usual and value != "":
            words += [option, str(value)]
    return shlex.join(words)
