"""`RunConfig`: everything about a run except the tasks, as one frozen value.

It goes whole from the command line, the Python API, a trainer integration or Ray to the rollout. A new option is one
field here: the command line reads its name, type, default and docstring (see `paddock.cli.field_options`), the Python
API takes it as a keyword, and Ray pickles it with the rest. Opens nothing: that is `paddock.rollouts.context`.

Secrets stay in the process: `repr`, `pickle` and records leave them out, and URLs lose their credentials.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from paddock.capture.settings import CAPTURE_MODES, CaptureMode, CaptureSettings, TokenSettings
from paddock.config import NO_OPTION
from paddock.errors import ConfigError
from paddock.field_types import check_types
from paddock.limits import (
    LONGEST_PAUSE_SECONDS,
    PAUSE_SHARE,
    WHOLE_ANSWER_FACTOR,
    Budget,
    RolloutTimeouts,
    SnapshotLimits,
)
from paddock.sandbox.network.policy import NetworkPolicy
from paddock.tasks.json_values import read_value, write_value
from paddock.tasks.settings import VERIFIER_MODES, VerifierMode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from paddock.agents.base import AgentBase
    from paddock.capture.gate import CallGate
    from paddock.models.endpoint import Endpoint
    from paddock.models.weight_version import Weights
    from paddock.rollouts.api import PlacementBackend
    from paddock.rollouts.fork import ForkPoint
    from paddock.store import Store

LOCAL = "local"
BACKENDS = {LOCAL: "", "ray": "paddock.scale.rollouts:RayBackend"}
"""Placement backends by the name that `engine` has for them: where the class of each is."""
MOST_TOP_LOGPROBS = 20

NOT_OF_A_ROLLOUT = ("n", "parallel", "retries", "resume", "from_start", "batch_id", "fork")
"""Fields that say how many rollouts are run, and in which batch."""
NESTED = {"budget": Budget, "timeouts": RolloutTimeouts, "snapshot_limits": SnapshotLimits}
"""Fields that are config values of their own."""
SECRET = {"option": False, "secret": True}
ON_THIS_MACHINE = {"local": True}
"""An object of this process, such as an open store: not pickled."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunConfig:
    """Everything about a run except the tasks. Raises ConfigError that names the field which cannot be used."""

    # -- the model ----------------------------------------------------------------------------------

    model: str | Endpoint
    """URL, demo, replay:FILE, local, vllm://REPO or hf-router://REPO:PROVIDER."""
    model_name: str | None = None
    """The model's name at the URL. Default: the first it lists."""
    vllm_url: str | None = None
    """URL of the server for a vllm:// model."""
    api_key: str | None = field(default=None, metadata=SECRET)
    """The model's key. None: PADDOCK_MODEL_API_KEY, or OPENAI_API_KEY."""
    hf_token: str | None = field(default=None, metadata=SECRET)
    """The key of an hf-router:// model. None: HF_TOKEN."""
    weight_version: str | int | Weights | Callable[[], str | int | None] | None = field(
        default=None, metadata=ON_THIS_MACHINE
    )
    """Version of the model's weights, stored with each call. A version that the engine reports takes precedence.

    A version, a function that returns it, or `Weights`, which can be set while rollouts run."""

    # -- the agent, and where it works --------------------------------------------------------------

    agent: str | AgentBase = "opencode"
    """A name of `paddock agents`, or command:PROGRAM."""
    driver: str | None = field(default=None, metadata={"choices": ("run", "serve")})
    """run: one instruction, then the agent ends. serve: live messages and a clean abort (OpenCode only)."""
    env: str | Callable[[], Any] | None = None
    """Where the agent loop works: a URL, or a target of `paddock serve`.

    In Python: a URL, or a function or class that makes an environment."""
    env_name: str | None = field(default=None, metadata=NO_OPTION)
    """What records call the environment. None: its URL without credentials, or where it is defined."""
    seed: int | None = field(default=None, metadata={"minimum": 0})
    """Seed of the environment. Default: as in the task."""
    max_steps: int = 50
    """Tool calls that the agent loop may make."""
    sandbox: str = "bwrap"
    """bwrap, docker, e2b, or process (isolates nothing)."""
    network: str | NetworkPolicy | None = field(default=None, metadata={"metavar": "POLICY"})
    """What the agent may connect to: no-network, allowlist:HOST,HOST, or public. Default: as in the task.

    `allowlist` alone allows the package registries of this machine. Build, set-up and verifier keep the task's."""
    verifier_mode: VerifierMode | None = field(default=None, metadata={"choices": VERIFIER_MODES})
    """How the tests of a task with an image are run. Default: as in the task.

    `sealed`: in a new sandbox that has the agent's files. `live`: beside the processes that the agent left.
    `separate`: on an image of their own. If the task does not say it: `live` if the agent left a process running,
    else `sealed`."""
    consent: bool = field(default=False, metadata={"flags": ("--unsafe",)})
    """Allow --sandbox process, which isolates nothing."""

    # -- what is sampled and captured ---------------------------------------------------------------

    mode: CaptureMode = "transparent_proxy"
    """transparent_proxy, or black_box.

    `black_box` passes model calls on unchanged: their text is kept, their tokens are not."""
    temperature: float | None = 1.0
    """Temperature of every call.

    None leaves it to the agent."""
    top_logprobs: int = 1
    """Alternatives with logprobs to store for each token, up to 20."""
    token_mode: bool = field(default=False, metadata={"flags": ("--tokens",)})
    """Send prompts as token ids: a conversation is one sample, and nothing is tokenized twice.

    Needs vLLM, SGLang or llama.cpp, and the extra `tokens`."""
    tokenizer: str | None = field(default=None, metadata={"metavar": "SOURCE"})
    """The model's tokenizer in token mode: a folder, a GGUF file, a name in Hugging Face's cache, or `engine`.

    Default: the one that the model's name or the engine's weights lead to, else `engine`. Nothing is downloaded."""
    renderer: str | None = field(default=None, metadata={"metavar": "FAMILY"})
    """The model's family in token mode, such as qwen3. Default: by the model's name, else its chat template."""
    thinking: bool | None = None
    """Turn the model's thinking on or off."""
    context_tokens: int = field(default=32768, metadata={"flags": ("--context",)})
    """Context size of the model in tokens, as the agent is told."""

    snapshots: bool = False
    """Save the work folder when each model call begins.

    This shows what each call changed, and whether a fork has the same files."""

    # -- limits -------------------------------------------------------------------------------------

    budget: Budget = field(default_factory=Budget)
    """What one rollout may spend on the model."""
    snapshot_limits: SnapshotLimits = field(default_factory=SnapshotLimits)
    """What the snapshots may keep, and for how long."""
    timeouts: RolloutTimeouts | None = field(default=None, metadata=NO_OPTION)
    """A deadline for each stage. None: what the task says."""
    agent_timeout: float | None = None
    """Seconds for the agent. Default: as in the task."""
    stall_timeout: float | None = None
    """Seconds without a byte after which a model call has stalled. Default: 60, at most a quarter of the agent's.

    A stalled call is cut off and tried again. By default it is cut off after 300 s only."""

    gate: CallGate | None = field(default=None, metadata={**ON_THIS_MACHINE, **NO_OPTION})
    """Pauses model calls: `gate.pause()` and `gate.resume()` while the rollouts run.

    None: only `Batch.pause` can pause them."""
    pause_timeout: float | None = field(default=None, metadata=NO_OPTION)
    """Seconds after which a call that is paused has failed. Default: as long as the agent waits for answers.

    A trainer pauses calls while it changes the weights."""

    # -- the batch ----------------------------------------------------------------------------------

    n: int = field(default=1, metadata={"flags": ("-n", "--repeat")})
    """Rollouts of each task."""
    parallel: int = 1
    """Rollouts at a time."""
    retries: int | None = None
    """Retries after a failure that is not the agent's (model, sandbox). Default: 2; 0 for a single rollout.

    A single rollout on Ray is retried once, as its node may be lost."""
    resume: str | None = field(default=None, metadata={"metavar": "BATCH"})
    """Continue a batch that was stopped.

    Members whose outcome is the policy's are not run again. The agent, the model, the sampling and the tasks must be
    those of the batch."""
    from_start: bool = False
    """With --resume: run unfinished members from their start.

    Otherwise their recorded calls are replayed, and they continue after the last one."""
    fork: ForkPoint | None = field(default=None, metadata=NO_OPTION)
    """The recorded rollout that each rollout replays up to a call. See `paddock.rollouts.fork`."""
    batch_id: str | None = field(default=None, metadata={"metavar": "NAME"})
    """Name of the batch. Default: a new one.

    If there is a batch of this name, it is continued."""
    store: Store | Path | str | None = field(default=None, metadata=ON_THIS_MACHINE)
    """Where rollouts are kept. Also: PADDOCK_STORE."""
    engine: str | PlacementBackend = field(default=LOCAL, metadata={**ON_THIS_MACHINE, "choices": tuple(BACKENDS)})
    """Where to run.

    `local`, `ray`, or a `RayBackend` with its resources."""

    def __post_init__(self) -> None:
        """The only place where options are checked: a wrong number must not look like an outcome."""
        check_types(self)
        if isinstance(self.network, str):
            NetworkPolicy.parse(self.network)
        if self.mode not in CAPTURE_MODES:
            raise ConfigError(f"mode is {self.mode!r}", hint=f"use {' or '.join(CAPTURE_MODES)}")
        if self.verifier_mode not in (None, *VERIFIER_MODES):
            raise ConfigError(f"verifier_mode is {self.verifier_mode!r}", hint=f"use {', '.join(VERIFIER_MODES)}")
        if self.token_mode and self.mode != "transparent_proxy":
            raise ConfigError(f"token_mode needs the mode transparent_proxy, not {self.mode}", hint="leave mode out")
        for name in ("tokenizer", "renderer"):
            if getattr(self, name) is not None and not self.token_mode:
                raise ConfigError(f"{name} is used in token mode only", hint="add --tokens, or token_mode=True")
        if not 0 <= self.top_logprobs <= MOST_TOP_LOGPROBS:
            raise ConfigError(f"top_logprobs is {self.top_logprobs}", hint=f"give 0 to {MOST_TOP_LOGPROBS}")
        if self.temperature is not None and not 0 <= self.temperature < math.inf:
            raise ConfigError(f"temperature is {self.temperature}", hint="give 0 or more")
        for name in ("agent_timeout", "stall_timeout", "pause_timeout", "context_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}", hint="give a number above 0")
        for name, minimum in {"n": 1, "parallel": 1, "max_steps": 1, "retries": 0, "seed": 0}.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ConfigError(f"{name} is {value}", hint=f"give {minimum} or more")
        if isinstance(self.engine, str) and self.engine not in BACKENDS:
            raise ConfigError(f"there is no engine {self.engine!r}", hint=f"use {' or '.join(BACKENDS)}")
        if self.resume is not None and self.batch_id is not None:
            raise ConfigError("both resume and batch_id are given", hint="resume names the batch already")
        if self.driver is not None and not isinstance(self.agent, str):
            raise ConfigError("an Agent already has its driver", hint="leave driver out, or name the agent")
        if not isinstance(self.model, str) and any(self.model_keys().values()):
            raise ConfigError("an Endpoint already has a name and a key", hint="leave model_name and keys out")

    def __repr__(self) -> str:
        """The fields that are not at their default, without secrets."""
        changed = ((each.name, self._public(each)) for each in fields(self) if not self._is_default(each))
        return f"RunConfig({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles without secrets and without objects of this process. The other machine gets both separately."""
        portable = (each for each in fields(self) if not each.metadata.get("local") and not self._is_default(each))
        return _restore, ({each.name: self._public(each) for each in portable},)

    def _public(self, each: Any) -> Any:
        """A field's value without its secret."""
        from paddock.protocol.redact import mask_url

        value = getattr(self, each.name)
        if each.metadata.get("secret"):
            return None
        if each.name == "model" and not isinstance(value, str):
            return value.display_name
        return mask_url(value) if isinstance(value, str) and "://" in value else value

    def _is_default(self, each: Any) -> bool:
        default = each.default_factory() if callable(each.default_factory) else each.default
        return bool(getattr(self, each.name) == default)

    # -- what others derive from it -----------------------------------------------------------------

    def with_fields(self, values: Mapping[str, Any]) -> RunConfig:
        """A copy with other values. Raises ConfigError for a name that is no field."""
        check_names(values)
        return replace(self, **values)

    def to_json(self) -> dict[str, Any]:
        """The fields that are not at their default, without secrets and without objects of this process."""
        values: dict[str, Any] = {}
        for each in fields(self):
            if each.metadata.get("local") or each.name in NOT_OF_A_ROLLOUT or self._is_default(each):
                continue
            value = self._public(each)
            if each.name == "agent" and not isinstance(value, str):
                if value.driver != value.drivers[0]:
                    values["driver"] = value.driver
                value = value.spec
            elif each.name == "network":
                value = str(value)
            elif is_dataclass(value):
                value = write_value(value)
            if isinstance(value, str | int | float | dict):
                values[each.name] = value
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], **changes: Any) -> RunConfig:
        """The config of `to_json`, with some fields changed. Raises ConfigError."""
        restored = dict(values)
        for name, kind in NESTED.items():
            if name in restored:
                restored[name] = read_value(kind, restored[name], name)
        return make_config(None, {**restored, **changes})

    def model_keys(self) -> dict[str, str | None]:
        """What `open_model` needs beside `model`."""
        return {
            "name": self.model_name,
            "api_key": self.api_key,
            "vllm_url": self.vllm_url,
            "hf_token": self.hf_token,
        }

    @property
    def agent_network(self) -> NetworkPolicy | None:
        """The policy that replaces the task's while the agent works."""
        return NetworkPolicy.parse(self.network) if isinstance(self.network, str) else self.network

    @property
    def secrets(self) -> tuple[str, ...]:
        """Strings that must appear in no record."""
        urls = (url for url in (self.model, self.vllm_url, self.env) if isinstance(url, str))
        values = (self.api_key, self.hf_token, *map(_password, urls), *getattr(self.env, "secrets", ()))
        return tuple(value for value in values if value)

    def capture_settings(
        self, *, weights: Weights, call_timeout: float, answer_timeout: float, deadline: float | None = None
    ) -> CaptureSettings:
        """The settings of a rollout's capture. `answer_timeout` is how long the agent waits for a whole answer,
        `deadline` is when its time is up, as `time.monotonic` counts."""
        settings = CaptureSettings(
            mode=self.mode,
            budget=self.budget,
            thinking=self.thinking,
            temperature=self.temperature,
            top_logprobs=self.top_logprobs,
            tokens=TokenSettings(self.tokenizer, self.renderer) if self.token_mode else None,
            weights=weights,
            call_timeout=call_timeout,
            pause_timeout=self.pause_timeout or LONGEST_PAUSE_SECONDS,
            unary_pause_timeout=self.pause_timeout or answer_timeout * PAUSE_SHARE,
            deadline=deadline,
        )
        if self.stall_timeout is None:
            return settings
        whole = self.stall_timeout * WHOLE_ANSWER_FACTOR
        return replace(settings, idle_timeout=self.stall_timeout, unary_timeout=whole)


def make_config(config: RunConfig | None, values: Mapping[str, Any]) -> RunConfig:
    """A config from keywords, or with some of its fields replaced by them. Raises ConfigError for an unknown one."""
    if config is not None:
        if not isinstance(config, RunConfig):
            raise ConfigError(f"the config has the type {type(config).__name__}", hint="give RunConfig(model=…)")
        return config.with_fields(values)
    check_names(values)
    if "model" not in values:
        raise ConfigError("model is missing", hint="give RunConfig(model=…), or model=… as a keyword")
    return RunConfig(**values)


def check_names(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for the name of an unknown field, with the closest one as a hint."""
    names = [each.name for each in fields(RunConfig)]
    for name in values:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = f"did you mean {close[0]!r}?" if close else f"the fields are {', '.join(names)}"
            raise ConfigError(f"RunConfig has no field {name!r}", hint=hint)


def _password(url: str) -> str | None:
    try:
        return unquote(urlsplit(url).password or "")
    except ValueError:
        return None


def _restore(values: dict[str, Any]) -> RunConfig:
    return RunConfig(**values)
