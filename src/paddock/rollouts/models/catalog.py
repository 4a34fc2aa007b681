"""From what a user writes to a live endpoint. Each form has a function; what it needs is imported when used."""

from __future__ import annotations

import re
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from paddock.errors import ConfigError
from paddock.rollouts.models.address import masked, parse_address
from paddock.rollouts.models.endpoint import Endpoint
from paddock.rollouts.models.variables import read_model_variables

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from paddock.rollouts.models.address import Address
    from paddock.rollouts.models.variables import ModelVariables

HF_ROUTER = "https://router.huggingface.co/v1"
FORMS = (
    "use http(s)://host:port[/v1], vllm://org/repo, hf-router://org/repo:provider, "
    "demo, replay:FILE, local or local:FILE.gguf"
)
LOOPBACK = ("localhost", "127.0.0.1", "::1")
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)*(:[\w.-]+)?")


@asynccontextmanager
async def open_model(
    spec: str,
    *,
    name: str | None = None,
    api_key: str | None = None,
    vllm_url: str | None = None,
    hf_token: str | None = None,
    log: Callable[[str], None] | None = None,
) -> AsyncIterator[Endpoint]:
    """A live endpoint for as long as it is entered. `log` is told what takes long or was decided.

    http(s)://host[:port][/v1]     a server that runs; without `name`, the first model it lists
    vllm://org/repo                that model on the vLLM server at `vllm_url`
    hf-router://org/repo:provider  that model at Hugging Face, with `hf_token` or HF_TOKEN
    demo                           recorded answers that solve every shipped task, for a first look without a model
    replay:FILE                    a script or a recording, played by `paddock.testing.replay`
    local, local:FILE.gguf         a small model, or the one in FILE, on this machine's processor

    The key for a server is `api_key`, else PADDOCK_MODEL_API_KEY, else OPENAI_API_KEY; the last one is not
    sent in the clear to another machine.

    Raises ConfigError if the form cannot be used as written, ModelError if nothing answers there.
    """
    tell = log or _silent
    variables = read_model_variables()
    if spec.startswith(("http://", "https://")):
        yield await _server(spec, name, api_key, variables, tell)
    elif spec.startswith("vllm://"):
        yield _vllm(spec, name, api_key or variables.api_key, vllm_url)
    elif spec.startswith("hf-router://"):
        yield _hf_router(spec, name, hf_token or api_key or variables.hf_token)
    elif spec == "demo" or spec.startswith("replay:"):
        from paddock.tasks import replay_file
        from paddock.testing.replay import ReplayServer

        file = str(replay_file()) if spec == "demo" else spec.removeprefix("replay:")
        if not file:
            raise ConfigError("replay: names no file", hint=FORMS)
        async with ReplayServer(file) as server:
            engine = "openai" if server.script.engine == "text" else server.script.engine
            yield Endpoint(server.url, name or server.script.model, label=spec, engine=engine)
    elif spec == "local" or spec.startswith("local:"):
        from paddock.rollouts.models.local import check_engine, open_engine
        from paddock.rollouts.models.weights import check_weights, find_weights

        file = spec.removeprefix("local").removeprefix(":")
        if spec == "local:":
            raise ConfigError("local: names no file", hint=FORMS)
        check_engine()
        weights = check_weights(Path(file)) if file else await find_weights(variables.cache, tell)
        async with open_engine(weights, tell) as url:
            yield Endpoint(url, name or weights.stem, label=spec, engine="llamacpp")
    else:
        raise ConfigError(f"{masked(spec)!r} names no model", hint=FORMS)


async def _server(
    spec: str, name: str | None, api_key: str | None, variables: ModelVariables, log: Callable[[str], None]
) -> Endpoint:
    address = parse_address(spec)
    if address.headers and api_key:
        raise ConfigError(f"{address.label} has a user and a key as well", hint="give one of them")
    key = None if address.headers else api_key or _key_for(address, variables)
    if name is None:
        from paddock.rollouts.models.listing import list_models

        names = await list_models(address.url, shown=address.label, api_key=key, headers=address.headers)
        name = names[0]
        others = f", the first of {len(names)} there" if len(names) > 1 else ""
        log(f"using the model {name} of {address.label}{others}")
    return Endpoint(address.url, name, key, address.headers, label=address.label)


def _key_for(address: Address, variables: ModelVariables) -> str | None:
    if variables.api_key is not None or variables.openai_api_key is None:
        return variables.api_key
    private = address.url.startswith("https://") or address.host in LOOPBACK
    return variables.openai_api_key if private else None


def _vllm(spec: str, name: str | None, api_key: str | None, vllm_url: str | None) -> Endpoint:
    model = _repository(spec, "vllm://")
    if not vllm_url:
        raise ConfigError(f"{spec} needs the address of a vLLM server", hint="give vllm_url, as http://host:8000")
    address = parse_address(vllm_url)
    key = None if address.headers else api_key
    return Endpoint(address.url, name or model, key, address.headers, label=spec, engine="vllm")


def _hf_router(spec: str, name: str | None, token: str | None) -> Endpoint:
    model = _repository(spec, "hf-router://")
    if not token:
        raise ConfigError(f"{spec} needs a token of Hugging Face", hint="set HF_TOKEN or give hf_token")
    return Endpoint(HF_ROUTER, name or model, token, label=spec, engine="openai")


def _repository(spec: str, scheme: str) -> str:
    written = spec.removeprefix(scheme)
    if _REPOSITORY.fullmatch(written) is None:
        raise ConfigError(f"{masked(spec)!r} names no model", hint=FORMS)
    return written


def _silent(_: str) -> None:
    pass
