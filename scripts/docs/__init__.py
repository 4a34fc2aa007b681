"""The documentation: its site, the reference of the commands, and the code blocks of its pages."""

from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def find_pages() -> list[Path]:
    """README.md and all pages of docs/, relative to the repository."""
    pages = sorted(REPOSITORY.joinpath("docs").rglob("*.md"))
    return [Path("README.md"), *(page.relative_to(REPOSITORY) for page in pages)]
