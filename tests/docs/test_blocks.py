"""The code blocks of README.md and docs/: run, loaded, or left out for a reason in `scripts/docs/blocks.py`."""

from pathlib import Path

import pytest
from scripts.docs import REPOSITORY, find_pages
from scripts.docs.blocks import FILE, RUN, read_blocks

from docs.session import Session
from rollouts.played import needs_bwrap


def has_code(page: Path) -> bool:
    text = REPOSITORY.joinpath(page).read_text()
    return "```sh\n" in text or "```python\n" in text


@needs_bwrap
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", [page for page in find_pages() if has_code(page)], ids=str)
def test_the_blocks_of_a_page_run(page: Path, session: Session) -> None:
    blocks = [block for block in read_blocks(page) if block.use in (RUN, FILE) and not block.end_to_end]
    done = session.run(blocks)
    assert done.returncode == 0, done.stdout[-4000:]
