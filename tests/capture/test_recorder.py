"""The recorder of the calls of a rollout; most of it is tested through the proxy."""

from paddock.capture.recorder import fingerprint_messages


def test_the_same_messages_have_the_same_fingerprint_in_any_key_order() -> None:
    assert fingerprint_messages([{"a": 1, "b": 2}]) == fingerprint_messages([{"b": 2, "a": 1}])
    assert fingerprint_messages([{"a": 1}]) != fingerprint_messages([{"a": 2}])
