"""The prover's session and its frames."""

import io

import pytest

from inference.challenge import wire
from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.compute import verify_compute
from inference.challenge.context import Key
from inference.challenge.expansion import Residues
from inference.challenge.memory_check import MemoryClaim, verify_memory
from inference.challenge.prover import QUESTION_BYTES_MAX, ProverSession, read_question, serve
from inference.challenge.testing import COMPUTE_SIZE, CONTEXT, MEMORY_SIZE, SECRET, WALK_NONCE
from protos.slackwater.node.v1 import challenge_pb2 as pb

COMPUTE = pb.ChallengeQuestion(compute_challenge=wire.compute_challenge("c", "", CONTEXT.nonce, COMPUTE_SIZE, 1_000))
MEMORY = pb.ChallengeQuestion(memory_challenge=wire.memory_challenge("m", "", CONTEXT.nonce, MEMORY_SIZE, 1_000))
COMPUTE_DRAW = pb.ChallengeQuestion(compute_draw=pb.ComputeDraw(challenge_id="c", chains=[4, 2]))
WALK = pb.ChallengeQuestion(memory_walk=pb.MemoryWalk(challenge_id="m", walk_nonce=WALK_NONCE))
MEMORY_DRAW = pb.ChallengeQuestion(memory_draw=pb.MemoryDraw(challenge_id="m", steps=[3, 9], blocks=[1]))


def session(arithmetic: NumpyArithmetic | None = None) -> ProverSession[Residues]:
    return ProverSession(CONTEXT.node_id, CONTEXT.boot_id, CONTEXT.certificate_sha256, arithmetic or NumpyArithmetic())


def frame(message: pb.ChallengeQuestion) -> bytes:
    body = message.SerializeToString()
    return len(body).to_bytes(4, "big") + body


def replies_in(stream: bytes) -> list[pb.ChallengeReply]:
    found = []
    while stream:
        length = int.from_bytes(stream[:4], "big")
        found.append(pb.ChallengeReply.FromString(stream[4 : 4 + length]))
        stream = stream[4 + length :]
    return found


def test_a_prover_answers_one_challenge_after_the_other_until_its_input_ends() -> None:
    questions = b"".join(map(frame, [COMPUTE, COMPUTE_DRAW, MEMORY, WALK, MEMORY_DRAW]))
    written = io.BytesIO()
    serve(session(), pb.ProverReady(arithmetic="numpy"), io.BytesIO(questions), written)
    ready, computed, first, second, filled, walked, opened = replies_in(written.getvalue())
    assert ready.prover_ready.arithmetic == "numpy"
    results = wire.results([first.compute_answer, second.compute_answer])
    verify_compute(CONTEXT, COMPUTE_SIZE, computed.compute_commitment.root, [4, 2], results, SECRET)
    claim = MemoryClaim(
        filled.memory_commitment.fill_root, WALK_NONCE, walked.memory_walk_commitment.walk_root, (3, 9), (1,)
    )
    states, sketches = wire.memory_openings(opened.memory_opening, MEMORY_DRAW.memory_draw)
    verify_memory(CONTEXT, MEMORY_SIZE, claim, states, sketches, rows=2, secret=SECRET)


@pytest.mark.parametrize(
    "questions",
    [
        [pb.ChallengeQuestion()],
        [COMPUTE_DRAW],
        [WALK],
        [COMPUTE, WALK],
        [MEMORY, MEMORY_DRAW],
        [COMPUTE, MEMORY, COMPUTE_DRAW],
        [MEMORY, COMPUTE, WALK],
        [COMPUTE, pb.ChallengeQuestion(compute_draw=pb.ComputeDraw(challenge_id="another", chains=[1]))],
        [COMPUTE, pb.ChallengeQuestion(compute_draw=pb.ComputeDraw(challenge_id="c", chains=[5]))],
        [pb.ChallengeQuestion(compute_challenge=pb.ComputeChallenge(challenge_id="c", nonce=bytes(16)))],
        [pb.ChallengeQuestion(memory_challenge=pb.MemoryChallenge(challenge_id="m"))],
    ],
)
def test_what_cannot_be_answered_is_refused_and_the_prover_goes_on(questions: list[pb.ChallengeQuestion]) -> None:
    proving = session()
    replies = [reply for question in questions for reply in proving.replies(question)]
    assert replies[-1].WhichOneof("reply") == "challenge_refusal"
    assert replies[-1].challenge_refusal.reason
    [reply] = proving.replies(COMPUTE)
    assert reply.WhichOneof("reply") == "compute_commitment"


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("CUDA out of memory")])
def test_memory_that_is_not_there_is_a_refusal_and_what_was_filled_is_dropped(error: Exception) -> None:
    class Full(NumpyArithmetic):
        def expand(self, key: Key, first_row: int, rows: int, columns: int) -> Residues:
            if first_row > 5 * columns:
                raise error
            return super().expand(key, first_row, rows, columns)

    proving = session(Full())
    [reply] = proving.replies(MEMORY)
    assert reply.challenge_refusal.reason in ("MemoryError", "CUDA out of memory")
    [reply] = proving.replies(WALK)
    assert "before it" in reply.challenge_refusal.reason


def test_a_fill_is_dropped_before_the_next_challenge_takes_memory() -> None:
    # Mutation seen to fail: what was held is dropped by the next assignment only.
    held: list[bool] = []

    class Watching(NumpyArithmetic):
        def expand(self, key: Key, first_row: int, rows: int, columns: int) -> Residues:
            held.append(proving._memory is not None)
            return super().expand(key, first_row, rows, columns)

    proving = session(Watching())
    list(proving.replies(MEMORY))
    assert held[-1]
    held.clear()
    list(proving.replies(COMPUTE))
    assert not any(held)


@pytest.mark.parametrize(
    "stream",
    [b"\x00", b"\x00\x00\x00\x05abc", (QUESTION_BYTES_MAX + 1).to_bytes(4, "big"), b"\x00\x00\x00\x02\xff\xff"],
)
def test_a_stream_of_something_else_ends_the_prover(stream: bytes) -> None:
    with pytest.raises(Exception, match=r"frame|input|Error parsing"):
        read_question(io.BytesIO(stream))
    assert read_question(io.BytesIO(b"")) is None
