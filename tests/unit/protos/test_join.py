"""Join strings: whole, cut off at every character, and garbage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos import join

WHOLE = join.JoinString(
    host="coordinator.example",
    port=7443,
    token_id="4f1d0c9a5b7e2386",
    token_secret=join.format_secret(bytes(range(32))),
    ca_pin=bytes(32),
)


@given(
    host=st.sampled_from(["localhost", "10.0.0.1", "a-b.example", "::1", "2001:db8::7"]),
    port=st.integers(1, 65535),
    secret=st.binary(min_size=16, max_size=64),
    pin=st.binary(min_size=32, max_size=32),
)
def test_what_is_encoded_is_decoded_again(host: str, port: int, secret: bytes, pin: bytes) -> None:
    # Mutation seen to fail: the brackets of an IPv6 address left out in `address`.
    one = join.JoinString(
        host=host, port=port, token_id="0123456789abcdef", token_secret=join.format_secret(secret), ca_pin=pin
    )
    assert join.decode(f"  {one.encode()}\n") == one


def test_every_shortened_string_is_refused() -> None:
    # Mutation seen to fail: `match` instead of `fullmatch` for the pin together with {1,64} digits.
    text = WHOLE.encode()
    for length in range(len(text)):
        with pytest.raises(ValueError, match="join string"):
            join.decode(text[:length])


@given(st.text(max_size=200))
def test_garbage_is_refused_with_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="join string"):
        join.decode("slackwater://" + text)


@pytest.mark.parametrize(
    "change",
    [
        ("slackwater://", "https://"),
        (":7443", ""),
        (":7443", ":0"),
        (":7443", ":70000"),
        ("slackwater://", "slackwater://user@"),
        ("sha256", "md5"),
        ("ca=", "ca=&ca="),
        ("?ca", "#ca"),
        (WHOLE.token_secret, "c2hvcnQ"),
        (WHOLE.token_secret, "!" * 43),
    ],
)
def test_an_altered_part_is_refused(change: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="join string"):
        join.decode(WHOLE.encode().replace(*change))


def test_a_refusal_and_a_repr_keep_the_secret() -> None:
    # Mutation seen to fail: `field(repr=False)` taken from the secret.
    assert WHOLE.token_secret not in repr(WHOLE)
    with pytest.raises(ValueError, match="copied whole") as refusal:
        join.decode(WHOLE.encode().replace("sha256", "sha1"))
    assert WHOLE.token_secret not in str(refusal.value)
