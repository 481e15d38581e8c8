"""Capability challenges as the agent's decisions see them: one at a time, on a card that is lent and idle. Pure.

Work goes first. A prover is killed as soon as an order comes in, and the order is taken at once, so that no user waits
for a challenge: the coordinator asks again later. That a busy node so stays without a figure costs it nothing but that.
"""

from collections.abc import Set

from agent import events as e
from agent.owner.events import CPU_CARD
from agent.owner.lending import Lending


class Challenges:
    """The challenge that is being answered, if one is."""

    def __init__(self, lending: Lending) -> None:
        self._lending = lending
        self._challenge_id = ""
        self._card = ""

    def asked(
        self, event: e.ChallengeAsked, *, working: bool, draining: bool, closed: str | None, held: Set[str]
    ) -> list[e.Command]:
        """Take a challenge up, or say why not.

        Args:
            working: whether attempts run; a user's answer comes first.
            closed: why the owner consents to no work at this hour; None where he does.
            held: the cards that engines are on.
        """
        card = event.card_id or CPU_CARD
        refusal = ""
        if self._challenge_id:
            refusal = "busy: another challenge is being answered"
        elif draining:
            refusal = "this node takes no work now"
        elif not self._lending.lent(card):
            refusal = "not lent: the owner has the card, or there is none of that name"
        elif closed is not None:
            refusal = f"outside of the owner's consent: {closed}"
        elif working:
            refusal = "busy: attempts are running"
        else:
            self._challenge_id, self._card = event.challenge_id, card
        return [e.AnswerChallenge(event.challenge_id, event.card_id, refusal, card not in held)]

    def ended(self, event: e.ChallengeEnded) -> None:
        """Note that the prover of a challenge is gone; only then the next one is taken up."""
        if event.challenge_id == self._challenge_id:
            self._challenge_id = self._card = ""

    def withdrawn(self, card: str) -> list[e.Command]:
        """The owner wants a card: what is computed on it ends at once."""
        return self.stop("the owner wants the card") if self._challenge_id and card == self._card else []

    def stop(self, reason: str) -> list[e.Command]:
        return [e.StopChallenge(reason)] if self._challenge_id else []
