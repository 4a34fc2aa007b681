import pytest
from hypothesis import given
from hypothesis import strategies as st

from paddock.protocol.redact import MASK, describe_error, redact

SECRETS = [
    "password=hunter2",
    "password: hunter2",
    "PASSWORD = hunter2",
    "db_password='hunter2 and more'",
    '{"password": "hunter2"}',
    "{'api_key': 'hunter2'}",
    "api-key=hunter2",
    "OPENAI_API_KEY=hunter2",
    "client_secret=hunter2",
    "access_token=hunter2&x=1",
    "credentials=hunter2",
    "postgres://user:hunter2@db.example/x",
    "redis://:hunter2@cache:6379/0",
    "Authorization: Bearer hunter2hunter2",
    "Authorization: Basic aHVudGVyMg==hunter2",
    "sk-hunter2hunter2hunter2",
    "hf_hunter2hunter2hunter2",
    "ghp_hunter2hunter2hunter2",
    "github_pat_hunter2hunter2hunter2",
    "passphrase=hunter2",
    "private_key=hunter2",
]


@pytest.mark.parametrize("text", SECRETS)
def test_a_secret_is_masked(text: str) -> None:
    redacted = redact(f"cannot log in: {text}")
    assert "hunter2" not in redacted
    assert MASK in redacted
    assert redacted.startswith("cannot log in")


@pytest.mark.parametrize(
    "text",
    [
        "amount must be above 0",
        "file not found: /data/input.csv",
        "KeyError: 'token'",
        "https://example.org/a:b",
        "x=1",
    ],
)
def test_plain_text_passes(text: str) -> None:
    assert redact(text) == text


def test_a_known_secret_is_masked_anywhere() -> None:
    assert redact("got abc123 here", ("abc123",)) == f"got {MASK} here"


def test_an_empty_secret_masks_nothing() -> None:
    assert redact("text", ("",)) == "text"


@given(st.text(max_size=200))
def test_any_text_can_be_redacted(text: str) -> None:
    assert isinstance(redact(text), str)


def test_long_text_is_redacted_in_no_time() -> None:
    assert redact("a" * 200_000 + "=") is not None
    assert redact("password" * 20_000) is not None


@pytest.mark.parametrize(
    "secret",
    [
        "AKIAIOSFODNN7EXAMPLE",
        "gsk_0123456789abcdefghij",
        "AIzaSyA0123456789abcdefghijklmnopqrstuv",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123",
    ],
)
def test_keys_are_known_by_their_beginning(secret: str) -> None:
    assert redact(f"refused {secret} today") == f"refused {MASK} today"


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: ApiKey abcdef123456", "abcdef123456"),
        ("{'authorization': 'abcdef123456'}", "abcdef123456"),
        ("Bearer ab:cd:efgh", "ab:cd:efgh"),
        ('Bearer "abcdefgh"', "abcdefgh"),
        ("GET https://example.com/v1?key=abcdef123 failed", "abcdef123"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIabc\n-----END RSA PRIVATE KEY-----", "MIIabc"),
    ],
)
def test_a_value_named_like_a_credential_is_masked(text: str, secret: str) -> None:
    assert secret not in redact(text)


def test_an_exception_that_cannot_speak_is_named() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert describe_error(Silent()) == "Silent"
    assert describe_error(ValueError("token=abc123")) == f"ValueError: token={MASK}"


@pytest.mark.parametrize(
    "text",
    [
        "Send 'Authorization: Bearer KEY' (FLEET_API_KEY).",
        "send 'Authorization: Bearer TOKEN' (Client(url, token=...)",
        "send it as a bearer token",
    ],
)
def test_words_about_credentials_are_not_masked(text: str) -> None:
    redacted = redact(text)
    assert redacted == text or redacted == text.replace("token=...)", f"token={MASK}")


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer abc",
        "Authorization: abcdef failed",
        "Authorization: KEY-abc",
        "authorization='Basic YTpi'",
    ],
)
def test_a_header_is_masked_as_a_whole_or_not_at_all(header: str) -> None:
    redacted = redact(header)
    assert MASK in redacted
    assert not any(piece in redacted for piece in ("abc", "YTpi"))
