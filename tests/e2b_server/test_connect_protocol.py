"""Messages of the Connect protocol."""

import struct

import pytest

from paddock.e2b_server.connect_protocol import ConnectError, Envelopes, envelope, last_envelope, parse, timeout_of


def test_messages_are_found_however_they_are_cut() -> None:
    data = envelope({"a": 1}) + envelope({"ü": [2]}) + last_envelope()
    envelopes = Envelopes()
    messages = [message for byte in data for message in envelopes.add(bytes([byte]))]
    assert messages == [{"a": 1}, {"ü": [2]}]


def test_the_last_envelope_says_how_it_ended() -> None:
    good, bad = last_envelope(), last_envelope(ConnectError("not_found", "gone"))
    assert good == b"\x02\x00\x00\x00\x02{}"
    assert bad[0] == 2
    assert parse(bad[5:]) == {"error": {"code": "not_found", "message": "gone"}}


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (struct.pack(">BI", 1, 2) + b"{}", "unimplemented"),
        (struct.pack(">BI", 0, 1 << 31), "resource_exhausted"),
        (struct.pack(">BI", 0, 3) + b"nix", "invalid_argument"),
        (struct.pack(">BI", 0, 2) + b"[]", "invalid_argument"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, code: str) -> None:
    with pytest.raises(ConnectError) as caught:
        Envelopes().add(data)
    assert caught.value.code == code


def test_a_deadline_is_in_milliseconds() -> None:
    assert timeout_of("1500") == 1.5
    assert timeout_of(None) is timeout_of("0") is None
    for wrong in ("-5", "soon", "१"):
        with pytest.raises(ConnectError):
            timeout_of(wrong)


def test_codes_have_the_status_that_the_protocol_gives_them() -> None:
    statuses = {
        code: ConnectError(code, "").status for code in ("not_found", "unauthenticated", "unimplemented", "odd")
    }
    assert statuses == {"not_found": 404, "unauthenticated": 401, "unimplemented": 501, "odd": 500}
