"""The tables of docs/task_toml.md name every key of task.toml with its default, and no other."""

import json
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

import pytest

from paddock.tasks import task_toml
from paddock.tasks.settings import Artifact

PAGE = (Path(__file__).parents[2] / "docs" / "task_toml.md").read_text()
TABLES = {
    "Top level": task_toml.TomlDocument,
    "task": task_toml.TaskTable,
    "environment": task_toml.EnvironmentTable,
    "environment.healthcheck": task_toml.HealthCheckTable,
    "environment.mcp_servers": task_toml.McpServerTable,
    "environment.tpu": task_toml.TpuTable,
    "agent": task_toml.AgentTable,
    "verifier": task_toml.VerifierTable,
    "verifier.collect": task_toml.CollectTable,
    "solution": task_toml.SolutionTable,
    "artifacts": Artifact,
    "steps": task_toml.StepTable,
}
ROW = re.compile(r"^\| `(\w+)` \|[^|]+\|([^|]*)\|", re.MULTILINE)


def documented(heading: str) -> dict[str, str]:
    """The keys below a heading, with their defaults."""
    _, _, rest = PAGE.partition(f"# {heading}\n")
    return {key: default.strip() for key, default in ROW.findall(re.split(r"(?m)^#", rest)[0])}


@pytest.mark.parametrize(("heading", "kind"), TABLES.items())
def test_the_keys_of_a_table_are_documented(heading: str, kind: type) -> None:
    rows = documented(heading)
    assert set(rows) == {field.name for field in fields(kind)}
    for field in fields(kind):
        expected = default_of(field)
        assert not expected or rows[field.name] == expected, field.name


def test_every_table_of_the_page_is_checked() -> None:
    headings = re.findall(r"^##+ (.*)$", PAGE, re.MULTILINE)
    assert {heading for heading in headings if documented(heading)} == set(TABLES)


def default_of(field: Field[Any]) -> str:
    """As the page has it. Empty where the default depends on other things: the page says it in words."""
    if field.default is MISSING and field.default_factory is MISSING:
        return "required"
    is_value = isinstance(field.default, int | float | str) and field.default != ""
    return f"`{json.dumps(field.default)}`" if is_value else ""
