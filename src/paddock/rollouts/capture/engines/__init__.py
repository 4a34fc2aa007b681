"""The engines by name, and how to tell which one answers at an endpoint. No IO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from paddock.rollouts.capture.engines import llamacpp, openai, sglang, vllm
from paddock.rollouts.capture.engines.base import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping

UNKNOWN = Engine(
    "unknown",
    neutral=vllm.ENGINE.neutral,
    token_ids=vllm.ENGINE.token_ids,
    least_alternatives=1,
    template_arguments=True,
)
"""Asked the vLLM way; what it refuses is learned."""
ENGINES: dict[str, Engine] = {
    engine.name: engine for engine in (vllm.ENGINE, sglang.ENGINE, llamacpp.ENGINE, openai.ENGINE)
}
OWNERS = {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llamacpp", "openai": "openai", "openai-internal": "openai"}
TELLTALE_PATHS = {"/props": "llamacpp", "/get_model_info": "sglang", "/version": "vllm"}
"""Paths of the server's root that only one engine answers with the field below."""
TELLTALE_FIELDS = {"/props": "default_generation_settings", "/get_model_info": "model_path", "/version": "version"}


def by_name(name: str | None) -> Engine:
    return ENGINES.get(name or "", UNKNOWN)


def by_owner(models: Any) -> Engine | None:
    """The engine that its list of models names as the owner."""
    for model in model_list(models):
        if (owner := OWNERS.get(str(model.get("owned_by", "")).lower())) is not None:
            return ENGINES[owner]
    return None


def by_telltales(answers: Mapping[str, Any]) -> Engine | None:
    """The engine that answered at a path of its own."""
    for path, name in TELLTALE_PATHS.items():
        answer = answers.get(path)
        if isinstance(answer, dict) and TELLTALE_FIELDS[path] in answer:
            return ENGINES[name]
    return None


def model_list(models: Any) -> list[dict[str, Any]]:
    found = models.get("data") if isinstance(models, dict) else None
    return [model for model in found if isinstance(model, dict)] if isinstance(found, list) else []
