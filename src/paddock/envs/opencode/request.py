"""The arguments of a rollout, checked before anything starts.

An argument that cannot be used is a tool error that names it and says how to correct it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from paddock.capture.settings import CAPTURE_MODES
from paddock.config import HF_TOKEN
from paddock.errors import ConfigError, InvalidToolArguments, TaskError
from paddock.limits import Budget
from paddock.models.endpoint import parse_model_url
from paddock.rollouts.config import RunConfig
from paddock.sandbox.base import WORKDIR
from paddock.tasks.task import Task, check_path

if TYPE_CHECKING:
    from collections.abc import Mapping

AGENT_SECONDS_LIMIT = 24 * 3600.0
LARGEST_MAX_TOKENS = 1_000_000
MAX_KEY_CHARACTERS = 200
FORMS = "vllm://repo, hf-router://repo:provider, replay:FILE, local, or a URL"


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    task: Task
    config: RunConfig
    idempotency_key: str | None = None

    @property
    def seconds(self) -> float:
        """The longest that it can take once it has begun, all its stages at their deadlines."""
        limits, agent = self.task.timeouts, self.config.agent_timeout or 0.0
        return limits.install + 2 * limits.sandbox + limits.setup + agent + limits.verifier + MARGIN_SECONDS

    @property
    def fingerprint(self) -> str:
        """Tells requests apart. The token is left out: a new one does not make another rollout."""
        config = self.config
        model = [config.model, config.model_name, config.vllm_url]
        limits = [config.budget.max_tokens_per_call, config.agent_timeout]
        content = [self.task.hash, self.task.id, *model, config.mode, config.thinking, *limits]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def rollout_id(self) -> str | None:
        """The id that belongs to the idempotency key: the same key is the same rollout, in any process."""
        if self.idempotency_key is None:
            return None
        return "k" + hashlib.sha256(self.idempotency_key.encode("utf-8", "surrogatepass")).hexdigest()[:20]


MARGIN_SECONDS = 60.0
"""Seconds for what no stage counts: connecting to the model, sealing the work folder, closing."""


def check_request(
    *,
    model_key: str | None,
    instruction: str,
    test_script: str | None,
    vllm_url: str | None,
    hf_token: str | None,
    thinking: bool | None,
    task_id: str | None,
    setup_shell: str | None,
    upload_files: Mapping[str, str] | None,
    mode: str | None,
    max_tokens_cap: int,
    agent_timeout_s: float,
    idempotency_key: str | None,
) -> RolloutRequest:
    """The request that the arguments make. Raises InvalidToolArguments."""
    if not 1 <= max_tokens_cap <= LARGEST_MAX_TOKENS:
        raise wrong("max_tokens_cap", f"is {max_tokens_cap}", f"give a number from 1 to {LARGEST_MAX_TOKENS}")
    if not (math.isfinite(agent_timeout_s) and 0 < agent_timeout_s <= AGENT_SECONDS_LIMIT):
        raise wrong(
            "agent_timeout_s", f"is {agent_timeout_s:g}", f"give seconds above 0, up to {AGENT_SECONDS_LIMIT:g}"
        )
    chosen = next((each for each in CAPTURE_MODES if each == (mode or CAPTURE_MODES[0])), None)
    if chosen is None:
        raise wrong("mode", f"is {mode!r}", f"use {' or '.join(CAPTURE_MODES)}")
    if idempotency_key is not None and len(idempotency_key) > MAX_KEY_CHARACTERS:
        raise wrong("idempotency_key", f"has {len(idempotency_key)} characters", f"use up to {MAX_KEY_CHARACTERS}")
    return RolloutRequest(
        _task(instruction, test_script, task_id, setup_shell, upload_files),
        RunConfig(
            **choose_model(model_key or "", vllm_url or None, hf_token or None),
            agent="opencode",
            driver="serve",
            mode=chosen,
            thinking=bool(thinking),
            budget=Budget(max_tokens_per_call=max_tokens_cap),
            agent_timeout=float(agent_timeout_s),
        ),
        idempotency_key or None,
    )


def choose_model(model_key: str, vllm_url: str | None, hf_token: str | None) -> dict[str, Any]:
    """The fields of `RunConfig` for a model. Nothing is connected to yet."""
    if vllm_url is not None:
        _check_url("vllm_url", vllm_url)
    if not model_key:
        if vllm_url is None:
            raise wrong("model_key", "is empty and there is no vllm_url", f"give one of them; model_key is {FORMS}")
        return {"model": vllm_url, "hf_token": hf_token}
    scheme, colon, rest = model_key.partition(":")
    if colon and not rest.strip("/"):
        raise wrong("model_key", f"is {model_key!r}, which names nothing", f"give {FORMS}")
    if colon and scheme in ("http", "https"):
        _check_url("model_key", model_key)
        if vllm_url is not None and vllm_url.rstrip("/") != model_key.rstrip("/"):
            raise wrong("vllm_url", "and model_key are two different URLs", "leave one of them out")
        return {"model": model_key, "hf_token": hf_token}
    if model_key.startswith("vllm://"):
        if vllm_url is None:
            raise wrong("vllm_url", f"is missing, and {model_key!r} needs it", "give the server's URL")
        return {"model": model_key, "vllm_url": vllm_url, "hf_token": hf_token}
    if model_key.startswith("hf-router://"):
        if hf_token is None and HF_TOKEN.read() is None:
            raise wrong("hf_token", f"is missing, and {model_key!r} needs it", "give a token for the router")
        return {"model": model_key, "hf_token": hf_token}
    if colon and scheme == "replay":
        if not Path(rest).is_file():
            raise wrong("model_key", f"names {rest!r}, which is no file here", "replay:FILE is a file of the server")
        return {"model": model_key}
    if scheme == "local":
        return {"model": model_key}
    if vllm_url is None:
        raise wrong("model_key", f"is {model_key!r}, a model's name", f"add vllm_url, or give {FORMS}")
    return {"model": vllm_url, "model_name": model_key, "hf_token": hf_token}


def wrong(argument: str, problem: str, fix: str) -> InvalidToolArguments:
    return InvalidToolArguments(f"{argument} {problem}: {fix}", argument=argument)


def _check_url(argument: str, url: str) -> None:
    try:
        parse_model_url(url)
    except ConfigError as error:
        raise wrong(argument, f"cannot be used, {error.message}", str(error.hint)) from None


def _task(
    instruction: str,
    test_script: str | None,
    task_id: str | None,
    setup_shell: str | None,
    upload_files: Mapping[str, str] | None,
) -> Task:
    if not instruction.strip():
        raise wrong("instruction", "is empty", "say what the agent has to do")
    files = {}
    for path, text in (upload_files or {}).items():
        inside = _below_workdir(path)
        try:
            check_path(inside, "upload_files")
        except TaskError as error:
            raise _from_task(error) from None
        if inside in files:
            raise wrong("upload_files", f"names {inside!r} twice", "keep one of them")
        files[inside] = text
    try:
        return Task(
            instruction=instruction,
            id=task_id or "",
            files=files,  # type: ignore[arg-type]  # text is encoded there
            setup=setup_shell or "",
            verifier=test_script or "",
            source="the rollout's task",
        )
    except TaskError as error:
        raise _from_task(error) from None


def _below_workdir(path: Any) -> str:
    """An absolute path below the work folder as a relative one; anything else as it is."""
    pure = PurePosixPath(path)
    if pure.is_absolute() and pure != WORKDIR and pure.is_relative_to(WORKDIR):
        return str(pure.relative_to(WORKDIR))
    return str(path)


def _from_task(error: TaskError) -> InvalidToolArguments:
    return InvalidToolArguments(f"{error.message}: {error.hint}" if error.hint else error.message)
