"""The code blocks of README.md and docs/, and what tests do with each. Prints the numbers.

    python -m scripts.docs.blocks

A comment on the line before a block says what its language does not:

    <!-- test: skip, needs a cluster -->       not run; the reasons are in REASONS
    <!-- test: end-to-end -->                  run by the end-to-end suite only: it needs agents, or takes long
    <!-- test: file=tests/test.sh -->          a file that the page shows: it is written, not run
    <!-- test: continues -->                   Python that goes on with the block before
    <!-- test: setup=connected -->             Python that uses the names of tests/docs/setups/connected.py

and a comment anywhere is a command that readers do not see, such as a server that the next block needs:

    <!-- run: paddock serve counter -->

or holds for the whole page:

    <!-- test page: end-to-end -->
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.docs import REPOSITORY, find_pages

RUN, FILE, LOADED, SKIPPED, TEXT = "run", "file", "loaded", "skipped", "text"
LANGUAGES = {"python": RUN, "sh": RUN, "json": LOADED, "toml": LOADED, "yaml": LOADED, "text": TEXT}
"""What happens to a block without a comment."""
REASONS = (
    "installs packages",
    "needs a cluster",
    "needs another service",
    "needs another project",
    "needs another engine",
    "needs a trainer",
    "takes minutes",
)
"""Why a block may be left out. Its commands are still parsed, and what it imports is still looked up."""
FENCE = re.compile(r"( *)```(\S*)\s*")
COMMENT = re.compile(r" *<!-- test: (.+) -->\s*")
END_TO_END_PAGE = "<!-- test page: end-to-end -->\n"
HIDDEN = re.compile(r" *<!-- run: (.+) -->\s*")
INSTALLS = re.compile(r"^(?:python3? -m )?(?:pip|uv|apt|apt-get|npm|make) ", re.MULTILINE)
FILE_NAME = re.compile(r"# (\S+\.py)\n")


@dataclass(frozen=True, slots=True)
class Block:
    page: Path
    line: int
    """Of the opening fence."""
    language: str
    text: str
    skip: str | None = None
    file: str | None = None
    setup: str | None = None
    end_to_end: bool = False
    continues: bool = False
    hidden: bool = False

    @property
    def use(self) -> str:
        if self.skip is not None:
            return SKIPPED
        return FILE if self.file is not None else LANGUAGES[self.language]

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def find_blocks() -> list[Block]:
    return [block for page in find_pages() for block in read_blocks(page)]


def read_blocks(page: Path) -> Iterator[Block]:
    lines = REPOSITORY.joinpath(page).read_text().splitlines(keepends=True)
    is_end_to_end = END_TO_END_PAGE in lines
    for block in read_lines(page, lines):
        yield replace(block, end_to_end=block.end_to_end or is_end_to_end)


def read_lines(page: Path, lines: list[str]) -> Iterator[Block]:
    start = 0
    while start < len(lines):
        fence, hidden = FENCE.fullmatch(lines[start]), HIDDEN.fullmatch(lines[start])
        if hidden:
            yield Block(page, start + 1, "sh", f"{hidden[1]}\n", hidden=True)
        if fence is None:
            start += 1
            continue
        end = next(line for line in range(start + 1, len(lines)) if lines[line].strip() == "```")
        text = "".join(line.removeprefix(fence[1]) for line in lines[start + 1 : end])
        comment = COMMENT.fullmatch(lines[start - 1]) if start else None
        yield make_block(page, start + 1, fence[2], text, comment[1] if comment else "")
        start = end + 1


def make_block(page: Path, line: int, language: str, text: str, comment: str) -> Block:
    """Raises ValueError for a comment or a language that is not known."""
    if language not in LANGUAGES:
        raise ValueError(f"{page}:{line}: a block is one of {', '.join(LANGUAGES)}, not {language!r}")
    words = [word.strip() for word in comment.split(",")] if comment else []
    if words[:1] == ["skip"]:
        reason = ", ".join(words[1:])
        if reason not in REASONS:
            raise ValueError(f"{page}:{line}: {reason!r} is none of the reasons in scripts/docs/blocks.py")
        return Block(page, line, language, text, skip=reason)
    if language == "sh" and INSTALLS.search(text):
        raise ValueError(
            f"{page}:{line}: what installs something must have the comment `test: skip, installs packages`"
        )
    named = FILE_NAME.match(text) if language == "python" else None
    options: dict[str, Any] = {"file": named[1]} if named else {}
    for word in words:
        name, _, value = word.partition("=")
        if name in ("file", "setup") and value:
            options[name] = value
        elif word in ("end-to-end", "continues"):
            options[word.replace("-", "_")] = True
        else:
            raise ValueError(f"{page}:{line}: unknown comment {word!r}")
    return Block(page, line, language, text, **options)


def main() -> int:
    blocks = [block for block in find_blocks() if block.use != TEXT and not block.hidden]
    uses = Counter(block.use for block in blocks)
    checked = len(blocks) - uses[SKIPPED]
    print(f"{checked} of {len(blocks)} code blocks are run or loaded by a test")
    later = sum(block.end_to_end for block in blocks if block.use == RUN)
    print(f"  {uses[RUN]} run, {later} of them end to end; {uses[FILE]} used as files; {uses[LOADED]} loaded")
    for reason, count in Counter(block.skip for block in blocks if block.skip).most_common():
        places = ", ".join(str(block) for block in blocks if block.skip == reason)
        print(f"  {count} skipped, {reason}: {places}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
