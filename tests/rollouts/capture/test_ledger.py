"""What a ledger says of the calls it was given."""

from paddock.rollouts.capture.ledger import fingerprint


def test_the_same_messages_have_the_same_fingerprint_in_any_order_of_keys() -> None:
    assert fingerprint([{"a": 1, "b": 2}]) == fingerprint([{"b": 2, "a": 1}])
    assert fingerprint([{"a": 1}]) != fingerprint([{"a": 2}])
