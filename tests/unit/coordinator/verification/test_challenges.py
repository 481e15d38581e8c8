"""One challenge, driven with a real prover: the honest whole, and every answer that is none."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.verification.challenges import (
    QUICK_DIVISOR,
    REASON_CHARACTERS_MAX,
    Ask,
    Challenge,
    Check,
    Command,
    NotShown,
    Outcome,
    Refuted,
    Shown,
    challenge_plan,
)
from inference.challenge import schedule, wire
from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.expansion import Residues
from inference.challenge.prover import ProverSession
from inference.challenge.schedule import ComputePlan, DeviceClass, compute_plan, per_second
from inference.challenge.testing import COMPUTE_SIZE, CONTEXT, OTHERS, SECRET, ForgetfulArithmetic, computed, opened
from protos.slackwater.node.v1 import challenge_pb2 as pb

ID = "challenge-1"
COLUMNS, BLOCKS, STEPS = 64, 24, 63
# What 24 blocks are nine tenths of.
MEMORY_BYTES = -(-BLOCKS * COLUMNS**2 * 100 // 90)
PLAN = ComputePlan(size=COMPUTE_SIZE, drawn=3, commitment_deadline_ms=5_000, opening_deadline_ms=7_000)
TOOK_MS = 250

# Where a challenge may stand: at its start, after each question, and while a proof is checked.
START, CHECKING, CHECKING_WALK = "start", "checking", "checking_walk"
COMPUTING, OPENING = "compute_challenge", "compute_draw"
FILLING, WALKING, OPENING_WALK = "memory_challenge", "memory_walk", "memory_draw"
EXPECTED = {
    START: "prover_ready",
    COMPUTING: "compute_commitment",
    OPENING: "compute_answer",
    FILLING: "memory_commitment",
    WALKING: "memory_walk_commitment",
    OPENING_WALK: "memory_opening",
}
ROOT_OF = {COMPUTING: "root", FILLING: "fill_root", WALKING: "walk_root"}
ASKED = [COMPUTING, OPENING, FILLING, WALKING, OPENING_WALK]
# Where the compute part is shown already: it stays so, whatever becomes of the memory.
AFTER_COMPUTE = [FILLING, WALKING, OPENING_WALK, CHECKING_WALK]
REPLIES = {
    "prover_ready": pb.ChallengeReply(prover_ready=pb.ProverReady()),
    "compute_commitment": pb.ChallengeReply(compute_commitment=pb.ComputeCommitment(challenge_id=ID)),
    "compute_answer": pb.ChallengeReply(compute_answer=pb.ComputeAnswer(challenge_id=ID)),
    "memory_commitment": pb.ChallengeReply(memory_commitment=pb.MemoryCommitment(challenge_id=ID)),
    "memory_walk_commitment": pb.ChallengeReply(memory_walk_commitment=pb.MemoryWalkCommitment(challenge_id=ID)),
    "memory_opening": pb.ChallengeReply(memory_opening=pb.MemoryOpening(challenge_id=ID)),
    "an empty reply": pb.ChallengeReply(),
}
FIGURE = Shown(per_second(COMPUTE_SIZE.operations, TOOK_MS))


@pytest.fixture(autouse=True, scope="module")
def small_walks() -> Iterator[None]:
    """Ask of a processor a walk that takes a few milliseconds."""
    with pytest.MonkeyPatch.context() as patching:
        shape = schedule._WalkShape(COLUMNS, 3, STEPS, steps_drawn=8, blocks_drawn=4, rows_drawn=4)
        patching.setitem(schedule._WALKS, DeviceClass.CPU, shape)
        yield


class Played:
    """A challenge, the prover that answers it, and the coordinator's clock, on which every answer takes 250 ms."""

    def __init__(
        self,
        *,
        arithmetic: NumpyArithmetic | None = None,
        boot_id: str = CONTEXT.boot_id,
        memory_bytes_max: int = MEMORY_BYTES,
        memory_bytes_said: int = 1 << 40,
    ) -> None:
        self.challenge = Challenge(ID, "card", DeviceClass.CPU, CONTEXT, PLAN, memory_bytes_max)
        self.prover: ProverSession[Residues] = ProverSession(
            CONTEXT.node_id, boot_id, CONTEXT.certificate_sha256, arithmetic or NumpyArithmetic()
        )
        ready = pb.ProverReady(arithmetic="numpy", memory_bytes=memory_bytes_said)
        self.pending = [pb.ChallengeReply(prover_ready=ready)]
        self.now_ms = 1_000_000
        self.asks: list[Ask] = []
        self.check: Check | None = None
        self.outcome: Outcome | None = None
        self._entropies = 0

    @property
    def at(self) -> str:
        if self.check is not None:
            return CHECKING_WALK if self.asks[-1].question.WhichOneof("question") == OPENING_WALK else CHECKING
        return self.asks[-1].question.WhichOneof("question") or "" if self.asks else START

    def entropy(self) -> bytes:
        self._entropies += 1
        return hashlib.sha256(b"drawn %d" % self._entropies).digest()

    def take(self, reply: pb.ChallengeReply, took_ms: int = 0) -> Command | None:
        """Give a reply to the challenge."""
        self.now_ms += took_ms
        return self._went(self.challenge.reply(reply, self.now_ms, self.entropy()))

    def checked(self) -> Command | None:
        assert self.check is not None
        wrong = self.check.run(SECRET)
        self.check = None
        return self._went(self.challenge.checked(wrong, self.entropy()))

    def _went(self, command: Command | None) -> Command | None:
        if isinstance(command, Ask):
            self.asks.append(command)
            self.challenge.sent(self.now_ms)
            self.pending = list(self.prover.replies(command.question))
        elif isinstance(command, Check):
            self.check = command
        elif command is not None:
            self.outcome = command
        return command

    def go(self, until: str = "the end") -> "Played":
        """Answer honestly up to a place, or to the outcome."""
        while self.outcome is None and self.at != until:
            if self.check is not None:
                self.checked()
            else:
                self.take(self.pending.pop(0), TOOK_MS)
        assert until in (self.at, "the end")
        return self


def test_an_honest_prover_is_shown_by_the_coordinators_clock() -> None:
    """Mutations: the clock starts at the first question only; the walk's time counts twice."""
    played = Played().go()
    asked = [ask.question.WhichOneof("question") for ask in played.asks]
    assert asked == ASKED
    walk_bytes = STEPS * 3 * COLUMNS**2
    assert played.outcome == Shown(FIGURE.operations_per_s, BLOCKS * COLUMNS**2, per_second(walk_bytes, TOOK_MS))
    # Only the first question waits for the others of a barrier.
    assert [ask.together for ask in played.asks] == [True, False, False, False, False]


@pytest.mark.parametrize("took_ms", [0, 1, 5_000])
def test_who_takes_longer_computes_less(took_ms: int) -> None:
    """Mutation: a time of nothing divides by zero."""
    played = Played(memory_bytes_max=0).go(COMPUTING)
    played.take(played.pending.pop(0), took_ms)
    assert played.go().outcome == Shown(COMPUTE_SIZE.operations * 1000 // max(took_ms, 1))


def test_the_drawn_chains_are_other_ones_for_other_entropy() -> None:
    """Mutation: the draw is seeded by the root, which the prover has chosen."""
    draws = []
    for entropy in (b"a" * 32, b"b" * 32, b"c" * 32):
        played = Played().go(COMPUTING)
        ask = played.challenge.reply(played.pending.pop(), played.now_ms, entropy)
        assert isinstance(ask, Ask)
        draws.append(tuple(ask.question.compute_draw.chains))
        assert len(set(draws[-1])) == PLAN.drawn
    assert len(set(draws)) > 1


@pytest.mark.parametrize("drawn", [1, 3, COMPUTE_SIZE.chains])
def test_chains_are_drawn_once_each_and_all_of_them_equally_often(drawn: int) -> None:
    """Mutations: a chain is drawn twice; the last one is never drawn; what has moved is drawn from where it was."""
    counts = Counter[int]()
    for number in range(1_000):
        challenge = Challenge(ID, "card", DeviceClass.CPU, CONTEXT, replace(PLAN, drawn=drawn), 0)
        challenge.reply(pb.ChallengeReply(prover_ready=pb.ProverReady()), 0, b"")
        commitment = pb.ComputeCommitment(challenge_id=ID, root=bytes(32))
        ask = challenge.reply(
            pb.ChallengeReply(compute_commitment=commitment), 0, hashlib.sha256(b"%d" % number).digest()
        )
        assert isinstance(ask, Ask)
        chains = list(ask.question.compute_draw.chains)
        assert len(set(chains)) == drawn
        counts.update(chains)
    assert set(counts) == set(range(COMPUTE_SIZE.chains))
    expected = 1_000 * drawn / COMPUTE_SIZE.chains
    # Four standard deviations of a binomial draw.
    assert all(abs(count - expected) <= 4 * expected**0.5 for count in counts.values())


def _is_no_verdict(outcome: Command | None, at: str, why: str) -> None:
    expected = replace(FIGURE, why_no_memory=why) if at in AFTER_COMPUTE else NotShown(why)
    assert outcome == expected


@pytest.mark.parametrize("kind", REPLIES)
@pytest.mark.parametrize("at", [*EXPECTED, CHECKING, CHECKING_WALK])
def test_a_reply_out_of_turn_ends_without_a_verdict(at: str, kind: str) -> None:
    """Mutation: what is not expected is Refuted, or what stage it is has no say."""
    played = Played().go(at)
    if kind == EXPECTED.get(at):
        return
    _is_no_verdict(played.take(REPLIES[kind]), at, f"{kind} is no answer to what was asked")


@pytest.mark.parametrize("at", [*EXPECTED, CHECKING, CHECKING_WALK])
def test_a_refusal_ends_without_a_verdict_and_its_reason_is_short_and_printable(at: str) -> None:
    """Mutations: the reason is not cut; control characters stay in it."""
    refusal = pb.ChallengeRefusal(challenge_id=ID, reason="\x1b[2Jbusy\n\u202e" + "x" * 10_000)
    outcome = Played().go(at).take(pb.ChallengeReply(challenge_refusal=refusal))
    why = ("refused:  [2Jbusy  " + "x" * 10_000)[:REASON_CHARACTERS_MAX]
    _is_no_verdict(outcome, at, why)
    assert why.isprintable()


@pytest.mark.parametrize("at", ASKED)
def test_an_answer_to_another_challenge_is_a_replay(at: str) -> None:
    """Mutation: the id is compared in the commitment only."""
    played = Played().go(at)
    reply = played.pending[0]
    getattr(reply, EXPECTED[at]).challenge_id = "challenge-0"
    outcome = played.take(reply, TOOK_MS)
    assert isinstance(outcome, Refuted)
    assert outcome.rule == "replay"


@pytest.mark.parametrize("at", [*EXPECTED, CHECKING, CHECKING_WALK])
def test_a_deadline_that_is_over_ends_without_a_verdict(at: str) -> None:
    """Mutation: a late walk takes back what was computed."""
    outcome = Played().go(at).challenge.late()
    assert isinstance(outcome, Shown if at in AFTER_COMPUTE else NotShown)
    why = outcome.why_no_memory if isinstance(outcome, Shown) else outcome.why
    _is_no_verdict(outcome, at, why)
    assert why.startswith("late")


@pytest.mark.parametrize("at", [COMPUTING, FILLING, WALKING, OPENING_WALK])
def test_a_reply_counts_at_its_deadline_and_not_a_millisecond_later(at: str) -> None:
    """Mutations: >= for >; the deadline of the question before counts."""
    in_time, late = Played().go(at), Played().go(at)
    in_time.take(in_time.pending.pop(0), in_time.asks[-1].deadline_ms)
    assert in_time.outcome is None
    late.take(late.pending.pop(0), late.asks[-1].deadline_ms + 1)
    assert isinstance(late.outcome, Shown if at in AFTER_COMPUTE else NotShown)


def test_results_arrive_one_after_the_other_for_as_long_as_the_driver_waits() -> None:
    """Mutation: the deadline of the draw counts for each of the results that follow."""
    played = Played().go(OPENING)
    first, second, third = played.pending
    assert played.take(first, PLAN.opening_deadline_ms) is None
    assert played.take(second, PLAN.opening_deadline_ms) is None
    assert isinstance(played.take(third, PLAN.opening_deadline_ms), Check)


def _false_results(played: Played) -> list[pb.ChallengeReply]:
    """Return commitment and openings of results with one entry wrong in each chain."""
    nonce = played.asks[-1].question.compute_challenge.nonce
    contents = [bytes([(one[0] + 1) % 100]) + one[1:] for one in computed(replace(CONTEXT, nonce=nonce))]
    root, _ = opened(contents, [])
    commitment = pb.ChallengeReply(compute_commitment=pb.ComputeCommitment(challenge_id=ID, root=root))
    ask = played.take(commitment, TOOK_MS)
    assert isinstance(ask, Ask)
    _, openings = opened(contents, ask.question.compute_draw.chains)
    return [pb.ChallengeReply(compute_answer=one) for one in wire.compute_answers(ID, openings)]


def test_a_false_result_is_refuted_though_it_was_committed_to() -> None:
    """Mutation: `checked` goes on to the memory whatever the check has found."""
    played = Played().go(COMPUTING)
    played.pending = _false_results(played)
    outcome = played.go().outcome
    assert isinstance(outcome, Refuted)
    assert outcome.rule == "proof"
    assert "results" in outcome.why or "chain" in outcome.why


@pytest.mark.parametrize("boot_id", [OTHERS["boot"].boot_id, ""])
def test_an_answer_of_another_boot_is_refuted(boot_id: str) -> None:
    """Mutation: the boot is no part of what an answer is bound to."""
    outcome = Played(boot_id=boot_id).go().outcome
    assert isinstance(outcome, Refuted)
    assert outcome.rule == "proof"


@pytest.mark.parametrize("repeated", [0, 1, 2])
def test_one_result_for_every_one_that_was_drawn_is_refuted(repeated: int) -> None:
    """Mutation: the chains that are checked are those that the openings name."""
    played = Played().go(OPENING)
    played.pending = [played.pending[repeated]] * PLAN.drawn
    assert isinstance(played.go().outcome, Refuted)


def test_a_false_state_is_refuted_and_takes_back_what_was_computed() -> None:
    """Mutation: `checked` heeds what is wrong with the products only."""
    outcome = Played(arithmetic=ForgetfulArithmetic(range(BLOCKS))).go().outcome
    assert isinstance(outcome, Refuted)
    assert outcome.rule == "proof"
    assert "walk" in outcome.why


@pytest.mark.parametrize(
    ("most", "said", "blocks"),
    [(0, 1 << 40, 0), (1 << 40, 0, 0), (4_551, 1 << 40, 0), (4_552, 1 << 40, 1), (MEMORY_BYTES, 9_102, 1)],
)
def test_memory_is_asked_for_as_far_as_both_sides_allow_and_from_one_block_on(
    most: int, said: int, blocks: int
) -> None:
    """Mutations: max for min; a fill of no block raises."""
    played = Played(memory_bytes_max=most, memory_bytes_said=said).go(CHECKING)
    after = played.checked()
    if blocks:
        assert isinstance(after, Ask)
        assert after.question.memory_challenge.blocks == blocks
    else:
        assert after == FIGURE


def test_the_fill_has_a_nonce_of_its_own_that_is_drawn_when_the_products_are_checked() -> None:
    """Mutation: the fill's nonce is that of the compute question."""
    played = Played().go(CHECKING)
    assert played.check is not None
    entropy = b"e" * 32
    ask = played.challenge.checked(played.check.run(SECRET), entropy)
    assert isinstance(ask, Ask)
    assert ask.question.memory_challenge.nonce == entropy
    assert played.asks[0].question.compute_challenge.nonce == CONTEXT.nonce != entropy


@pytest.mark.parametrize("length", [0, 31, 33])
@pytest.mark.parametrize("at", [COMPUTING, FILLING, WALKING])
def test_a_root_that_is_no_hash_is_refuted_before_anything_else_is_asked(at: str, length: int) -> None:
    """Mutation: a root's length is not checked."""
    played = Played().go(at)
    reply = played.pending[0]
    setattr(getattr(reply, EXPECTED[at]), ROOT_OF[at], b"r" * length)
    outcome = played.take(reply, TOOK_MS)
    assert isinstance(outcome, Refuted)
    assert outcome.rule == "proof"


ROOTS = st.one_of(st.binary(max_size=64), st.binary(min_size=32, max_size=32))


@st.composite
def openings(draw: st.DrawFn, honest: pb.Opening) -> pb.Opening:
    """Change something of an honest opening, or all of it."""
    length = len(honest.content)
    contents = st.one_of(
        st.just(honest.content),
        st.binary(max_size=64),
        st.binary(min_size=1, max_size=1).map(lambda one: one * length),
    )
    proofs = st.one_of(st.just(list(honest.proof)), st.lists(st.binary(max_size=40), max_size=70))
    indexes = st.one_of(st.just(honest.index), st.integers(0, 2**32 - 1))
    return pb.Opening(index=draw(indexes), content=draw(contents), proof=draw(proofs))


@settings(max_examples=25, deadline=None)
@given(data=st.data())
@pytest.mark.parametrize("at", ASKED)
def test_garbage_in_any_answer_is_refuted_or_nothing_and_never_an_error(at: str, data: st.DataObject) -> None:
    """Mutation: a check lets what a Merkle proof raises through."""
    played = Played().go(at)
    honest = played.pending[0].SerializeToString()
    reply = played.pending[0]
    if at == OPENING:
        reply.compute_answer.result.CopyFrom(data.draw(openings(reply.compute_answer.result)))
    elif at == OPENING_WALK:
        which = data.draw(st.sampled_from(["states", "sketches"]))
        found = list(getattr(reply.memory_opening, which))
        place = data.draw(st.integers(0, len(found) - 1))
        found[place : place + 1] = data.draw(st.lists(openings(found[place]), max_size=2))
        reply.memory_opening.ClearField(which)  # type: ignore[arg-type]
        getattr(reply.memory_opening, which).extend(found)
    else:
        setattr(getattr(reply, EXPECTED[at]), ROOT_OF[at], data.draw(ROOTS))
    changed = reply.SerializeToString() != honest
    outcome = played.go().outcome
    assert isinstance(outcome, Refuted | NotShown) if changed else isinstance(outcome, Shown)


@pytest.mark.parametrize("device_class", list(DeviceClass))
def test_a_boot_is_asked_a_quarter_and_has_the_time_of_the_whole(device_class: DeviceClass) -> None:
    """Mutation: more chains are drawn than there are."""
    full, part = challenge_plan(device_class, full=True), challenge_plan(device_class, full=False)
    assert full == compute_plan(device_class)
    assert part.size == replace(full.size, chains=full.size.chains // QUICK_DIVISOR)
    assert part.drawn == min(full.drawn, part.size.chains)
    assert part.commitment_deadline_ms == full.commitment_deadline_ms
