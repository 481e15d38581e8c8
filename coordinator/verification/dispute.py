"""Two of three: an accusation stands when a second verifier repeats it, and falls when two deny it. Pure."""

from dataclasses import dataclass, replace
from enum import Enum

# Both sides reach two with the third vote.
VOTES_DECIDING = 2
# Verifiers that were asked and could not measure; beyond it nobody can, and the accusation is dropped.
REQUESTS_MAX = 5


class Outcome(Enum):
    OPEN = "open"
    CONFIRMED = "confirmed"
    OVERTURNED = "overturned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispute:
    """One audit that accuses a node, and who repeated it with which result.

    Args:
        hard: the hard rule that was broken; empty where the evidence alone accuses.
        log_m_before: the pair's evidence before this audit, which is what is left when the accusation falls.
        votes: each verifier once, the accuser first; true speaks against the node.
        requests: how many times a further verifier was asked.
    """

    audit_id: str
    kind: str
    hard: str
    log_m_before: float
    votes: tuple[tuple[str, bool], ...]
    requests: int = 1

    @property
    def verifiers(self) -> frozenset[str]:
        return frozenset(verifier for verifier, _ in self.votes)

    @property
    def outcome(self) -> Outcome:
        against = sum(vote for _, vote in self.votes)
        if against >= VOTES_DECIDING:
            return Outcome.CONFIRMED
        return Outcome.OVERTURNED if len(self.votes) - against >= VOTES_DECIDING else Outcome.OPEN

    def vote(self, verifier: str, against: bool) -> "Dispute":
        """Return the dispute with one vote more; a second vote of one verifier does not count."""
        if verifier in self.verifiers or self.outcome is not Outcome.OPEN:
            return self
        return replace(self, votes=(*self.votes, (verifier, against)), requests=self.requests + 1)

    def not_measured(self) -> "Dispute | None":
        """Return the dispute with one more request, or None where it is given up."""
        return None if self.requests >= REQUESTS_MAX else replace(self, requests=self.requests + 1)
