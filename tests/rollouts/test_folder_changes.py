"""What people see of changed files."""

import pytest

from paddock.rollouts.folder_changes import is_generated


@pytest.mark.parametrize("path", ["__pycache__/a.cpython-312.pyc", "src/a.pyc", ".git/index", "node_modules/x.js"])
def test_compiled_files_and_caches_are_generated(path: str) -> None:
    assert is_generated(path)


@pytest.mark.parametrize("path", ["a.py", "pycache/a.py", "notes.o.txt"])
def test_the_files_of_the_agent_are_not(path: str) -> None:
    assert not is_generated(path)
