"""The arguments of a rollout, checked before anything starts.

What is wrong is told as a tool error that names the argument and the way out of it.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, get_args

from paddock.errors import ConfigError, InvalidToolArguments, TaskError
from paddock.rollouts.models.address import parse_address
from paddock.rollouts.models.variables import read_model_variables
from paddock.rollouts.plan import Mode
from paddock.rollouts.sandbox.base import WORKDIR
from paddock.rollouts.task import Task, check_path

if TYPE_CHECKING:
    from collections.abc import Mapping

LONGEST_AGENT = 24 * 3600.0
LARGEST_CAP = 1_000_000
LONGEST_KEY = 200
FORMS = "vllm://repo, hf-router://repo:provider, replay:FILE, local, or a URL"


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What `open_model` is to be asked for."""

    spec: str
    name: str | None = None
    vllm_url: str | None = None
    hf_token: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    task: Task
    model: ModelChoice
    mode: Mode = "transparent_proxy"
    thinking: bool = False
    max_tokens_cap: int = 4096
    agent_timeout: float = 600.0
    idempotency_key: str | None = None

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.model.hf_token,) if self.model.hf_token else ()

    @property
    def seconds(self) -> float:
        """The longest that it can take once it has begun, all its stages at their deadlines."""
        limits = self.task.timeouts
        return limits.install + 2 * limits.sandbox + limits.setup + self.agent_timeout + limits.verifier + MARGIN

    @property
    def fingerprint(self) -> str:
        """Tells requests apart. The token is left out: a new one does not make another rollout."""
        content = [
            self.task.hash,
            self.task.id,
            self.model.spec,
            self.model.name,
            self.model.vllm_url,
            self.mode,
            self.thinking,
            self.max_tokens_cap,
            self.agent_timeout,
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def rollout_id(self) -> str | None:
        """The id that belongs to the idempotency key: the same key is the same rollout, in any process."""
        if self.idempotency_key is None:
            return None
        return "k" + hashlib.sha256(self.idempotency_key.encode("utf-8", "surrogatepass")).hexdigest()[:20]


MARGIN = 60.0
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
    if not 1 <= max_tokens_cap <= LARGEST_CAP:
        raise wrong("max_tokens_cap", f"is {max_tokens_cap}", f"give a number from 1 to {LARGEST_CAP}")
    if not (math.isfinite(agent_timeout_s) and 0 < agent_timeout_s <= LONGEST_AGENT):
        raise wrong("agent_timeout_s", f"is {agent_timeout_s:g}", f"give seconds above 0, up to {LONGEST_AGENT:g}")
    modes: tuple[Mode, ...] = get_args(Mode)
    chosen = next((known for known in modes if known == (mode or modes[0])), None)
    if chosen is None:
        raise wrong("mode", f"is {mode!r}", f"use {' or '.join(modes)}")
    if idempotency_key is not None and len(idempotency_key) > LONGEST_KEY:
        raise wrong("idempotency_key", f"has {len(idempotency_key)} characters", f"use up to {LONGEST_KEY}")
    return RolloutRequest(
        task=_task(instruction, test_script, task_id, setup_shell, upload_files),
        model=choose_model(model_key or "", vllm_url or None, hf_token or None),
        mode=chosen,
        thinking=bool(thinking),
        max_tokens_cap=max_tokens_cap,
        agent_timeout=float(agent_timeout_s),
        idempotency_key=idempotency_key or None,
    )


def choose_model(model_key: str, vllm_url: str | None, hf_token: str | None) -> ModelChoice:
    """Which model is meant. Nothing is connected to yet."""
    if vllm_url is not None:
        _check_url("vllm_url", vllm_url)
    if not model_key:
        if vllm_url is None:
            raise wrong("model_key", "is empty and there is no vllm_url", f"give one of them; model_key is {FORMS}")
        return ModelChoice(vllm_url, hf_token=hf_token)
    scheme, colon, rest = model_key.partition(":")
    if colon and not rest.strip("/"):
        raise wrong("model_key", f"is {model_key!r}, which names nothing", f"give {FORMS}")
    if colon and scheme in ("http", "https"):
        _check_url("model_key", model_key)
        if vllm_url is not None and vllm_url.rstrip("/") != model_key.rstrip("/"):
            raise wrong("vllm_url", "and model_key are two different URLs", "leave one of them out")
        return ModelChoice(model_key, hf_token=hf_token)
    if model_key.startswith("vllm://"):
        if vllm_url is None:
            raise wrong("vllm_url", f"is missing, and {model_key!r} needs it", "give the server's URL")
        return ModelChoice(model_key, vllm_url=vllm_url, hf_token=hf_token)
    if model_key.startswith("hf-router://"):
        if hf_token is None and read_model_variables().hf_token is None:
            raise wrong("hf_token", f"is missing, and {model_key!r} needs it", "give a token for the router")
        return ModelChoice(model_key, hf_token=hf_token)
    if colon and scheme == "replay":
        if not Path(rest).is_file():
            raise wrong("model_key", f"names {rest!r}, which is no file here", "replay:FILE is a file of the server")
        return ModelChoice(model_key)
    if scheme == "local":
        return ModelChoice(model_key)
    if vllm_url is None:
        raise wrong("model_key", f"is {model_key!r}, a model's name", f"add vllm_url, or give {FORMS}")
    return ModelChoice(vllm_url, name=model_key, hf_token=hf_token)


def wrong(argument: str, problem: str, fix: str) -> InvalidToolArguments:
    return InvalidToolArguments(f"{argument} {problem}: {fix}", argument=argument)


def _check_url(argument: str, given: str) -> None:
    try:
        parse_address(given)
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
