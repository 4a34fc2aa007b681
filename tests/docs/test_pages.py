"""The pages of the documentation: all of them in the navigation, and those that are written by a program current."""

import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from scripts.docs import REPOSITORY, commands, site

import paddock
import paddock.errors
import paddock.fleet
import paddock.rollouts
import paddock.testing

REFERENCE = REPOSITORY / "docs" / "reference"


def navigation() -> list[str]:
    def walk(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for child in entry.values() if isinstance(entry, dict) else entry:
                yield from walk(child)

    return list(walk(tomllib.loads(site.CONFIG.read_text())["project"]["nav"]))


def test_every_page_is_in_the_navigation_once() -> None:
    pages = sorted(str(file) for file in site.find_files() if file.suffix == ".md")
    assert sorted(navigation()) == pages, "zensical.toml lists every page under `nav`"


def test_every_link_leads_to_a_file() -> None:
    assert [file for file in site.find_files() if not REPOSITORY.joinpath(file).is_file()] == []


def test_the_reference_of_the_commands_is_current() -> None:
    assert commands.PAGE.read_text() == commands.render(), "run: python -m scripts.docs.commands"


@pytest.mark.parametrize("module", [paddock, paddock.fleet, paddock.rollouts, paddock.testing])
def test_the_reference_has_every_public_name(module: Any) -> None:
    text = REFERENCE.joinpath(f"{module.__name__.rpartition('.')[2]}.md").read_text()
    names = set(module.__all__) - {"__version__"} - set(vars(paddock.errors))
    assert [name for name in sorted(names) if f"::: {module.__name__}.{name}\n" not in text] == []
