"""The code blocks of README.md and docs/: run, loaded, or left out for a reason in `scripts/docs/blocks.py`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts.docs.blocks import FILE, LOADED, RUN, SKIPPED, TEXT, Block, find_blocks

from docs.checks import find_commands, find_imports, parse_command
from docs.session import Session
from paddock.agents.install import agents_folder
from paddock.config import PADDOCK_IMAGES, user_cache_folder
from paddock.models.replay import Script
from paddock.rollouts import Task
from paddock.rollouts.fork import read_edit
from paddock.tasks.task_toml import read_task_toml
from rollouts.played import needs_bwrap

MOST_SKIPPED = 0.25
"""Of all code blocks."""
JSON_LOADERS: dict[str, Callable[[Any], Any]] = {
    "turns": Script.parse,
    "tasks": Script.parse,
    "answer": read_edit,
    "tool_result": read_edit,
    "instruction": Task.from_json,
}
"""By a key of the document."""


BLOCKS = find_blocks()
RUN_HERE = [block for block in BLOCKS if block.use in (RUN, FILE) and not block.end_to_end]
RUN_END_TO_END = [block for block in BLOCKS if block.use in (RUN, FILE)]


def pages(blocks: list[Block]) -> list[Path]:
    return sorted({block.page for block in blocks if block.use == RUN and not block.hidden})


def select(languages: str, *uses: str) -> list[Block]:
    return [block for block in BLOCKS if block.language in languages.split() and block.use in uses]


@needs_bwrap
@pytest.mark.timeout(540)
@pytest.mark.parametrize("page", pages(RUN_HERE), ids=str)
def test_the_blocks_of_a_page_run(page: Path, session: Session) -> None:
    done = session.run(block for block in RUN_HERE if block.page == page)
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.end_to_end
@needs_bwrap
@pytest.mark.timeout(540)
@pytest.mark.parametrize("page", pages([block for block in RUN_END_TO_END if block.end_to_end]), ids=str)
def test_all_blocks_of_a_page_run(page: Path, session: Session) -> None:
    session.variables |= {
        "PADDOCK_AGENTS": str(agents_folder()),
        "PADDOCK_IMAGES": str(PADDOCK_IMAGES.read() or user_cache_folder() / "images"),
    }
    done = session.run(block for block in RUN_END_TO_END if block.page == page)
    assert done.returncode == 0, done.stdout[-4000:]


def test_every_task_toml_can_be_read() -> None:
    blocks = select("toml", LOADED, FILE)
    for block in (each for each in blocks if each.file is None or each.file.endswith("task.toml")):
        toml = read_task_toml(block.text, str(block))
        assert (*toml.unknown_keys, *toml.misspelled_tables) == (), str(block)


def test_every_json_document_can_be_read() -> None:
    for block in select("json", LOADED, FILE):
        document = json.loads(block.text)
        for key, load in JSON_LOADERS.items():
            if key in document:
                load(document)


def test_every_yaml_document_can_be_read() -> None:
    for block in select("yaml", LOADED, FILE):
        assert yaml.safe_load(block.text), str(block)


def test_every_command_has_the_options_that_a_page_gives_it() -> None:
    for block in select("sh", RUN, SKIPPED):
        for words in find_commands(block.text):
            assert parse_command(words) is None, f"{block}: {parse_command(words)}"


def test_every_name_that_a_page_imports_is_there() -> None:
    for block in select("python", RUN, FILE, SKIPPED):
        for module, name in find_imports(block.text):
            assert name is None or hasattr(module, name), f"{block}: {module.__name__} has no {name}"


def test_few_blocks_are_left_out() -> None:
    blocks = [block for block in BLOCKS if block.use != TEXT and not block.hidden]
    skipped = [f"{block}: {block.skip}" for block in blocks if block.skip]
    assert len(skipped) <= MOST_SKIPPED * len(blocks), "\n".join(skipped)
