import io
import os
import tarfile
from pathlib import Path

import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.context import BuildContext, SourceTree, open_context
from paddock.sandbox.images.dockerfiles.ignore import parse_ignore_file


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.txt", "b.txt", "sub/c.txt", "sub/deep/d.log", "keep/e.log", "x[1].txt"):
        path = tmp_path / "context" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "outside").write_text("secret")
    return tmp_path / "context"


def copied(tree: SourceTree, source: str) -> list[str]:
    """The names that COPY of a source takes, with their contents for files."""
    output = io.BytesIO()
    tree.write_archive(tree.select(source), output, keeps_owners=False)
    return tarfile.open(fileobj=io.BytesIO(output.getvalue())).getnames()


@pytest.mark.parametrize(
    ("patterns", "path", "is_ignored"),
    [
        ("*.log", "a.log", True),
        ("*.log", "sub/a.log", False),
        ("**/*.log", "sub/deep/a.log", True),
        ("**/*.log", "a.log", True),
        ("sub", "sub/deep/a.log", True),
        ("/sub/", "sub/x", True),
        ("sub/*\n!sub/keep", "sub/keep/x", False),
        ("sub/*\n!sub/keep", "sub/other", True),
        ("!a\na", "a", True),
        ("# a\n\n", "a", False),
        ("*/temp*", "x/temporary/y", True),
        ("temp?", "temp", False),
        ("[a-c]x", "bx", True),
        ("[^a-c]x", "bx", False),
        ("\\*x", "ax", False),
        ("**", "any/thing", True),
        ("a/**/z", "a/z", True),
    ],
)
def test_ignore_patterns(patterns: str, path: str, is_ignored: bool) -> None:
    assert parse_ignore_file(patterns).ignores(path) is is_ignored


@pytest.mark.parametrize("text", ["!", "[a"])
def test_a_wrong_pattern_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ImageError, match=r"\.dockerignore line 2"):
        parse_ignore_file(f"# comment\n{text}")


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("a.txt", ["0"]),
        ("*.txt", ["0", "1", "2"]),
        ("sub", ["0", "0/c.txt", "0/deep", "0/deep/d.log"]),
        ("sub/", ["0", "0/c.txt", "0/deep", "0/deep/d.log"]),
        ("*/*.log", ["0"]),
        ("s?b/[a-d].txt", ["0"]),
        ("x[[]1].txt", ["0"]),
        ("none*", []),
    ],
)
def test_sources(folder: Path, source: str, names: list[str]) -> None:
    assert copied(SourceTree(str(folder)), source) == names


def test_dockerignore_leaves_files_out_and_takes_some_in_again(folder: Path) -> None:
    (folder / ".dockerignore").write_text("**/*.log\n!keep/*.log\nb.txt\n.dockerignore\n")
    tree = BuildContext(folder).tree()
    assert copied(tree, ".") == [
        "0",
        "0/a.txt",
        "0/keep",
        "0/keep/e.log",
        "0/sub",
        "0/sub/c.txt",
        "0/sub/deep",
        "0/x[1].txt",
    ]
    with pytest.raises(FileNotFoundError):
        tree.select("b.txt")


def test_the_dockerfile_has_an_ignore_file_of_its_own(folder: Path) -> None:
    (folder / ".dockerignore").write_text("a.txt")
    (folder / "Other.dockerignore").write_text("b.txt")
    assert BuildContext(folder, "Other").tree().rules.ignores("b.txt")
    assert not BuildContext(folder, "Other").tree().rules.ignores("a.txt")


@pytest.mark.parametrize("target", ["../outside", "/outside", "/../../outside"])
def test_a_link_never_leads_outside(folder: Path, target: str) -> None:
    (folder / "link").symlink_to(target)
    with pytest.raises(FileNotFoundError):
        SourceTree(str(folder)).select("link")


def test_a_source_that_is_a_link_is_followed_and_a_link_below_it_is_not(folder: Path) -> None:
    (folder / "link").symlink_to("/sub")
    (folder / "sub" / "inner").symlink_to("/etc/passwd")
    tree = SourceTree(str(folder))
    (item,) = tree.select("link")
    assert (item.path, item.name, item.is_folder) == ("sub", "link", True)
    assert "0/inner" in copied(tree, "link")


def test_the_digest_depends_on_contents_modes_and_names_but_not_on_times(folder: Path) -> None:
    tree = SourceTree(str(folder))

    def digest() -> str:
        return tree.digest(tree.select("sub"))

    first = digest()
    os.utime(folder / "sub" / "c.txt", (0, 0))
    assert digest() == first
    (folder / "sub" / "c.txt").chmod(0o755)
    second = digest()
    (folder / "sub" / "c.txt").write_text("changed")
    third = digest()
    (folder / "sub" / "c.txt").rename(folder / "sub" / "d.txt")
    assert len({first, second, third, digest()}) == 4


def test_files_from_memory_become_a_folder_that_is_removed() -> None:
    with open_context({"run.sh": b"#!/bin/sh\n", "a/b": b"x"}) as context:
        assert context.folder.joinpath("run.sh").stat().st_mode & 0o777 == 0o755
        assert context.folder.joinpath("a/b").stat().st_mode & 0o777 == 0o644
    assert not context.folder.exists()


@pytest.mark.parametrize("name", ["../x", "/x", "a/../../x"])
def test_names_in_memory_stay_inside(name: str) -> None:
    with pytest.raises(ImageError, match="build context"), open_context({name: b""}):
        pass
