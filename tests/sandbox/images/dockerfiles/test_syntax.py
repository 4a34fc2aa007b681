"""Dockerfiles are cut into instructions as BuildKit cuts them."""

import json
import subprocess
import sys

import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.syntax import Instruction, parse_lines


def parse_one(text: str) -> Instruction:
    (instruction,) = parse_lines(text).instructions
    return instruction


def test_a_continued_line_is_joined_without_comments_and_empty_lines() -> None:
    instruction = parse_one("\n# first\nRUN a \\\n  # not part of it\n\n  b\\  \n c\n")
    assert (instruction.line, instruction.rest) == (3, "a   b c")


def test_the_escape_directive_changes_the_continuation() -> None:
    text = parse_lines("# syntax=docker/dockerfile:1\n# escape=`\nFROM c\nRUN a `\n b\\\n")
    assert text.escape == "`"
    assert [one.rest for one in text.instructions] == ["c", "a  b\\"]


def test_a_directive_after_a_comment_is_a_comment() -> None:
    assert parse_lines("# hello\n# escape=`\nFROM c\n").escape == "\\"


def test_windows_line_ends_and_a_byte_order_mark_are_removed() -> None:
    first, second = parse_lines("\ufefffrom x\r\nRUN a\\\r\n b\r\n").instructions
    assert (first.keyword, first.rest, second.rest) == ("FROM", "x", "a b")


def test_flags_are_separated_from_arguments() -> None:
    instruction = parse_one('RUN --mount=type=bind,source="a b" --x -- ls --all')
    assert instruction.flags == (("mount", "type=bind,source=a b"), ("x", None))
    assert instruction.rest == "ls --all"


@pytest.mark.parametrize(
    ("text", "expands", "strips_tabs", "content"),
    [
        ("COPY <<EOF /x\n$a\nEOF\n", True, False, "$a\n"),
        ("COPY <<'EOF' /x\n\t$a\nEOF\n", False, False, "\t$a\n"),
        ('COPY <<-"EOF" /x\n\t$a\n\tEOF\n', False, True, "$a\n"),
        ("RUN <<EOF\n# not a comment\n\na \\\nEOF", True, False, "# not a comment\n\na \\\n"),
    ],
)
def test_heredocs(text: str, expands: bool, strips_tabs: bool, content: str) -> None:
    (heredoc,) = parse_one(text).heredocs
    assert (heredoc.expands, heredoc.strips_tabs, heredoc.text) == (expands, strips_tabs, content)


def test_several_heredocs_of_one_line_come_in_their_order() -> None:
    run, user = parse_lines("RUN <<A cat && <<B cat\n1\nA\n2\nB\nUSER u\n").instructions
    assert [(one.name, one.text) for one in run.heredocs] == [("A", "1\n"), ("B", "2\n")]
    assert run.heredoc_lines == "1\nA\n2\nB\n"
    assert user.line == 6


@pytest.mark.parametrize(
    "text", ["RUN echo '<<EOF'", 'RUN ["<<EOF"]', "RUN cat <<<EOF", "ENV x=<<EOF", "RUN $((1<<2))"]
)
def test_what_only_looks_like_a_heredoc_is_none(text: str) -> None:
    assert parse_one(text).heredocs == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("FROM a\nRUN <<EOF\nx\n", r"line 2: the heredoc EOF has no end"),
        ("# escape=x\nFROM a\n", r"line 1: the escape character is 'x'"),
        ("# escape=`\n# escape=`\nFROM a\n", r"line 2: the directive escape is there twice"),
        ("FROM a\nRUN a\0b\n", r"line 2: there is a zero byte"),
        ("# nothing\n", r"no instructions"),
    ],
)
def test_what_is_no_dockerfile_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ImageError, match=message) as caught:
        parse_lines(text)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("rest", "words"),
    [('["a", "b c"]', ("a", "b c")), ("['a']", None), ("[ -f x ] && y", None), ("a b", None), ("[]", ())],
)
def test_exec_form_is_json_and_everything_else_is_shell_form(rest: str, words: tuple[str, ...] | None) -> None:
    assert parse_one(f"CMD {rest}").parse_json() == words


REFERENCE = """
import dockerfile, json, sys
print(json.dumps([[(c.start_line, c.cmd.upper(), list(c.flags), len(c.heredocs), [h.content for h in c.heredocs])
    for c in dockerfile.parse_string(text)] for text in json.load(sys.stdin)]))
"""
DOCKERFILES = [
    "FROM a AS b\nRUN --mount=type=cache,target=/x <<EOF\necho a\nEOF\nCOPY --chown=a:b x \\\n # c\n\n y /z\n",
    "FROM x\nRUN <<A cat && 3<<B cat\na\nA\nb\nB\nHEALTHCHECK --interval=5s CMD true\n",
    "# escape=`\nFROM x\nRUN a `\n\n  b\nENV a=b `\n  c=d\n",
    "FROM x\n  RUN  a \\\n\\\n b\n\tCOPY <<'E' \"/y z\"\n$a\\\nE\nADD --chmod=755 a b/\n",
]


def test_the_parser_of_buildkit_agrees() -> None:
    """`dockerfile` wraps BuildKit's parser. It runs in a process of its own because it brings a Go runtime."""
    command = [sys.executable, "-c", REFERENCE]
    run = subprocess.run(command, input=json.dumps(DOCKERFILES), capture_output=True, text=True, timeout=30)
    if "No module named 'dockerfile'" in run.stderr:
        pytest.skip("the package dockerfile is not installed")
    ours = [
        [
            [
                one.line,
                one.keyword,
                [f"--{name}" + ("" if value is None else f"={value}") for name, value in one.flags],
                len(one.heredocs),
                [heredoc.content for heredoc in one.heredocs],
            ]
            for one in parse_lines(text).instructions
        ]
        for text in DOCKERFILES
    ]
    assert ours == json.loads(run.stdout)
