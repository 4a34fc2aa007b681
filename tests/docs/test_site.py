"""The site, built once as `make docs` builds it."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from scripts.docs import REPOSITORY
from scripts.docs.site import SITE

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(240)]
LOADED = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*(?:src|href)=["']?(https?:[^"' >]+)""")


@pytest.fixture(scope="module")
def built() -> Path:
    pytest.importorskip("zensical")
    shutil.rmtree(SITE, ignore_errors=True)
    command = [sys.executable, "-m", "scripts.docs.site"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return SITE


def test_a_page_fetches_nothing_from_elsewhere(built: Path) -> None:
    fetched = {url for page in built.rglob("*.html") for url in LOADED.findall(page.read_text())}
    assert fetched == set()


def test_the_reference_has_the_docstrings(built: Path) -> None:
    page = built.joinpath("docs", "reference", "rollouts.html").read_text()
    assert "Everything about a run except the tasks." in page
    assert 'id="paddock.rollouts.RunConfig.model"' in page
