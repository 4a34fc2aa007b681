import pytest

from paddock.errors import TaskError
from paddock.tasks.datasets.source import (
    DatasetSource,
    GitSource,
    parse_dataset_name,
    parse_git,
    without_credentials,
)


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("git+https://h/o/r.git", GitSource("https://h/o/r.git")),
        ("git+https://h/o/r.git@v1.0#tasks/a", GitSource("https://h/o/r.git", "v1.0", "tasks/a")),
        ("git+https://h/o/r@feature/x#/tasks/", GitSource("https://h/o/r", "feature/x", "tasks")),
        ("git+ssh://git@h/o/r.git@main", GitSource("ssh://git@h/o/r.git", "main")),
        ("git+file:///a/r@main#t.jsonl", GitSource("file:///a/r", "main", "t.jsonl")),
    ],
)
def test_the_parts_of_a_git_address_are_read(text: str, source: GitSource) -> None:
    assert parse_git(text) == source


@pytest.mark.parametrize(
    "text",
    [
        "git+https://",
        "git+ext::sh -c id",
        "git+h/o/r",
        "git+https://h/r@",
        "git+https://h/r@--upload-pack=id",
        "git+https://h/r#../x",
        "git+https://h/r#.git/config",
    ],
)
def test_what_is_no_git_address_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(TaskError) as caught:
        parse_git(text)
    assert caught.value.hint


def test_credentials_are_not_shown() -> None:
    source = parse_git("git+https://me:secret@h/o/r.git@main")
    assert source.url == "https://me:secret@h/o/r.git"
    assert str(source) == "git+https://h/o/r.git@main"
    assert "secret" not in without_credentials("fatal: https://me:secret@h/o")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("terminal@2.0", DatasetSource("terminal", "2.0")),
        ("org/set", DatasetSource("org/set")),
        ("./set@1", None),
        ("../set", None),
    ],
)
def test_names_of_datasets_are_distinguished_from_paths(text: str, source: DatasetSource | None) -> None:
    assert parse_dataset_name(text) == source
