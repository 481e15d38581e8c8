"""Capability challenges over a real network: real agents and provers, of which some cheat, and a real coordinator.

All but one test ask for little (scripts/challenging_coordinator.py): what is proved, and how, is the same. The same
cheats pass where the check that finds them is left out.
"""

import asyncio
from collections.abc import Callable

import pytest
from audited_network import AuditedNetwork
from dev_network import DevNetwork
from network_settings import ROOT, EngineOptions
from slackwater import Node

# On two cores that others use too. numpy takes 20 s of a free core for the whole question, and 20 s for memory.
SHOWN_S = 90.0
FOUND_S = 240.0
WHOLE_S = 500.0

# An answer to another question is false in both parts of a challenge.
BINDING_CHEATS = ("replay", "other-node", "precomputed", "other-boot", "other-certificate")
COMPUTE_CHEATS = ("zeros", "constant", "empty")
UNBOUND_CHEATS = tuple(f"{cheat}-unbound" for cheat in BINDING_CHEATS if cheat != "replay")
MEMORY_CHEATS = ("memory-not-there", "memory-zeros", "memory-constant", "memory-empty")


class ChallengedNetwork(AuditedNetwork):
    """Agents of which each cheats in its own way, and a coordinator whose challenges take a moment."""

    def __init__(self, *cheats: str, without: str = "every", agents_per_owner: int = 1) -> None:
        DevNetwork.__init__(
            self,
            agents=len(cheats),
            agents_per_owner=agents_per_owner,
            engine=EngineOptions(challenges=True),
            agent_program=(str(ROOT / "scripts" / "challenged_agent.py"), ",".join(cheats)),
            coordinator_program=(str(ROOT / "scripts" / "challenging_coordinator.py"), without),
        )
        self._shadow = ()

    async def node(self, index: int) -> Node:
        async with self.admin() as admin:
            wanted = self.ready.agents[index].node_id
            return next(node for node in await admin.nodes() if node.node_id == wanted)

    async def wait(self, reached: Callable[[Node], bool], index: int, timeout_s: float) -> Node:
        """Wait until an agent's node is so."""
        async with asyncio.timeout(timeout_s):
            while not reached(node := await self.node(index)):
                await asyncio.sleep(0.2)
        return node

    def unmeasured(self, index: int) -> list[str]:
        """Return why challenges of an agent gave no figure, or took one away."""
        rows = self._rows("SELECT kind, not_measured FROM audits", index)
        return [why for kind, why in rows if kind == "challenge" and why is not None]

    def refuted(self, index: int) -> list[str]:
        """Return the hard rules that an agent has failed in challenges."""
        return [audit.hard for audit in self.audits(index, "challenge") if audit.hard is not None]


async def test_an_honest_agent_shows_what_it_computes_and_remembers_and_one_without_work_is_quarantined() -> None:
    """Mutation: a prover that is started with another boot's id is refuted, and never shown."""
    async with ChallengedNetwork("honest", "zeros") as network:
        node = await network.wait(lambda node: bool(node.shown), 0, SHOWN_S)
        [shown] = node.shown
        assert (shown.card_id, shown.device_class) == ("", "cpu")
        assert shown.operations_per_s > 0
        assert shown.memory_bytes > 400_000
        assert shown.bytes_per_s > 0
        await network.until(lambda: network.state(1) == "quarantined", SHOWN_S)
        # It is asked again in quarantine, too.
        assert network.refuted(1)[:2] == ["proof"] * 2
        assert not (await network.node(1)).shown
        assert network.refuted(0) == []


@pytest.mark.slow
async def test_one_card_under_two_names_counts_for_neither_and_two_cards_of_one_owner_count_for_both() -> None:
    async with ChallengedNetwork("shared-card", "shared-card", "own-card", "own-card", agents_per_owner=2) as network:
        for index in (0, 1):
            await network.until(lambda index=index: any("shared" in why for why in network.unmeasured(index)), FOUND_S)
            assert not (await network.node(index)).shown
        for index in (2, 3):
            await network.wait(lambda node: bool(node.shown), index, SHOWN_S)
        # Nothing false was said: a slow answer is no fault.
        assert [network.refuted(index) for index in range(4)] == [[]] * 4
        assert [network.state(index) for index in range(4)] == ["probation"] * 4


@pytest.mark.slow
async def test_one_card_under_two_names_counts_twice_where_nobody_is_asked_together() -> None:
    async with ChallengedNetwork("shared-card", "shared-card", without="barrier", agents_per_owner=2) as network:
        for index in (0, 1):
            await network.wait(lambda node: bool(node.shown), index, SHOWN_S)
        # Long enough for a barrier, which comes within seconds.
        await asyncio.sleep(10)
        for index in (0, 1):
            assert (await network.node(index)).shown


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cheats", [BINDING_CHEATS, COMPUTE_CHEATS, MEMORY_CHEATS], ids="+".join)
async def test_two_false_answers_quarantine_a_node_whatever_the_cheat(cheats: tuple[str, ...]) -> None:
    async with ChallengedNetwork(*cheats, "honest") as network:
        everyone = range(len(cheats))
        await network.until(lambda: all(network.state(index) == "quarantined" for index in everyone), FOUND_S)
        assert {cheat: network.refuted(index)[:2] for index, cheat in enumerate(cheats)} == {
            cheat: ["proof"] * 2 for cheat in cheats
        }
        honest = await network.wait(lambda node: bool(node.shown), len(cheats), SHOWN_S)
        assert honest.shown[0].memory_bytes
        assert [(await network.node(index)).shown for index in everyone] == [()] * len(cheats)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("layer", "cheats"),
    [
        ("proofs", BINDING_CHEATS),
        ("binding", UNBOUND_CHEATS),
        ("compute", COMPUTE_CHEATS),
        ("memory", MEMORY_CHEATS),
    ],
)
async def test_the_same_cheats_pass_without_the_check_that_finds_them(layer: str, cheats: tuple[str, ...]) -> None:
    async with ChallengedNetwork(*cheats, without=layer) as network:
        for index, cheat in enumerate(cheats):
            node = await network.wait(lambda node: bool(node.shown), index, FOUND_S)
            assert node.shown, cheat
            assert network.refuted(index) == [], cheat


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layer", ["every-timed", "deadlines"])
async def test_memory_that_is_computed_again_is_late_and_counts_where_nobody_looks_at_the_clock(layer: str) -> None:
    """All that is said of it is true, so that nothing else finds it, and it is no fault."""
    async with ChallengedNetwork("memory-recomputed", "honest", without=layer) as network:
        honest = await network.wait(lambda node: bool(node.shown and node.shown[0].memory_bytes), 1, FOUND_S)
        assert honest.shown[0].bytes_per_s
        if layer == "every-timed":
            # What it computes it has shown, and has been asked for the memory behind that.
            late = await network.wait(lambda node: bool(node.shown), 0, FOUND_S)
            assert (late.shown[0].memory_bytes, late.shown[0].bytes_per_s) == (0, 0)
        else:
            shown = await network.wait(lambda node: bool(node.shown and node.shown[0].memory_bytes), 0, FOUND_S)
            # As slow as it is, the scheduler would know; that it lacks the memory it would not.
            assert shown.shown[0].bytes_per_s < honest.shown[0].bytes_per_s
        assert network.refuted(0) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_processor_shows_what_it_can_do_by_the_whole_question() -> None:
    async with DevNetwork(agents=1, engine=EngineOptions(challenges=True)) as network, network.admin() as admin:
        async with asyncio.timeout(WHOLE_S):
            while not (await admin.nodes())[0].shown:
                await asyncio.sleep(0.5)
        [shown] = (await admin.nodes())[0].shown
        assert shown.operations_per_s > 10**9
        assert shown.memory_bytes > 50 << 20
        assert shown.bytes_per_s > 10**7
