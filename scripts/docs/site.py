"""The documentation as a site in site/, built without a network. A broken link is an error.

    python -m scripts.docs.site

Pages link to each other as on a code host, also to files outside of docs/. So the source of the site is a copy of the
repository's folders: README.md, docs/ and every file that a page links to.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from scripts.docs import REPOSITORY, find_pages

SOURCE = REPOSITORY / "build" / "site_source"
SITE = REPOSITORY / "site"
CONFIG = REPOSITORY / "zensical.toml"
MORE_FILES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "docs/site.css")
LINK = re.compile(r"\]\(([^)\s#]+)")


def main() -> int:
    files = set(find_files())
    missing = [file for file in files if not REPOSITORY.joinpath(file).is_file()]
    for file in sorted(missing):
        print(f"error: a page links to {file}, which is not a file of this repository", file=sys.stderr)
    if missing:
        return 1
    shutil.rmtree(SOURCE, ignore_errors=True)
    for file in files:
        target = SOURCE / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / file, target)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(CONFIG)]
    return subprocess.run(command, cwd=REPOSITORY, check=False).returncode


def find_files() -> Iterator[Path]:
    """All pages and all files that they link to, relative to the repository."""
    waiting = [*find_pages(), *map(Path, MORE_FILES)]
    found = set(waiting)
    while waiting:
        file = waiting.pop()
        yield file
        if file.suffix == ".md" and REPOSITORY.joinpath(file).is_file():
            new = find_links(file) - found
            waiting += new
            found |= new


def find_links(page: Path) -> set[Path]:
    """The files of the repository that a page links to."""
    targets = LINK.findall(REPOSITORY.joinpath(page).read_text())
    paths = {(REPOSITORY / page.parent / target).resolve() for target in targets if "://" not in target}
    return {path.relative_to(REPOSITORY) for path in paths}


if __name__ == "__main__":
    sys.exit(main())
