import pytest

from paddock.errors import ImageError
from paddock.sandbox.images.dockerfiles.expansion import Expander

VARIABLES = {"x": "value", "empty": "", "path": "/usr/local/bin", "a_1": "one", "v": "a.tar.gz"}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$x-${x}", "value-value"),
        ("$a_1$missing.", "one."),
        ("${missing:-d}${missing-e}${empty:-f}${empty-g}", "def"),
        ("${x:+set}${empty:+set}${missing:+set}${empty+set}", "setset"),
        ("${missing:-${x:-y}}", "value"),
        (r"\$x '$x' \"$x", '$x $x "value'),
        ('"a $x \\"q\\" \\n"', 'a value "q" \\n'),
        ("a' b 'c", "a b c"),
        ("$", "$"),
        ("100$%", "100$%"),
        ("${path##*/} ${path#/usr}", "bin /local/bin"),
        ("${v%.*} ${v%%.*}", "a.tar a"),
        ("${path//\\//_} ${path/usr/opt}", "_usr_local_bin /opt/local/bin"),
        ("${x:?must be set}", "value"),
    ],
)
def test_expansion(text: str, expanded: str) -> None:
    assert Expander(VARIABLES, "\\", 1).expand(text) == expanded


def test_quotes_mean_nothing_in_a_heredoc() -> None:
    assert Expander(VARIABLES, "\\", 1).expand_heredoc('it\'s "$x" \\$x \\n\n') == 'it\'s "value" $x \\n\n'


def test_the_escape_character_can_be_another() -> None:
    assert Expander(VARIABLES, "`", 1).expand("c:\\$x`$x") == "c:\\value$x"


@pytest.mark.parametrize("text", ["${x", "${}", "${x:!y}", "${x^}", "'a", '"a', "${missing?no value}", "${x:-a"])
def test_what_cannot_be_expanded_is_refused_with_its_line(text: str) -> None:
    with pytest.raises(ImageError, match="line 7"):
        Expander(VARIABLES, "\\", 7).expand(text)
