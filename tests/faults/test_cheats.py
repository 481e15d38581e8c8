"""Nodes that do not compute what they are paid for: real agents, real model, cheating engines, and who finds them.

Each cheat of scripts/cheating_engine.py serves SmolLM2 under its own name through an agent as it is installed. A
coordinator without a model finds it by canaries; nodes of other owners find it by scoring its answers. With that rule
in shadow (`SetVerificationMode`) the same cheat stays in the fleet, so nothing but that rule has found it. Honest
engines that compute otherwise (bf16, other batches, vLLM, resumed answers) stay.

Cheats on the way to the coordinator are in test_hostile_agent.py: more tokens stated than delivered
(`completion_tokens`, `token_ids`, "a statement without frames"), forged and altered envelopes ("another key", "an
altered byte", "no envelope at all"), a stop without its id (`finish_reason`). An order signed by somebody else,
replayed or expired is refused in unit `agent/test_assignments.py`.
"""

import asyncio
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import structlog
from audited_network import RECORD, AuditedNetwork, Workshop
from network_settings import ROOT
from verification_figures import calibrate, honest_pool, read_variant
from verify_power import HELD_OUT

from coordinator.verification.events import COORDINATOR, AuditKind, AuditMeasured, VerdictState
from coordinator.verification.record import Record, measure
from inference.evidence import combined, log_capitals
from inference.rescoring import Rescored
from inference.task import ManifestDigest, NodeId, OwnerId
from protos.slackwater.fleet.v1 import fleet_service_pb2 as fleet

log = structlog.get_logger()


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("cheats"))


# ---- tests


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_a_node_that_leaves_a_layer_out_is_found_by_canaries(workshop: Workshop) -> None:
    """The quickest case: alone, first with the rule in shadow, where it stays, and then with the rule in force."""
    async with AuditedNetwork(workshop.engines("dropped-layer"), shadow=("canary", "score")) as network:
        await network.until(lambda: network.found(0, "canary", shadow=True) is not None, FOUND_WITHIN_S)
        assert network.state(0) == "probation"
        assert await network.ask_many(1) == {0}

        since_ms = max(audit.at_ms for audit in network.audits(0, "canary")) + 1
        await network.set_mode("canary", fleet.VERIFICATION_MODE_ACTIVE)
        await network.until(lambda: network.state(0) == "quarantined", FOUND_WITHIN_S)
        found = network.found(0, "canary", since_ms=since_ms)
        said = json.loads(await network.agent_command(0, "why", "--json"))["verdicts"]
    assert found is not None
    assert found.audits <= CANARIES_MAX["dropped-layer"], found
    assert said[0]["state"] == "quarantined"
    assert {evidence["kind"] for evidence in said[0]["evidence"]} == {"canary"}


# Canaries until quarantine, at most: about twice what was measured (docs/threat_model.md). Temperature 0.9 is not among
# them: a canary is compared up to the first id that differs, and 48 of them said nothing sure; peers find it.
CANARIES_MAX = {
    "int4": 20,
    "dropped-layer": 24,
    "t0.7": 50,
    "wrong-seed": 24,
    "canned": 16,
    "repeated": 20,
    "false-stop": 16,
    "precomputed": 16,
    "cheap-decode": 36,
}
FOUND_WITHIN_S = 900


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "cheats",
    [
        ("int4", "cheap-decode", "canned", "repeated"),
        ("t0.7", "wrong-seed", "false-stop", "precomputed"),
    ],
    ids=lambda cheats: "+".join(cheats),
)
async def test_canaries_find_a_cheat_and_nothing_else_does(workshop: Workshop, cheats: tuple[str, ...]) -> None:
    """First the canaries only look on, and every cheat stays, though they would have found it; then they count."""
    honest = len(cheats)
    everyone = range(len(cheats))
    async with AuditedNetwork(workshop.engines(*cheats, "honest"), shadow=("canary", "score", "rescore")) as network:
        await network.until(lambda: all(network.found(i, "canary", shadow=True) for i in everyone), FOUND_WITHIN_S)
        assert [network.state(index) for index in everyone] == ["probation"] * len(cheats)
        assert await network.ask_many(8 * (honest + 1)) == {*everyone, honest}

        since_ms = max(audit.at_ms for index in everyone for audit in network.audits(index, "canary")) + 1
        await network.set_mode("canary", fleet.VERIFICATION_MODE_ACTIVE)
        await network.until(lambda: all(network.state(i) == "quarantined" for i in everyone), FOUND_WITHIN_S)
        for index, cheat in enumerate(cheats):
            found = network.found(index, "canary", since_ms=since_ms)
            log.info("found", cheat=cheat, after=found, in_shadow=network.found(index, "canary", shadow=True))
            assert found is not None, network.story()
            assert found.audits <= CANARIES_MAX[cheat], (cheat, network.story())
        assert await network.ask_many(8, first=100) == {honest}
        assert {verdict.state for verdict in network.verdicts(honest)} <= {"ok"}, network.story()


async def proven(network: AuditedNetwork, *agents: int) -> None:
    """Wait until canaries have shown that these agents may judge others."""
    await network.until(lambda: all(network.state(index) == "ok" for index in agents), FOUND_WITHIN_S)


# Canaries scored until quarantine, at most: two bets lost suffice, and one more may be under way.
SCORES_MAX = 3


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_node_that_makes_scores_up_is_found_by_scores_that_are_known(workshop: Workshop) -> None:
    """Its own answers are honest, so that nothing else finds it: first with the rule in shadow, and then in force.

    Canaries only look on, so that the nodes stay in probation and are asked one after the other.
    """
    everyone = (0, 1)
    engines = workshop.engines("zero-scores", "constant-scores", "honest")
    async with AuditedNetwork(engines, shadow=("score", "canary")) as network:
        await network.until(lambda: all(network.found(i, "score", shadow=True) for i in everyone), FOUND_WITHIN_S)
        assert [network.state(index) for index in everyone] == ["probation"] * 2, network.story()

        since_ms = max(audit.at_ms for index in everyone for audit in network.audits(index, "score")) + 1
        await network.set_mode("score", fleet.VERIFICATION_MODE_ACTIVE)
        await network.until(lambda: all(network.state(i) == "quarantined" for i in everyone), FOUND_WITHIN_S)
        for index in everyone:
            found = network.found(index, "score", since_ms=since_ms)
            assert found is not None, network.story()
            assert found.audits <= SCORES_MAX, network.story()
        assert await network.ask_many(4, first=100) == {2}
        assert {verdict.state for verdict in network.verdicts(2)} <= {"ok"}, network.story()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("believed", [False, True])
async def test_a_node_that_sends_no_scores_contradicts_itself_and_passes_where_nobody_looks(
    workshop: Workshop, believed: bool
) -> None:
    async with AuditedNetwork(
        workshop.engines("honest"),
        shadow=("score", "canary"),
        agent_program=(str(ROOT / "scripts" / "lying_agent.py"), "empty-scores", "agent-1.toml"),
        coordinator_program=(str(ROOT / "scripts" / "believing_coordinator.py"),)
        if believed
        else ("-m", "coordinator"),
    ) as network:
        if believed:
            await network.until(lambda: len(network.audits(0, "score")) >= 2, FOUND_WITHIN_S)
            assert network.state(0) == "probation", network.story()
            return
        await network.until(lambda: network.state(0) == "quarantined", FOUND_WITHIN_S)
        broken = network.audits(0, "structure")
        assert [audit.hard for audit in broken] == ["statement_invalid"] * 2, network.story()


# Answers of 48 ids that peers have scored until quarantine, at most: about twice what was measured.
ANSWERS_MAX = {"cheap-decode": 24, "t0.9": 60}


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("cheat", list(ANSWERS_MAX))
async def test_nodes_of_other_owners_find_a_cheat_by_scoring_its_answers(workshop: Workshop, cheat: str) -> None:
    """Two nodes that canaries have proven, and a third that has had too few of them to be known.

    `cheap-decode` scores honestly what others said, so that only its answers give it away. First scoring only looks on,
    and the cheat stays; then it counts.
    """
    async with AuditedNetwork(workshop.engines("honest", "honest", cheat), shadow=("rescore",)) as network:
        await network.stop_agent(2)
        before = network.state(2)
        await proven(network, 0, 1)
        await network.set_mode("canary", fleet.VERIFICATION_MODE_SHADOW)
        await network.restart_agent(2)
        await ask_until(network, lambda: network.found(2, "rescore", shadow=True) is not None)
        # A canary before may have had it watched, which changes nothing about whom it serves.
        assert network.state(2) == before, network.story()

        since_ms = max(audit.at_ms for audit in network.audits(2, "rescore")) + 1
        await network.set_mode("rescore", fleet.VERIFICATION_MODE_ACTIVE)
        await ask_until(network, lambda: network.state(2) == "quarantined")
        found = network.found(2, "rescore", since_ms=since_ms)
        log.info("found", cheat=cheat, after=found, in_shadow=network.found(2, "rescore", shadow=True))
        assert found is not None, network.story()
        assert found.audits <= ANSWERS_MAX[cheat], network.story()
        assert 2 not in await network.ask_many(8, first=1000)
        assert [network.state(index) for index in (0, 1)] == ["ok", "ok"], network.story()


# Ids of its answers that peers have scored until quarantine, at most: what 95 of 100 need by the records is 4,145 of
# held-out prompts, and 7,050 of the calibration's.
INT8_IDS_MAX = 10_000


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_nodes_of_other_owners_find_8_bit_weights_within_thousands_of_ids(workshop: Workshop) -> None:
    """The cheat that is the hardest to see: long answers, all of them audited; first with scoring in shadow."""
    engines = replace(workshop.engines("honest", "honest", "int8", slots_of=(3, 3, 12)), audit_permille=1000)
    async with AuditedNetwork(engines, shadow=("rescore",)) as network:
        await proven(network, 0, 1)
        await network.set_mode("canary", fleet.VERIFICATION_MODE_SHADOW)
        before = network.state(2)
        await ask_until(network, lambda: network.found(2, "rescore", shadow=True) is not None, max_tokens=128)
        assert network.state(2) == before, network.story()

        since_ms = max(audit.at_ms for audit in network.audits(2, "rescore")) + 1
        await network.set_mode("rescore", fleet.VERIFICATION_MODE_ACTIVE)
        await ask_until(network, lambda: network.state(2) == "quarantined", max_tokens=128)
        found = network.found(2, "rescore", since_ms=since_ms)
        log.info("found", cheat="int8", after=found, in_shadow=network.found(2, "rescore", shadow=True))
        assert found is not None, network.story()
        assert found.tokens <= INT8_IDS_MAX, network.story()
        assert [network.state(index) for index in (0, 1)] == ["ok", "ok"], network.story()


async def ask_until(network: AuditedNetwork, reached: Callable[[], bool], max_tokens: int = 48) -> None:
    """Ask question after question, nine at once, until the coordinator's records say so."""
    end_s = time.monotonic() + FOUND_WITHIN_S
    first = 0
    while not await asyncio.to_thread(reached):
        assert time.monotonic() < end_s, network.story()
        await network.ask_many(9, first=first, max_tokens=max_tokens)
        first += 9


@pytest.mark.slow
@pytest.mark.timeout(2400)
async def test_honest_engines_that_compute_otherwise_stay(workshop: Workshop) -> None:
    """float32, bf16 and fp16, eight sequences at once and two, whole and resumed answers, by canaries and peers."""
    engines = workshop.engines("bf16", "honest", "fp16", slots_of=(8, 2, 2))
    everyone = range(3)
    async with AuditedNetwork(replace(engines, audit_permille=1000)) as network:
        await proven(network, *everyone)
        end_s = time.monotonic() + FOUND_WITHIN_S
        turn = 0
        while await asyncio.to_thread(network.audits_of_resumed) < RESUMED_AUDITS:
            assert time.monotonic() < end_s, network.story()
            asking = asyncio.create_task(network.ask_many(12, first=12 * turn, max_tokens=64))
            await asyncio.sleep(PAUSE_AFTER_S)
            await network.agent_command(turn % 3, "pause")
            await asking
            await network.agent_command(turn % 3, "resume")
            turn += 1
        audits = {kind: sum(len(network.audits(i, kind)) for i in everyone) for kind in ("canary", "rescore", "peer")}
        log.info("honest", audits=audits, resumed=network.audits_of_resumed())
        verdicts = {verdict.state for index in everyone for verdict in network.verdicts(index)}
        assert verdicts == {"ok"}, network.story()


# Some of each pause; what many of them look like to a verifier is in the record (honest-resumed-bf16).
RESUMED_AUDITS = 8
# A question has been read by then, and its answer has begun.
PAUSE_AFTER_S = 2.0


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(2400)
async def test_vllm_and_torch_find_each_other_honest(workshop: Workshop) -> None:
    """By greedy canaries of the torch engine, and by scoring each other's draws, each by its own sampler profile."""
    async with AuditedNetwork(workshop.engines("vllm", "honest")) as network:
        await proven(network, 0, 1)
        await ask_until(network, lambda: all(len(network.audits(index, "rescore")) >= 2 for index in (0, 1)))
        log.info("vllm", story=network.story())
        verdicts = {verdict.state for index in (0, 1) for verdict in network.verdicts(index)}
        assert verdicts == {"ok"}, network.story()


# ---- 8-bit weights, from the record


@pytest.mark.parametrize(
    ("cheat", "median_max", "slow_max"),
    [("int8", 4_500, 6_500), ("t0.9", 600, 1_000), ("int4", 400, 600), ("honest-bf16", None, None)],
)
def test_8_bit_weights_are_found_within_thousands_of_ids(
    cheat: str, median_max: int | None, slow_max: int | None
) -> None:
    """How long it takes: recorded answers of 128 ids (scripts/record_verification.py) to prompts that the calibration
    has not seen, drawn again and again, as audits told to the verdicts. Others beside it for comparison; an honest node
    is never quarantined.

    Ids that are audited until quarantine, measured: 2,863 in the median and 4,145 in 95 of 100 for int8; 384 and
    640 for temperature 0.9.
    """
    calibration = calibrate(honest_pool(RECORD), digest=DIGEST, model="m", dtype="float32", verifier="v")
    recorded = read_variant(HELD_OUT, cheat)
    columns = zip(recorded.attempts, recorded.unlisted, recorded.unlisted_rates, strict=True)
    rescored = [
        Rescored(
            temperature=recorded.temperature,
            margins=tuple(margins.tolist()),
            unlisted=tuple(unlisted.tolist()),
            unlisted_rates=tuple(rates.tolist()),
        )
        for margins, unlisted, rates in columns
    ]
    audits = [(one.tokens_checked, log_capitals(one, calibration)) for one in rescored]
    rng = np.random.default_rng(4)
    needed = sorted(ids_until_quarantine(audits, rng, slow_max or IDS_HONEST) for _ in range(TRIALS))
    log.info("recorded", cheat=cheat, median=needed[TRIALS // 2], slow=needed[TRIALS * 19 // 20])
    if median_max is None or slow_max is None:
        assert needed == [math.inf] * TRIALS
        return
    assert needed[TRIALS // 2] <= median_max
    assert needed[TRIALS * 19 // 20] <= slow_max


TRIALS = 60
IDS_HONEST = 20_000
DIGEST = ManifestDigest("sha256:recorded")


def ids_until_quarantine(
    audits: Sequence[tuple[int, tuple[float, ...]]], rng: np.random.Generator, ids_max: int
) -> float:
    record, ids, number = Record(owner_id=OwnerId("owner")), 0, 0
    while ids < ids_max:
        tokens, capitals = audits[int(rng.integers(len(audits)))]
        number, ids = number + 1, ids + tokens
        audit = AuditMeasured(
            node_id=NodeId("node"),
            owner_id=record.owner_id,
            manifest_digest=DIGEST,
            audit_id=str(number),
            kind=AuditKind.CANARY,
            tokens=tokens,
            log_evidence=combined(capitals),
            log_capitals=capitals,
            hard=None,
            at_ms=number,
            verifier=COORDINATOR,
            detail={},
        )
        record = measure(record, audit).record
        if record.state is VerdictState.QUARANTINED:
            return ids
    return math.inf
