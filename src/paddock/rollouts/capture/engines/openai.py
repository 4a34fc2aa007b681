"""The plain OpenAI API, and every server that takes its standard fields and no others."""

from __future__ import annotations

from paddock.rollouts.capture.engines.base import Engine

ENGINE = Engine("openai", limit_field="max_completion_tokens")
