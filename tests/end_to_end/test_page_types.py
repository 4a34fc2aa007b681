"""The page's modules are typed in their comments; the compiler that reads those types finds nothing to say."""

import asyncio
import subprocess
from pathlib import Path

import pytest

from paddock.agents.install import fetch_node, fetch_npm_tree

pytestmark = pytest.mark.end_to_end

REPOSITORY = Path(__file__).resolve().parents[2]
TYPESCRIPT = "5.9.3"


async def compiler() -> list[str]:
    tree = await fetch_npm_tree("typescript", TYPESCRIPT, print, timeout=120)
    node = await fetch_node(print, timeout=120)
    return [str(node / "node"), str(tree / "node_modules" / "typescript" / "bin" / "tsc")]


def test_the_modules_of_the_page_have_no_type_errors() -> None:
    command = [*asyncio.run(compiler()), "--project", str(REPOSITORY / "tsconfig.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_module_parses_html_or_runs_text() -> None:
    forbidden = ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc")
    modules = sorted((REPOSITORY / "src/paddock/web/static/js").glob("*.js"))
    assert len(modules) > 10
    result = [(path.name, word) for path in modules for word in forbidden if word in path.read_text()]
    assert result == []
