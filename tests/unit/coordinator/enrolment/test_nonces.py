"""Server nonces: once, in time, for one purpose and subject."""

from coordinator.enrolment.nonces import NONCE_LIFETIME_MS, NONCES_MAX, NonceBook


def test_a_nonce_is_good_once() -> None:
    # Mutation seen to fail: `get` instead of `pop`.
    book = NonceBook()
    book.issue(b"n", "enrolment", "token", 0)
    assert book.take(b"n", "enrolment", "token", 1)
    assert not book.take(b"n", "enrolment", "token", 1)


def test_a_nonce_is_good_for_its_purpose_and_subject_and_spent_by_a_wrong_one() -> None:
    # Mutation seen to fail: the comparison of purposes left out.
    for purpose, subject in [("renewal", "token"), ("enrolment", "other")]:
        book = NonceBook()
        book.issue(b"n", "enrolment", "token", 0)
        assert not book.take(b"n", purpose, subject, 1)
        assert not book.take(b"n", "enrolment", "token", 1)


def test_a_nonce_expires() -> None:
    # Mutation seen to fail: <= instead of <.
    book = NonceBook()
    book.issue(b"n", "enrolment", "token", 0)
    book.issue(b"m", "enrolment", "token", 1)
    assert not book.take(b"n", "enrolment", "token", NONCE_LIFETIME_MS)
    assert book.take(b"m", "enrolment", "token", NONCE_LIFETIME_MS)


def test_a_flood_is_bounded_and_drops_the_oldest() -> None:
    # Mutation seen to fail: `popitem(last=True)`.
    book = NonceBook()
    for number in range(NONCES_MAX + 1):
        book.issue(str(number).encode(), "enrolment", "token", 0)
    assert not book.take(b"0", "enrolment", "token", 1)
    assert book.take(b"1", "enrolment", "token", 1)
    assert book.take(str(NONCES_MAX).encode(), "enrolment", "token", 1)


def test_expired_nonces_make_room() -> None:
    book = NonceBook()
    for number in range(NONCES_MAX):
        book.issue(str(number).encode(), "enrolment", "token", 0)
    book.issue(b"late", "enrolment", "token", NONCE_LIFETIME_MS)
    assert len(book._issued) == 1
