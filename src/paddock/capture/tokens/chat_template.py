"""A model's own Jinja chat template, compiled as Hugging Face does it. It comes from a file, so it is sandboxed."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from paddock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable


def compile_template(source: str) -> Callable[..., str]:
    """A function that renders messages. Raises ConfigError for a template that cannot be compiled."""
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(source).render
    except jinja2.TemplateError as error:
        raise ConfigError(
            f"the chat template cannot be compiled: {error}", hint="give the tokenizer of the model"
        ) from None
