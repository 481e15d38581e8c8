"""Appeals over real processes: who was wronged by a broken bank wins, who serves fewer bits loses.

Verdicts that only a second owner's node could give are in test_cheats.py.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from audited_network import AuditedNetwork, Workshop

from inference.canaries import Canary, CanaryBank, encode_bank
from inference.model_files import CANARIES_FILE
from inference.sampler_noise import VLLM_GENERATOR
from protos.slackwater.fleet.v1 import fleet_service_pb2 as fleet

VERIFIER, WRONGED, CHEAT = 0, 1, 2
FOUND_WITHIN_S = 900
MEASURED_WITHIN_S = 120


def broken(canary: Canary) -> Canary:
    """Return a canary whose candidates have each other's log-probabilities, from the least likely up."""
    logprobs = np.frombuffer(canary.logprobs, dtype="<f4").reshape(-1, canary.top)[:, ::-1]
    return msgspec.structs.replace(canary, name=f"broken-{canary.name}", logprobs=logprobs.tobytes())


@pytest.fixture
def workshop(tmp_path: Path) -> Workshop:
    """A model whose bank is as it should be for the torch engine, and broken for what vLLM draws."""
    workshop = Workshop(tmp_path)
    path = workshop.model() / CANARIES_FILE
    bank = msgspec.msgpack.decode(path.read_bytes(), type=CanaryBank)
    # Who scores is not wronged: what is set apart was drawn by the torch engine's sampler.
    canaries = tuple(broken(one) if one.sampler_profile == VLLM_GENERATOR else one for one in bank.canaries)
    path.write_bytes(encode_bank(msgspec.structs.replace(bank, canaries=canaries)))
    return workshop


async def newest(network: AuditedNetwork, index: int) -> dict[str, Any]:
    """Return the newest verdict as the owner sees it."""
    verdicts: list[dict[str, Any]] = json.loads(await network.agent_command(index, "why", "--json"))["verdicts"]
    return verdicts[0]


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(1800)
async def test_who_was_wronged_wins_an_appeal_and_a_cheat_loses_it(workshop: Workshop) -> None:
    """Unit `test_verdicts.py` has the mutations: every appeal won, every appeal lost."""
    async with AuditedNetwork(workshop.engines("honest", "vllm", "int4")) as network:
        accused = (WRONGED, CHEAT)
        await network.until(lambda: network.state(VERIFIER) == "ok", FOUND_WITHIN_S)
        await network.until(lambda: all(network.state(i) == "quarantined" for i in accused), FOUND_WITHIN_S)
        # No further canary counts, so that what follows is the appeals'.
        await network.set_mode("canary", fleet.VERIFICATION_MODE_SHADOW)
        kinds = {WRONGED: {"canary"}, CHEAT: {"canary", "score"}}
        for index in accused:
            verdict = await newest(network, index)
            assert verdict["state"] == "quarantined"
            assert {one["kind"] for one in verdict["evidence"]} <= kinds[index]
            said = await network.agent_command(index, "appeal", verdict["verdict_id"])
            assert said.startswith(f"the appeal against {verdict['verdict_id']} is taken up")
        ends = {
            WRONGED: ("probation", "the appeal was won: another verifier finds nothing; probation again"),
            CHEAT: ("quarantined", "the appeal was lost: another verifier finds the same"),
        }
        reason = "SELECT state, reason FROM verdicts WHERE node_id = ? AND shadow = 0 ORDER BY at_ms DESC LIMIT 1"
        for index, end in ends.items():
            node_id = network.ready.agents[index].node_id
            await network.until(
                lambda node_id=node_id, end=end: network.query(reason, node_id) == [end], MEASURED_WITHIN_S
            )
            verdict = await newest(network, index)
            assert (verdict["state"], verdict["reason"]) == end
        assert network.state(VERIFIER) == "ok", network.story()
