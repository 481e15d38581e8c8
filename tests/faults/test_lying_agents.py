"""Agents that lie about honest answers of the real model, over real processes: what binding every result is there for.

Each lie of scripts/lying_agent.py costs its teller the answer at once, and the second one all further work. A
coordinator without that one check (scripts/believing_coordinator.py) takes the same lie for a result. Every field of a
statement that can be wrong is tried in test_hostile_agent.py.
"""

import asyncio
from pathlib import Path

import pytest
from audited_network import MODEL, QUESTION, TORCH, AuditedNetwork, Engines
from network_settings import MODELS, ROOT
from slackwater import AsyncClient, Completion, VerificationError

LIAR, HONEST = 0, 1
# A result that does not bear its statement is one contradiction; the second quarantines. One more may be under way.
LIES_MAX = 3
TOKENS = 12
# One more than the honest node takes at once, so that the liar gets one of each round, however fast the other is.
HONEST_SLOTS = 1
TOGETHER = HONEST_SLOTS + 1
ROUNDS_MAX = 20
RECORDED_WITHIN_S = 20.0
BELIEVING = str(ROOT / "scripts" / "believing_coordinator.py")
LIES = ["over-reported", "forged-envelope", "stale-lease"]


def engines() -> Engines:
    # Without a calibration beside the model: no canary and no audit of outputs has a part in this.
    return Engines(directory=MODELS / MODEL, programs=(TORCH, TORCH), slots_of=(8, HONEST_SLOTS))


def liar(lie: str) -> tuple[str, ...]:
    return (str(Path(ROOT / "scripts" / "lying_agent.py")), lie, "agent-1.toml")


async def ask(client: AsyncClient, number: int) -> tuple[Completion, bool]:
    """Return an answer, and whether its statement stands when the client checks it."""
    answer = client.chat(f"{QUESTION} Number {number}.", model=MODEL, temperature=1.0, seed=number, max_tokens=TOKENS)
    completion = await answer.completion()
    try:
        answer.verify()
    except VerificationError:
        return completion, False
    return completion, True


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_in_what_is_signed_costs_the_answer_and_the_second_one_the_work(lie: str) -> None:
    async with AuditedNetwork(engines(), agent_program=liar(lie)) as network, network.client() as client:
        node_id = network.ready.agents[LIAR].node_id
        lies = 0
        for number in range(ROUNDS_MAX):
            answers = await asyncio.gather(*(ask(client, TOGETHER * number + one) for one in range(TOGETHER)))
            # Ids that came before the lie are not computed again; nobody has signed for them.
            assert all(stands or completion.broken_attempts for completion, stands in answers)
            broken = [one for completion, _ in answers for one in completion.broken_attempts]
            # What was under way when the second lie came is taken away from it.
            assert {(one.node_id, one.reason) for one in broken} <= {
                (node_id, "statement_invalid"),
                (node_id, "standing_lost"),
            }
            lies += sum(one.reason == "statement_invalid" for one in broken)
            if network.state(LIAR) == "quarantined":
                break
        assert network.state(LIAR) == "quarantined", network.story()
        assert lies <= LIES_MAX
        assert await network.ask_many(4, first=1000, max_tokens=TOKENS) == {HONEST}
        # Nothing of it was paid: the lies are the only work that it has delivered, but for a stale lease's first order.
        paid = "SELECT count(*) FROM attempts WHERE outcome = 'finished' AND node_id = ?"
        assert network.query(paid, node_id) == [(1 if lie == "stale-lease" else 0,)]
        assert network.state(HONEST) == "probation"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("lie", LIES)
async def test_without_the_check_of_statements_the_same_lie_is_a_result(lie: str) -> None:
    """Only a client that checks for itself notices."""
    believing = AuditedNetwork(engines(), agent_program=liar(lie), coordinator_program=(BELIEVING,))
    finished = "SELECT count(*) FROM attempts WHERE outcome = 'finished' AND node_id = ?"
    async with believing as network, network.client() as client:
        node_id = network.ready.agents[LIAR].node_id
        noticed = 0
        for number in range(ROUNDS_MAX):
            answers = await asyncio.gather(*(ask(client, TOGETHER * number + one) for one in range(TOGETHER)))
            assert all(completion.broken_attempts == () for completion, _ in answers)
            noticed += sum(not stands for _, stands in answers)
            if noticed > LIES_MAX:
                break
        lies = noticed + (lie == "stale-lease")
        # What is answered is on record a moment later.
        await network.until(lambda: network.query(finished, node_id) == [(lies,)], RECORDED_WITHIN_S)
        assert noticed > LIES_MAX
        assert network.state(LIAR) == "probation"
