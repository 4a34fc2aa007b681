"""`paddock check` says when a sandbox cannot have the users of an image."""

from paddock.sandbox.user_namespace import Identity, IdRange
from paddock.testing.task import _check_users


def test_one_user_id_is_a_warning_with_the_way_out() -> None:
    one = (IdRange(0, 1000, 1),)
    result = _check_users(Identity("single", one, one, "install uidmap"))
    assert (result.outcome, result.hint) == ("warning", "install uidmap")
    many = (IdRange(0, 100000, 65536),)
    assert _check_users(Identity("range", many, many)).outcome == "passed"
