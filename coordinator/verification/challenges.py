"""One capability challenge: question, commitment, draw, openings, check; first what is computed, then memory. Pure.

    READY ── ProverReady ──▶ COMPUTING ── commitment ──▶ OPENING ── all results ──▶ CHECKING
                                                                                       │ they are right
                    an outcome ◀── CHECKING_WALK ◀── OPENING_WALK ◀── WALKING ◀── FILLING

The clock is the coordinator's. It starts when a question is sent (`sent`), the
first one after the prover has said that it is ready, and stops when the
commitment has arrived. What was proved wrong is a failure of the node. What came
late, or not at all, is none: a machine may fall asleep, and who is too slow only
stays without a figure.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from inference.challenge import wire
from inference.challenge.commitment import Opening
from inference.challenge.compute import verify_compute
from inference.challenge.context import ChallengeContext, ProofRejected
from inference.challenge.memory_check import MemoryClaim, verify_memory
from inference.challenge.schedule import ComputePlan, DeviceClass, MemoryPlan, compute_plan, memory_plan, per_second
from protos.slackwater.node.v1 import challenge_pb2 as pb

# Python with torch and CUDA takes up to half a minute from a slow disk.
READY_DEADLINE_MS: Final = 90_000
# Of a boot's check, as a part of the full one: a second of a card and a few of a core.
QUICK_DIVISOR: Final = 4
REASON_CHARACTERS_MAX: Final = 80


@dataclass(frozen=True, slots=True)
class Ask:
    """Send this question; replies are waited for until the deadline, after which `Challenge.late` is to be called.

    Args:
        together: cards of one group are asked this at one moment.
    """

    question: pb.ChallengeQuestion
    deadline_ms: int
    together: bool = False


@dataclass(frozen=True, slots=True)
class Check:
    """Check what was opened, beside the event loop: it takes up to a second of one core."""

    verify: Callable[[bytes], None]

    def run(self, secret: bytes) -> str | None:
        """Return what is wrong, or None; `Challenge.checked` takes it.

        Args:
            secret: 32 bytes from the system's random source, drawn now, used once.
        """
        try:
            self.verify(secret)
        except ProofRejected as rejected:
            return str(rejected)
        return None


@dataclass(frozen=True, slots=True)
class Shown:
    """The node has shown that it computes so much, and where memory was asked for too, that it reaches so much of it.

    Args:
        memory_bytes: filled and walked over; 0 where none was shown.
        bytes_per_s: of that memory, on the walk.
        why_no_memory: for people; empty where memory was shown, or none was asked for.
    """

    operations_per_s: int
    memory_bytes: int = 0
    bytes_per_s: int = 0
    why_no_memory: str = ""


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


class Stage(Enum):
    READY = auto()
    COMPUTING = auto()
    OPENING = auto()
    CHECKING = auto()
    FILLING = auto()
    WALKING = auto()
    OPENING_WALK = auto()
    CHECKING_WALK = auto()


# What a node may say at each stage, besides that it refuses.
_EXPECTED: Final = {
    Stage.READY: "prover_ready",
    Stage.COMPUTING: "compute_commitment",
    Stage.OPENING: "compute_answer",
    Stage.FILLING: "memory_commitment",
    Stage.WALKING: "memory_walk_commitment",
    Stage.OPENING_WALK: "memory_opening",
}
_LATE: Final = {
    Stage.READY: "late: no prover was ready",
    Stage.COMPUTING: "late: no commitment",
    Stage.OPENING: "late: no result",
    Stage.FILLING: "late: the memory was not filled",
    Stage.WALKING: "late: the walk was not at its end",
    Stage.OPENING_WALK: "late: no states",
}


def challenge_plan(device_class: DeviceClass, *, full: bool) -> ComputePlan:
    """Return what is asked: everything at first, a part of the chains for a boot of what is known."""
    plan = compute_plan(device_class)
    if full:
        return plan
    chains = max(1, plan.size.chains // QUICK_DIVISOR)
    # The deadlines stay: they only tell machines of another kind.
    return replace(plan, size=replace(plan.size, chains=chains), drawn=min(plan.drawn, chains))


class Challenge:
    """The challenge of one card.

    Args:
        context: the nonce is fresh; boot and certificate are those that the node's connection shows now.
        memory_bytes_max: what of the memory is asked for at most, of what the node says may be filled; 0 for none.
    """

    def __init__(
        self,
        challenge_id: str,
        card_id: str,
        device_class: DeviceClass,
        context: ChallengeContext,
        plan: ComputePlan,
        memory_bytes_max: int,
    ) -> None:
        self.challenge_id = challenge_id
        self._card_id = card_id
        self._device_class = device_class
        self._context = context
        self._plan = plan
        self._memory_bytes = memory_bytes_max
        self._memory_plan: MemoryPlan | None = None
        self._stage = Stage.READY
        self._sent_at_ms = 0
        self._deadline_ms = READY_DEADLINE_MS
        self._root = b""
        self._drawn: tuple[int, ...] = ()
        self._openings: list[Opening] = []
        self._claim: MemoryClaim | None = None
        # What has been shown so far: nothing later takes it back but a false answer.
        self._shown: Shown | None = None
        self._measured = Shown(0)

    def sent(self, at_ms: int) -> None:
        """Note when a question went out, on the coordinator's clock."""
        self._sent_at_ms = at_ms

    def reply(self, reply: pb.ChallengeReply, at_ms: int, entropy: bytes) -> Command | None:
        """Take a reply of the node; None where more of them are to come.

        Args:
            at_ms: when it had arrived, on the coordinator's clock.
            entropy: 32 bytes from the system's random source, drawn after that.
        """
        kind = reply.WhichOneof("reply")
        if kind == "challenge_refusal":
            return self._not_shown(_short(f"refused: {reply.challenge_refusal.reason}"))
        if kind is None or kind != _EXPECTED.get(self._stage):
            return self._not_shown(f"{kind or 'an empty reply'} is no answer to what was asked")
        if kind == "prover_ready":
            self._memory_bytes = min(self._memory_bytes, reply.prover_ready.memory_bytes)
            return self._ask_compute()
        if getattr(reply, kind).challenge_id != self.challenge_id:
            return Refuted("replay", "an answer to another challenge")
        elapsed_ms = at_ms - self._sent_at_ms
        if self._stage is not Stage.OPENING and elapsed_ms > self._deadline_ms:
            return self.late()
        try:
            match self._stage:
                case Stage.COMPUTING:
                    return self._draw(wire.root(reply.compute_commitment.root), elapsed_ms, entropy)
                case Stage.OPENING:
                    return self._opened(reply.compute_answer)
                case Stage.FILLING:
                    return self._ask_walk(wire.root(reply.memory_commitment.fill_root), entropy)
                case Stage.WALKING:
                    return self._draw_walk(wire.root(reply.memory_walk_commitment.walk_root), elapsed_ms, entropy)
                case _:
                    return self._opened_walk(reply.memory_opening)
        except ProofRejected as rejected:
            return Refuted("proof", str(rejected))

    def late(self) -> Shown | NotShown:
        """End a challenge whose deadline is over."""
        return self._not_shown(_LATE.get(self._stage, "late"))

    def checked(self, wrong: str | None, entropy: bytes) -> Command:
        """Take what a Check found.

        Args:
            entropy: 32 bytes from the system's random source.
        """
        if wrong is not None:
            return Refuted("proof", wrong)
        self._shown = self._measured
        if self._stage is Stage.CHECKING_WALK:
            return self._shown
        return self._ask_memory(self._shown, entropy)

    # --- what is computed --------------------------------------------------------------------

    def _ask_compute(self) -> Ask:
        deadline_ms = self._plan.commitment_deadline_ms
        question = wire.compute_challenge(
            self.challenge_id, self._card_id, self._context.nonce, self._plan.size, deadline_ms
        )
        return self._ask(Stage.COMPUTING, pb.ChallengeQuestion(compute_challenge=question), deadline_ms, together=True)

    def _draw(self, root: bytes, elapsed_ms: int, entropy: bytes) -> Ask:
        self._measured = Shown(per_second(self._plan.size.operations, elapsed_ms))
        self._root = root
        self._drawn = _sample(entropy, b"chains", self._plan.size.chains, self._plan.drawn)
        draw = pb.ComputeDraw(challenge_id=self.challenge_id, chains=self._drawn)
        return self._ask(Stage.OPENING, pb.ChallengeQuestion(compute_draw=draw), self._plan.opening_deadline_ms)

    def _opened(self, answer: pb.ComputeAnswer) -> Check | None:
        self._openings += wire.results([answer])
        if len(self._openings) < len(self._drawn):
            return None
        self._stage = Stage.CHECKING
        context, size, root, drawn, openings = (
            self._context,
            self._plan.size,
            self._root,
            self._drawn,
            tuple(self._openings),
        )
        # Megabytes each, and not needed once they are checked.
        self._openings = []
        return Check(lambda secret: verify_compute(context, size, root, drawn, openings, secret))

    # --- memory ------------------------------------------------------------------------------

    def _ask_memory(self, shown: Shown, entropy: bytes) -> Ask | Shown:
        try:
            plan = memory_plan(self._device_class, self._memory_bytes, shown.operations_per_s)
        except ValueError:
            # Not one block, or an engine is on the card.
            return shown
        # The fill has a nonce of its own, drawn now: nobody fills while the products are checked.
        self._context = replace(self._context, nonce=entropy)
        self._memory_plan = plan
        question = wire.memory_challenge(
            self.challenge_id, self._card_id, self._context.nonce, plan.size, plan.fill_deadline_ms
        )
        return self._ask(Stage.FILLING, pb.ChallengeQuestion(memory_challenge=question), plan.fill_deadline_ms)

    def _ask_walk(self, fill_root: bytes, entropy: bytes) -> Ask:
        plan = self._planned()
        self._claim = MemoryClaim(fill_root, entropy, b"", (), ())
        walk = pb.MemoryWalk(challenge_id=self.challenge_id, walk_nonce=entropy, deadline_ms=plan.walk_deadline_ms)
        return self._ask(Stage.WALKING, pb.ChallengeQuestion(memory_walk=walk), plan.walk_deadline_ms)

    def _draw_walk(self, walk_root: bytes, elapsed_ms: int, entropy: bytes) -> Ask:
        plan, claim = self._planned(), self._claim
        assert claim is not None, "a walk has a fill before it"
        steps = _sample(entropy, b"steps", plan.size.steps, plan.steps_drawn)
        blocks = _sample(entropy, b"blocks", plan.size.blocks, plan.blocks_drawn)
        self._claim = replace(claim, walk_root=walk_root, steps=steps, blocks=blocks)
        self._measured = replace(
            self._measured,
            memory_bytes=plan.size.fill_bytes,
            bytes_per_s=per_second(plan.size.walk_bytes, elapsed_ms),
        )
        draw = pb.MemoryDraw(challenge_id=self.challenge_id, steps=steps, blocks=blocks)
        return self._ask(Stage.OPENING_WALK, pb.ChallengeQuestion(memory_draw=draw), plan.opening_deadline_ms)

    def _opened_walk(self, opening: pb.MemoryOpening) -> Check:
        plan, context, claim = self._planned(), self._context, self._claim
        assert claim is not None, "a walk has a fill before it"
        states, sketches = wire.memory_openings(opening, pb.MemoryDraw(steps=claim.steps, blocks=claim.blocks))
        self._stage = Stage.CHECKING_WALK
        return Check(
            lambda secret: verify_memory(
                context, plan.size, claim, states, sketches, rows=plan.rows_drawn, secret=secret
            )
        )

    # --- all of it ---------------------------------------------------------------------------

    def _ask(self, stage: Stage, question: pb.ChallengeQuestion, deadline_ms: int, *, together: bool = False) -> Ask:
        self._stage, self._deadline_ms = stage, deadline_ms
        return Ask(question, deadline_ms, together)

    def _planned(self) -> MemoryPlan:
        assert self._memory_plan is not None, "this stage follows the one that plans"
        return self._memory_plan

    def _not_shown(self, why: str) -> Shown | NotShown:
        return NotShown(why) if self._shown is None else replace(self._shown, why_no_memory=why)


def _sample(entropy: bytes, purpose: bytes, population: int, count: int) -> tuple[int, ...]:
    """Return `count` different numbers below `population`; each is drawn by 64 bits, so that none is likelier to speak
    of, and all of them from entropy alone.
    """
    stream = hashlib.shake_256(purpose + entropy).digest(8 * count)
    # The first numbers of a shuffled range, of which only what has moved is kept.
    moved: dict[int, int] = {}
    drawn = []
    for done in range(count):
        place = done + int.from_bytes(stream[8 * done : 8 * done + 8], "little") % (population - done)
        drawn.append(moved.get(place, place))
        moved[place] = moved.get(done, done)
    return tuple(drawn)


def _short(text: str) -> str:
    printable = "".join(one if one.isprintable() else " " for one in text)
    return printable[:REASON_CHARACTERS_MAX]
