"""Which orders an agent refuses. Every step of `check_assignment` has the forgeries that it must catch."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from agent.assignments import (
    ISSUED_EARLY_MS_MAX,
    NONCES_MAX,
    VALIDITY_MS_MAX,
    Audience,
    EngineOffer,
    NonceCache,
    NonceUse,
    TaskOrder,
    check_assignment,
    claimed_key,
)
from agent.errors import AssignmentInvalid, RefusalReason
from agent.owner.asks import NOTHING_ASKED, AskSettings, ModelAsk
from agent.owner.consent import Consent, ConsentSettings
from agent.prompt_assembly import PromptAssembly
from agent.testing import CLUSTER_ID, MODEL, NODE_ID, make_header, seal_header
from inference.task import Sampling, TaskKind, pack_token_ids
from protos import signing
from protos.slackwater.common.v1 import capability_pb2, completion_pb2, envelope_pb2, statement_pb2

KEY = Ed25519PrivateKey.generate()
AUDIENCE = Audience(CLUSTER_ID, NODE_ID, (KEY.public_key().public_bytes_raw(),))
OFFER = EngineOffer("main", MODEL, ready=True, free_slots=1)
NOW_MS = 1_000_000_500


def check(envelope: envelope_pb2.SignedEnvelope, chunk_count: int = 1, **changes: object) -> tuple[TaskOrder, str]:
    arguments: dict[str, object] = {
        "audience": AUDIENCE,
        "now_ms": NOW_MS,
        "nonces": NonceCache(),
        "offers": [OFFER],
        "consent": Consent(ConsentSettings()),
        "asks": NOTHING_ASKED,
        "tokens_today": 0,
        "local_time": None,
        "draining": False,
    }
    return check_assignment(envelope, chunk_count, **{**arguments, **changes})  # type: ignore[arg-type]


def reason_of(envelope: envelope_pb2.SignedEnvelope, chunk_count: int = 1, **changes: object) -> str:
    with pytest.raises(AssignmentInvalid) as refusal:
        check(envelope, chunk_count, **changes)
    return RefusalReason.Name(refusal.value.reason).removeprefix("REFUSAL_REASON_")


def sealed(**changes: Any) -> envelope_pb2.SignedEnvelope:
    return seal_header(make_header(**changes), KEY)


def test_a_true_order_passes_with_every_field() -> None:
    sampling = completion_pb2.Sampling(
        temperature=0.5, top_p=0.9, top_k=40, seed=2**63 - 1, presence_penalty=-2, repetition_penalty=2, logprobs=0
    )
    envelope = sealed(sampling=sampling, stop_token_ids=[2, 999], first_index=2)
    order, engine_id = check(envelope)
    assert engine_id == "main"
    assert order.key == ("task-1", 1)
    assert order.sampling == Sampling(
        temperature=0.5, top_p=0.9, top_k=40, seed=2**63 - 1, presence_penalty=-2, repetition_penalty=2, logprobs=0
    )
    assert order.stop_token_ids == (2, 999)
    assert order.first_index == 2
    assert order.nonce_use == NonceUse(b"n" * 16, 1_000_030_000)


# Mutation seen to fail: `signing.open_envelope` without the comparison of the key id.
@given(st.data())
def test_any_flipped_byte_of_the_envelope_is_refused(data: st.DataObject) -> None:
    whole = bytearray(sealed().SerializeToString())
    position = data.draw(st.integers(0, len(whole) - 1))
    whole[position] ^= data.draw(st.integers(1, 255))
    envelope = envelope_pb2.SignedEnvelope()
    try:
        envelope.ParseFromString(bytes(whole))
    except DecodeError:
        return  # gRPC refuses the message before we see it.
    assert reason_of(envelope) == "SIGNATURE_INVALID"


def test_another_key_and_another_payload_type_are_refused() -> None:
    header = make_header()
    assert reason_of(seal_header(header, Ed25519PrivateKey.generate())) == "SIGNATURE_INVALID"
    result = signing.seal(signing.RESULT_TYPE, header.SerializeToString(), KEY)
    assert reason_of(result) == "SIGNATURE_INVALID"


# Mutation seen to fail: without `_refuse_unknown` the first two pass.
def test_a_header_with_a_field_of_a_later_version_is_refused() -> None:
    # Field 1000, varint 1: what a header with one more field would look like to us.
    unknown = b"\xc0\x3e\x01"
    beside = signing.seal(signing.TASK_TYPE, make_header().SerializeToString() + unknown, KEY)
    assert reason_of(beside) == "MALFORMED"
    sampling = completion_pb2.Sampling.FromString(make_header().sampling.SerializeToString() + unknown)
    assert reason_of(sealed(sampling=sampling)) == "MALFORMED"
    assert reason_of(signing.seal(signing.TASK_TYPE, b"\xff\xff", KEY)) == "MALFORMED"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cluster_id": "another"}, "WRONG_AUDIENCE"),
        ({"node_id": "another"}, "WRONG_AUDIENCE"),
        ({"task_id": ""}, "MALFORMED"),
        ({"task_id": "t" * 129}, "MALFORMED"),
        ({"attempt": 0}, "MALFORMED"),
        ({"lease_epoch": 0}, "MALFORMED"),
        ({"issued_at_ms": 0}, "MALFORMED"),
        ({"issued_at_ms": -(2**63)}, "MALFORMED"),
        ({"not_after_ms": 1_000_000_000}, "MALFORMED"),
        ({"not_after_ms": 1_000_000_001 + VALIDITY_MS_MAX}, "MALFORMED"),
        ({"nonce": b"n" * 15}, "MALFORMED"),
        ({"manifest_digest": "sha256:xyz"}, "MALFORMED"),
        ({"kind": 0}, "MALFORMED"),
        ({"kind": 77}, "MALFORMED"),
        ({"sampling": None}, "MALFORMED"),
        ({"max_tokens": 0}, "MALFORMED"),
        ({"prompt_token_count": 0}, "MALFORMED"),
        ({"prompt_salt": b""}, "MALFORMED"),
        ({"cache_salt": b"short"}, "MALFORMED"),
        ({"prompt_sha256": b"x" * 31}, "MALFORMED"),
        ({"first_index": 3}, "MALFORMED"),
        ({"service_class": 0}, "MALFORMED"),
        ({"service_class": 9}, "MALFORMED"),
        ({"privacy_class": 0}, "MALFORMED"),
        ({"issued_at_ms": NOW_MS + ISSUED_EARLY_MS_MAX + 1, "not_after_ms": NOW_MS + 90_000}, "EXPIRED"),
        ({"not_after_ms": NOW_MS - 1}, "EXPIRED"),
        ({"manifest_digest": "sha256:" + "cd" * 32}, "MODEL_UNKNOWN"),
        ({"kind": completion_pb2.TASK_KIND_EMBED, "max_tokens": 0}, "MODEL_UNKNOWN"),
        ({"max_tokens": 62}, "LIMITS_EXCEEDED"),
        ({"prompt_token_count": 57}, "LIMITS_EXCEEDED"),
        ({"stop_token_ids": range(17)}, "LIMITS_EXCEEDED"),
        ({"stop_token_ids": [1000]}, "LIMITS_EXCEEDED"),
    ],
)
def test_a_forged_field_is_refused_with_its_reason(changes: dict[str, object], reason: str) -> None:
    assert reason_of(sealed(**changes)) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 2.1}, "MALFORMED"),
        ({"temperature": float("nan")}, "MALFORMED"),
        ({"temperature": -0.1}, "MALFORMED"),
        ({"top_p": 0}, "MALFORMED"),
        ({"top_p": float("inf")}, "MALFORMED"),
        ({"seed": 2**63}, "MALFORMED"),
        ({"presence_penalty": 2.5}, "MALFORMED"),
        ({"frequency_penalty": float("-inf")}, "MALFORMED"),
        ({"repetition_penalty": 0}, "MALFORMED"),
        ({"logprobs": 21}, "LIMITS_EXCEEDED"),
    ],
)
def test_forged_sampling_is_refused(changes: dict[str, float], reason: str) -> None:
    fields: dict[str, float] = {"temperature": 1, "top_p": 1, "seed": 7, "repetition_penalty": 1}
    sampling = completion_pb2.Sampling(**{**fields, **changes})  # type: ignore[arg-type]
    assert reason_of(sealed(sampling=sampling)) == reason


@pytest.mark.parametrize(
    ("kind", "most"), [(completion_pb2.TASK_KIND_GENERATE, 20), (completion_pb2.TASK_KIND_SCORE, 64)]
)
def test_a_score_may_name_more_rivals_than_an_answer(kind: int, most: int) -> None:
    """Mutation seen to fail here: one limit for both."""
    for logprobs in (most, most + 1):
        sampling = completion_pb2.Sampling(temperature=1, top_p=1, seed=7, repetition_penalty=1, logprobs=logprobs)
        header = sealed(kind=kind, sampling=sampling, max_tokens=0 if kind == completion_pb2.TASK_KIND_SCORE else 8)
        if logprobs == most:
            check(header)
        else:
            assert reason_of(header) == "LIMITS_EXCEEDED"


def test_the_chunk_count_is_within_one_and_the_number_of_ids() -> None:
    assert reason_of(sealed(), chunk_count=0) == "MALFORMED"
    assert reason_of(sealed(), chunk_count=4) == "MALFORMED"


# Mutation seen to fail: `forget_void` without ISSUED_EARLY_MS_MAX.
def test_a_replayed_nonce_is_refused_until_the_header_is_void_anyway() -> None:
    nonces = NonceCache([NonceUse(b"n" * 16, 1_000_030_000)])
    assert reason_of(sealed(), nonces=nonces) == "REPLAYED"
    nonces.forget_void(1_000_030_000 + ISSUED_EARLY_MS_MAX)
    assert reason_of(sealed(), nonces=nonces) == "REPLAYED"
    nonces.forget_void(1_000_030_001 + ISSUED_EARLY_MS_MAX)
    assert b"n" * 16 not in nonces


def test_a_full_nonce_cache_takes_no_more_work() -> None:
    nonces = NonceCache(NonceUse(number.to_bytes(16, "big"), NOW_MS) for number in range(NONCES_MAX))
    assert reason_of(sealed(), nonces=nonces) == "BUSY"


def test_prompt_and_answer_fit_into_the_models_context_together() -> None:
    """Mutation seen to fail here: hold the prompt alone against it."""
    for context_tokens, fits in ((10, False), (11, True)):
        offer = replace(OFFER, model=replace(MODEL, context_tokens=context_tokens))
        if fits:
            check(sealed(), offers=[offer])
        else:
            assert reason_of(sealed(), offers=[offer]) == "LIMITS_EXCEEDED"


def test_a_node_that_cannot_take_work_says_why() -> None:
    assert reason_of(sealed(), draining=True) == "DRAINING"
    assert reason_of(sealed(), offers=[]) == "MODEL_UNKNOWN"
    assert reason_of(sealed(), offers=[replace(OFFER, ready=False)]) == "ENGINE_NOT_READY"
    assert reason_of(sealed(), offers=[replace(OFFER, free_slots=0)]) == "BUSY"


def test_the_engine_with_most_free_slots_gets_the_work() -> None:
    offers = [OFFER, EngineOffer("second", MODEL, True, 3), EngineOffer("third", MODEL, False, 9)]
    assert check(sealed(), offers=offers)[1] == "second"


def test_a_generating_model_scores_but_one_id_has_no_score() -> None:
    score = completion_pb2.TASK_KIND_SCORE
    order, _ = check(sealed(kind=score, max_tokens=0))
    assert order.kind is TaskKind.SCORE
    assert reason_of(sealed(prompt=[1], kind=score, max_tokens=0)) == "LIMITS_EXCEEDED"


def test_the_address_of_a_refusal_is_read_from_any_bytes() -> None:
    assert claimed_key(sealed()) == ("task-1", 1)
    assert claimed_key(envelope_pb2.SignedEnvelope(payload=b"\xff")) == ("", 0)
    long = statement_pb2.TaskHeader(task_id="t" * 1000).SerializeToString()
    assert len(claimed_key(envelope_pb2.SignedEnvelope(payload=long)).task_id) == 128


def assembly(prompt: list[int], chunk_count: int) -> PromptAssembly:
    return PromptAssembly(check(sealed(prompt=prompt, max_tokens=1), chunk_count)[0])


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.data())
def test_a_prompt_cut_anywhere_comes_together(prompt: list[int], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, len(prompt) - 1)))) if len(prompt) > 1 else []
    edges = [0, *cuts, len(prompt)]
    whole = assembly(prompt, len(edges) - 1)
    done = [
        whole.add(index, pack_token_ids(prompt[start:end]))
        for index, (start, end) in enumerate(itertools.pairwise(edges))
    ]
    assert done == [False] * (len(done) - 1) + [True]
    assert list(whole.ids) == prompt


@pytest.mark.parametrize(
    ("index", "ids", "complaint"),
    [
        (1, [1, 2, 3], "0 was due"),
        (0, [], "0 bytes"),
        (0, [1, 2, 1000], "vocabulary"),
        (0, [1, 2, 3, 4], "more than 3"),
        (0, [1, 2], "2 ids came"),
        (0, [1, 2, 4], "salted hash"),
    ],
)
def test_ids_that_differ_from_the_header_are_refused(index: int, ids: list[int], complaint: str) -> None:
    with pytest.raises(AssignmentInvalid, match=complaint) as refusal:
        assembly([1, 2, 3], 1).add(index, pack_token_ids(ids))
    assert refusal.value.reason == RefusalReason.REFUSAL_REASON_PROMPT_MISMATCH


def test_a_chunk_with_half_an_id_and_an_oversized_chunk_are_refused() -> None:
    for packed in (b"\0\0\0\0\0", bytes(64 * 1024 + 4)):
        with pytest.raises(AssignmentInvalid, match="bytes"):
            assembly([1, 2, 3], 1).add(0, packed)


# Mutations seen to fail: step 10 left out; `_refuse_unknown` of the ask left out.
def test_an_order_that_pays_less_than_the_owner_asks_is_refused() -> None:
    ask = capability_pb2.Ask(prompt_micro=100, completion_micro=200)
    asks = AskSettings(models=(ModelAsk(model=MODEL.name, prompt_micro=100, completion_micro=200),))
    check(sealed(ask=ask), asks=asks)
    # Who asks for nothing does not care what an order says.
    check(sealed(ask=ask))
    assert reason_of(sealed(), asks=asks) == "ASK"
    less = capability_pb2.Ask(prompt_micro=100, completion_micro=199)
    assert reason_of(sealed(ask=less), asks=asks) == "ASK"
    check(sealed(ask=less), asks=AskSettings(models=(ModelAsk(model="other", prompt_micro=9, completion_micro=999),)))
    unknown = capability_pb2.Ask.FromString(ask.SerializeToString() + b"\xc0\x3e\x01")
    assert reason_of(sealed(ask=unknown), asks=asks) == "MALFORMED"
