"""The plain OpenAI API, and every server that takes its standard fields only."""

from __future__ import annotations

from paddock.capture.engines import InferenceEngine

ENGINE = InferenceEngine(
    "openai",
    owned_by=("openai", "openai-internal"),
    max_tokens_field="max_completion_tokens",
    upgrade_hint="this API returns no token ids; serve the model with vLLM, SGLang or llama.cpp to train on it",
)
