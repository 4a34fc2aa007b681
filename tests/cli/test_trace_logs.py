"""The ends of logs that `paddock trace show` prints."""

from paddock.cli.trace import LINE_CHARACTERS, LOG_CHARACTERS, last_lines


def test_a_short_log_is_shown_whole() -> None:
    assert last_lines("one\ntwo\n") == "one\ntwo"


def test_a_long_log_begins_with_a_whole_line() -> None:
    shown = last_lines("\n".join(f"line {number}" for number in range(1000)))
    assert shown.startswith("line ")
    assert shown.endswith("line 999")
    assert len(shown) <= LOG_CHARACTERS


def test_the_beginning_of_a_long_line_is_shown() -> None:
    shown = last_lines('{"type":"text"' + "x" * 5000)
    assert shown.startswith('{"type":"text"')
    assert len(shown) == LINE_CHARACTERS
