"""`paddock e2b up`: what it refuses before it listens."""

import pytest
from click.exceptions import BadParameter
from click.testing import CliRunner

from paddock.cli.commands import paddock


@pytest.mark.parametrize(
    "wrong", [("--max-sandboxes", "0"), ("--port", "99999"), ("--sandbox", "docker"), ("--log-level", "loud")]
)
def test_invalid_values_are_refused(wrong: tuple[str, ...]) -> None:
    error = CliRunner().invoke(paddock, ["e2b", "up", *wrong], standalone_mode=False).exception
    assert isinstance(error, BadParameter)
    assert wrong[0] in error.format_message()
