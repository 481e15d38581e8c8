"""Challenges to and from protobuf. What arrives is checked for what arithmetic needs; what it proves, others judge."""

from collections.abc import Iterable, Sequence

from inference.challenge.commitment import Opening
from inference.challenge.compute import ComputeSize
from inference.challenge.context import NONCE_BYTES_MAX, NONCE_BYTES_MIN, SHA256_BYTES, ProofRejected
from inference.challenge.memory import MemorySize, states_asked
from protos.slackwater.node.v1 import challenge_pb2 as pb


def compute_challenge(
    challenge_id: str, card_id: str, nonce: bytes, size: ComputeSize, deadline_ms: int
) -> pb.ComputeChallenge:
    return pb.ComputeChallenge(
        challenge_id=challenge_id,
        card_id=card_id,
        nonce=nonce,
        columns=size.columns,
        rows=size.rows,
        products=size.products,
        chains=size.chains,
        deadline_ms=deadline_ms,
    )


def compute_size(message: pb.ComputeChallenge) -> ComputeSize:
    """Return what a node is asked to compute.

    Raises:
        ValueError: no machine of this version computes that.
    """
    _check_nonce(message.nonce)
    return ComputeSize(message.columns, message.rows, message.products, message.chains)


def memory_challenge(
    challenge_id: str, card_id: str, nonce: bytes, size: MemorySize, deadline_ms: int
) -> pb.MemoryChallenge:
    return pb.MemoryChallenge(
        challenge_id=challenge_id,
        card_id=card_id,
        nonce=nonce,
        columns=size.columns,
        blocks=size.blocks,
        blocks_per_step=size.blocks_per_step,
        steps=size.steps,
        deadline_ms=deadline_ms,
    )


def memory_size(message: pb.MemoryChallenge) -> MemorySize:
    """Return what a node is asked to fill and walk over.

    Raises:
        ValueError: no machine of this version does that.
    """
    _check_nonce(message.nonce)
    return MemorySize(message.columns, message.blocks, message.blocks_per_step, message.steps)


def root(root_bytes: bytes) -> bytes:
    """Return a commitment's root.

    Raises:
        ProofRejected: it is no SHA-256.
    """
    if len(root_bytes) != SHA256_BYTES:
        raise ProofRejected(f"a commitment has {len(root_bytes)} bytes, not {SHA256_BYTES}")
    return root_bytes


def compute_answers(challenge_id: str, openings: Sequence[Opening]) -> list[pb.ComputeAnswer]:
    return [pb.ComputeAnswer(challenge_id=challenge_id, result=_message(opening)) for opening in openings]


def results(messages: Iterable[pb.ComputeAnswer]) -> list[Opening]:
    return [_opening(message.result) for message in messages]


def memory_opening(challenge_id: str, states: Sequence[Opening], sketches: Sequence[Opening]) -> pb.MemoryOpening:
    return pb.MemoryOpening(challenge_id=challenge_id, states=map(_message, states), sketches=map(_message, sketches))


def memory_openings(message: pb.MemoryOpening, draw: pb.MemoryDraw) -> tuple[list[Opening], list[Opening]]:
    """Return states and sketches.

    Raises:
        ProofRejected: there are more or fewer than were drawn.
    """
    wanted = len(states_asked(draw.steps)), len(draw.blocks)
    found = len(message.states), len(message.sketches)
    if found != wanted:
        raise ProofRejected(f"{found[0]} states and {found[1]} sketches are opened, not {wanted[0]} and {wanted[1]}")
    return [_opening(state) for state in message.states], [_opening(sketch) for sketch in message.sketches]


def _message(opening: Opening) -> pb.Opening:
    return pb.Opening(index=opening.index, content=opening.content, proof=opening.proof)


def _opening(message: pb.Opening) -> Opening:
    return Opening(message.index, message.content, tuple(message.proof))


def _check_nonce(nonce: bytes) -> None:
    if not NONCE_BYTES_MIN <= len(nonce) <= NONCE_BYTES_MAX:
        raise ValueError(f"a nonce of {len(nonce)} bytes: {NONCE_BYTES_MIN} to {NONCE_BYTES_MAX} are needed")
