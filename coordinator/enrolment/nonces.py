"""Server nonces of enrolments and renewals: each good once, for two minutes, for one subject.

Held in memory only: after a restart a machine asks for another. Pure: time and
random bytes are handed in.
"""

from collections import OrderedDict
from dataclasses import dataclass

NONCE_BYTES = 32
# A key, a CSR and one round trip take a second; two minutes also serve a machine that swaps.
NONCE_LIFETIME_MS = 120_000
# About 1 MB. The oldest goes first, so that a flood costs an honest machine one more try at most
# while the rate limit of the RPC keeps the flood below this many in two minutes.
NONCES_MAX = 4096


@dataclass(frozen=True, slots=True)
class _Issued:
    purpose: str
    subject: str
    expires_at_ms: int


class NonceBook:
    """Not thread-safe; its owner holds a lock."""

    def __init__(self) -> None:
        self._issued: OrderedDict[bytes, _Issued] = OrderedDict()

    def issue(self, nonce: bytes, purpose: str, subject: str, now_ms: int) -> None:
        """Note a fresh nonce, for example for ("enrolment", token id)."""
        self._drop_expired(now_ms)
        if len(self._issued) >= NONCES_MAX:
            self._issued.popitem(last=False)
        self._issued[nonce] = _Issued(purpose, subject, now_ms + NONCE_LIFETIME_MS)

    def take(self, nonce: bytes, purpose: str, subject: str, now_ms: int) -> bool:
        """Return whether the nonce is good for this; it is used up either way."""
        issued = self._issued.pop(nonce, None)
        return (
            issued is not None
            and issued.purpose == purpose
            and issued.subject == subject
            and now_ms < issued.expires_at_ms
        )

    def _drop_expired(self, now_ms: int) -> None:
        # All live equally long, so the oldest expires first.
        while self._issued and next(iter(self._issued.values())).expires_at_ms <= now_ms:
            self._issued.popitem(last=False)
