"""Types that carry a schema which somebody else wrote: open models here, exact ones where the values come from."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

DEEPEST = 20


def published(base: type[BaseModel], name: str, schema: dict[str, Any]) -> type[BaseModel]:
    """A subclass of `base` that takes every field and is published as `schema`."""
    told = inlined(schema)

    def shown(cls: Any, core: Any, handler: Any) -> dict[str, Any]:
        return told

    made = create_model(name, __base__=(base, _Open))
    made.__get_pydantic_json_schema__ = classmethod(shown)  # type: ignore[assignment, method-assign]
    made.model_rebuild(force=True)
    return made


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without references: each stands where it was pointed to; one that goes in circles ends there."""
    definitions = schema.get("$defs", {})

    def resolve(part: Any, seen: tuple[str, ...]) -> Any:
        if isinstance(part, list):
            return [resolve(member, seen) for member in part]
        if not isinstance(part, dict):
            return part
        name = str(part.get("$ref", "")).rpartition("/")[2]
        rest = {key: resolve(value, seen) for key, value in part.items() if key not in ("$ref", "$defs")}
        if not name:
            return rest
        if name in seen or len(seen) > DEEPEST or name not in definitions:
            return rest
        return {**resolve(definitions[name], (*seen, name)), **rest}

    told: dict[str, Any] = resolve(schema, ())
    return told
