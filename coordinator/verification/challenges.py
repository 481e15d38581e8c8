"""One capability challenge: question, commitment, draw, openings, check. Pure.

    waiting ── ProverReady ──▶ computing ── commitment in time ──▶ opening ── all results ──▶ checking ──▶ an outcome

The clock is the coordinator's. It starts when the question is sent, which is after
the prover has said that it is ready, and stops when the commitment has arrived.
What was proved wrong is a failure of the node. What came late, or not at all, is
none: a machine may fall asleep, and who is too slow only stays without a figure.
"""

import random
from dataclasses import dataclass, replace
from typing import Final

from inference.challenge import wire
from inference.challenge.commitment import Opening
from inference.challenge.compute import ComputeSize, verify_compute
from inference.challenge.context import ChallengeContext, ProofRejected
from inference.challenge.schedule import ComputePlan, DeviceClass, compute_plan, per_second
from protos.slackwater.node.v1 import challenge_pb2 as pb

# Python with torch and CUDA takes up to half a minute from a slow disk.
READY_DEADLINE_MS: Final = 90_000
# Of a boot's check, as a part of the full one: a second of a card and a few of a core.
QUICK_DIVISOR: Final = 4
REASON_CHARACTERS_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this question; replies are waited for until the deadline, after which `Challenge.late` is to be called."""

    question: pb.ChallengeQuestion
    deadline_ms: int


@dataclass(frozen=True, slots=True)
class Check:
    """Check what was opened, beside the event loop: it takes up to a second of one core."""

    context: ChallengeContext
    size: ComputeSize
    root: bytes
    drawn: tuple[int, ...]
    openings: tuple[Opening, ...]
    operations_per_s: int

    def run(self, secret: bytes) -> "Shown | Refuted":
        """Args: `secret` is 32 bytes from the system's random source, drawn now, used once."""
        try:
            verify_compute(self.context, self.size, self.root, self.drawn, self.openings, secret)
        except ProofRejected as rejected:
            return Refuted("proof", str(rejected))
        return Shown(self.operations_per_s)


@dataclass(frozen=True, slots=True)
class Shown:
    """The node has shown that it computes so much."""

    operations_per_s: int


@dataclass(frozen=True, slots=True)
class Refuted:
    """The answer is false. Args: `rule` is the hard rule's name."""

    rule: str
    why: str


@dataclass(frozen=True, slots=True)
class NotShown:
    """Nothing was found, for the node or against it."""

    why: str


Outcome = Shown | Refuted | NotShown
Command = Ask | Check | Outcome


def challenge_plan(device_class: DeviceClass, *, full: bool) -> ComputePlan:
    """Return what is asked: everything at first, a part of the chains for a boot of what is known."""
    plan = compute_plan(device_class)
    if full:
        return plan
    chains = max(1, plan.size.chains // QUICK_DIVISOR)
    # The deadlines stay: they only tell machines of another kind.
    return replace(plan, size=replace(plan.size, chains=chains), drawn=min(plan.drawn, chains))


class Challenge:
    """The compute challenge of one card.

    Args:
        context: the nonce is fresh; boot and certificate are those that the node's connection shows now.
    """

    def __init__(self, challenge_id: str, card_id: str, context: ChallengeContext, plan: ComputePlan) -> None:
        self.challenge_id = challenge_id
        self._card_id = card_id
        self._context = context
        self._plan = plan
        self._asked_at_ms: int | None = None
        self._elapsed_ms = 0
        self._root = b""
        self._drawn: tuple[int, ...] = ()
        self._openings: list[Opening] = []

    def reply(self, reply: pb.ChallengeReply, at_ms: int, entropy: bytes) -> Command | None:
        """Take a reply of the node; None where more of them are to come.

        Args:
            at_ms: when it had arrived, on the coordinator's clock.
            entropy: 32 bytes from the system's random source, drawn after that.
        """
        kind = reply.WhichOneof("reply")
        match kind:
            case "challenge_refusal":
                return NotShown(_short(f"refused: {reply.challenge_refusal.reason}"))
            case "prover_ready" if self._asked_at_ms is None:
                return self._ask(at_ms)
            case "compute_commitment" if self._asked_at_ms is not None and not self._drawn:
                return self._draw(reply.compute_commitment, at_ms - self._asked_at_ms, entropy)
            case "compute_answer" if self._drawn:
                return self._opened(reply.compute_answer)
            case _:
                return NotShown(f"{kind or 'an empty reply'} is no answer to what was asked")

    def late(self) -> NotShown:
        """End a challenge whose deadline is over."""
        if self._asked_at_ms is None:
            return NotShown("late: no prover was ready")
        return NotShown("late: no result" if self._drawn else "late: no commitment")

    def _ask(self, at_ms: int) -> Ask:
        self._asked_at_ms = at_ms
        deadline_ms = self._plan.commitment_deadline_ms
        question = wire.compute_challenge(
            self.challenge_id, self._card_id, self._context.nonce, self._plan.size, deadline_ms
        )
        return Ask(pb.ChallengeQuestion(compute_challenge=question), deadline_ms)

    def _draw(self, commitment: pb.ComputeCommitment, elapsed_ms: int, entropy: bytes) -> Command:
        if commitment.challenge_id != self.challenge_id:
            return Refuted("replay", "a commitment to another challenge")
        if elapsed_ms > self._plan.commitment_deadline_ms:
            return self.late()
        self._elapsed_ms = elapsed_ms
        self._root = commitment.root
        drawn = random.Random(entropy).sample(range(self._plan.size.chains), self._plan.drawn)
        self._drawn = tuple(drawn)
        draw = pb.ComputeDraw(challenge_id=self.challenge_id, chains=drawn)
        return Ask(pb.ChallengeQuestion(compute_draw=draw), self._plan.opening_deadline_ms)

    def _opened(self, answer: pb.ComputeAnswer) -> Command | None:
        if answer.challenge_id != self.challenge_id:
            return Refuted("replay", "a result of another challenge")
        result = answer.result
        self._openings.append(Opening(result.index, result.content, tuple(result.proof)))
        if len(self._openings) < len(self._drawn):
            return None
        speed = per_second(self._plan.size.operations, self._elapsed_ms)
        return Check(self._context, self._plan.size, self._root, self._drawn, tuple(self._openings), speed)


def _short(text: str) -> str:
    printable = "".join(one if one.isprintable() else " " for one in text)
    return printable[:REASON_CHARACTERS_MAX]
