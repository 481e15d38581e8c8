"""Challenges over protobuf, there and back, and the whole of both protocols through it."""

import pytest

from inference.challenge import wire
from inference.challenge.arithmetic import NumpyArithmetic
from inference.challenge.compute import ComputeProver, verify_compute
from inference.challenge.context import ProofRejected
from inference.challenge.memory import MemoryProver
from inference.challenge.memory_check import verify_memory
from inference.challenge.testing import COMPUTE_SIZE, CONTEXT, MEMORY_SIZE, SECRET, walked
from protos.slackwater.node.v1 import challenge_pb2 as pb


def test_a_compute_challenge_passes_through_its_messages() -> None:
    sent = wire.compute_challenge("c1", "card", CONTEXT.nonce, COMPUTE_SIZE, 9_000).SerializeToString()
    question = pb.ComputeChallenge.FromString(sent)
    prover = ComputeProver(CONTEXT, wire.compute_size(question), NumpyArithmetic())
    commitment = pb.ComputeCommitment.FromString(
        pb.ComputeCommitment(challenge_id="c1", root=prover.commit()).SerializeToString()
    )
    drawn = [3, 0]
    answers = [message.SerializeToString() for message in wire.compute_answers("c1", prover.open(drawn))]
    results = wire.results(map(pb.ComputeAnswer.FromString, answers))
    verify_compute(CONTEXT, COMPUTE_SIZE, wire.root(commitment.root), drawn, results, SECRET)


def test_a_memory_challenge_passes_through_its_messages() -> None:
    sent = wire.memory_challenge("c1", "card", CONTEXT.nonce, MEMORY_SIZE, 9_000).SerializeToString()
    size = wire.memory_size(pb.MemoryChallenge.FromString(sent))
    assert size == MEMORY_SIZE
    draw = pb.MemoryDraw(challenge_id="c1", steps=[5, 6, 40], blocks=[2, 9])
    claim, *openings = walked(MemoryProver(CONTEXT, size, NumpyArithmetic()), tuple(draw.steps), tuple(draw.blocks))
    answer = pb.MemoryOpening.FromString(wire.memory_opening("c1", *openings).SerializeToString())
    states, sketches = wire.memory_openings(answer, draw)
    verify_memory(CONTEXT, MEMORY_SIZE, claim, states, sketches, rows=2, secret=SECRET)
    for fewer in (pb.MemoryOpening(states=answer.states), pb.MemoryOpening(sketches=answer.sketches)):
        with pytest.raises(ProofRejected, match="are opened"):
            wire.memory_openings(fewer, draw)


def test_empty_messages_are_refused() -> None:
    with pytest.raises(ProofRejected, match="commitment"):
        wire.root(pb.ComputeCommitment().root)
    with pytest.raises(ValueError, match="nonce"):
        wire.compute_size(pb.ComputeChallenge(columns=64))
    with pytest.raises(ValueError, match="nonce"):
        wire.memory_size(pb.MemoryChallenge(columns=64))
    with pytest.raises(ValueError, match="columns"):
        wire.compute_size(pb.ComputeChallenge(nonce=bytes(16)))
    with pytest.raises(ValueError, match="columns"):
        wire.memory_size(pb.MemoryChallenge(nonce=bytes(16)))
    with pytest.raises(ProofRejected, match="were asked for"):
        verify_compute(CONTEXT, COMPUTE_SIZE, bytes(32), [1], wire.results([pb.ComputeAnswer()]), SECRET)
