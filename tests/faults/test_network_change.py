"""An agent whose way to the coordinator changes under load: what readers notice, and how the agent comes back.

The agent dials a forwarder of this test instead of the coordinator, so that its
connections can be cut as a change of network cuts them, over real processes.
The fake engine's ids depend on all ids before, so an answer that equals the
undisturbed one has lost, doubled or changed nothing.
"""

import asyncio
import json
import socket
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Self

import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import MODELS, EngineOptions
from slackwater import Answer, AttemptBroken, AttemptStarted, Delta

from agent.identity import IDENTITY_FILE, write_private
from agent.link import COORDINATOR_SILENT_S_MAX
from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "fake-smollm2"
PROMPT = (100, 200, 300)
STREAMS = 20
TOKENS = 150
SEED = 7
GREEDY = Sampling(temperature=0.0, seed=SEED)
TOKENS_PER_SECOND = 50.0
# The agent behind the forwarder.
ROAMER = 0
# What the machine is called before and after the change, as the coordinator sees it.
HOME, AWAY = "127.0.0.1", "127.0.0.2"
# A reset is known at once; a second is what the resumption may take.
RESET_GAP_S_MAX = 1.0
# A black hole is known by the silence of a busy node, 3 s at most; then as above.
BLACK_HOLE_GAP_S_MAX = 3.0 + RESET_GAP_S_MAX
# Two backoffs and two handshakes: the first dial may still meet the old network.
RECONNECT_S_MAX = 5.0
PATIENCE_S = 60.0
PIECE_BYTES = 64 * 1024


@dataclass(eq=False)
class Connection:
    """One connection of the agent, and the one on to the coordinator."""

    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    pumps: list["asyncio.Task[None]"] = field(default_factory=list)

    def reset(self) -> None:
        """End both by RST, without what is still on its way."""
        self.stop()
        for writer in self.writers:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def stop(self) -> None:
        """Let nothing through any more; neither side learns of it."""
        for pump in self.pumps:
            pump.cancel()


class Forwarder:
    """The network between one agent and the coordinator."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._source = HOME
        self._open: set[Connection] = set()
        self._black_holes: set[Connection] = set()
        self._server: asyncio.Server | None = None
        # The source address of each connection so far.
        self.dialled_from: list[str] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, HOME, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for connection in self._open | self._black_holes:
            connection.reset()

    @property
    def address(self) -> str:
        assert self._server is not None
        host, port = self._server.sockets[0].getsockname()
        return f"{host}:{port}"

    def reset_all(self) -> int:
        """From Wi-Fi to cable: every connection is reset, new ones work at once. Returns how many there were."""
        count = len(self._open)
        while self._open:
            self._open.pop().reset()
        return count

    def swallow_all(self) -> int:
        """The address disappears: connections pass nothing any more and never end, new ones come from another.

        The kernel still acknowledges what this process does not read. So it is not TCP that notices.
        """
        count = len(self._open)
        for connection in self._open:
            connection.stop()
        self._black_holes |= self._open
        self._open.clear()
        self._source = AWAY
        return count

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = self._target
        self.dialled_from.append(self._source)
        onward_reader, onward_writer = await asyncio.open_connection(host, port, local_addr=(self._source, 0))
        connection = Connection((writer, onward_writer))
        self._open.add(connection)
        connection.pumps += [
            asyncio.create_task(pump(reader, onward_writer)),
            asyncio.create_task(pump(onward_reader, writer)),
        ]
        await asyncio.wait(connection.pumps)
        if connection in self._open:
            self._open.discard(connection)
            connection.reset()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Carry bytes one way until one side ends; an end is passed on."""
    try:
        while piece := await reader.read(PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()
    except OSError:
        # The other pump meets the same end.
        writer.transport.abort()


@dataclass
class Rig:
    network: DevNetwork
    forwarder: Forwarder
    # What each question is answered with when nothing happens.
    texts: list[str] = field(default_factory=list)


@dataclass
class Reading:
    """One answer as it came: ids, text, and when each piece of them arrived."""

    number: int
    ids: list[int] = field(default_factory=list)
    text: str = ""
    arrived_at: list[float] = field(default_factory=list)
    broken: list[AttemptBroken] = field(default_factory=list)
    # Of each attempt, in order.
    node_ids: list[str] = field(default_factory=list)

    @property
    def longest_gap_s(self) -> float:
        return max(later - earlier for earlier, later in zip(self.arrived_at, self.arrived_at[1:], strict=False))


@pytest.fixture(scope="module")
def vocabulary() -> FakeVocabulary:
    return FakeVocabulary.load(MODELS / MODEL / "tokenizer.json")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig() -> AsyncIterator[Rig]:
    """Three agents, the first of them behind a forwarder, and the answers as they are without a disturbance."""
    # Two of them have room for everything.
    engine = EngineOptions(kind="fake", slots=16, fake_tokens_per_second=TOKENS_PER_SECOND, fake_ttft_ms=20.0)
    async with DevNetwork(agents=3, engine=engine) as network:
        file = network.agent_config(ROAMER).with_suffix("") / IDENTITY_FILE
        identity = json.loads(file.read_bytes())
        host, port = identity["node_address"].rsplit(":", 1)
        async with Forwarder((host, int(port))) as forwarder:
            await network.stop_agent(ROAMER)
            identity["node_address"] = forwarder.address
            write_private(file, json.dumps(identity).encode())
            await network.restart_agent(ROAMER)
            rig = Rig(network, forwarder)
            async with answers(rig) as readings:
                pass
            assert not any(reading.broken for reading in readings)
            rig.texts = [reading.text for reading in readings]
            yield rig


async def read(answer: Answer, reading: Reading) -> None:
    async with answer:
        async for event in answer:
            if isinstance(event, Delta):
                reading.ids.extend(event.token_ids)
                reading.text += event.text
                reading.arrived_at.append(time.monotonic())
            elif isinstance(event, AttemptBroken):
                reading.broken.append(event)
            elif isinstance(event, AttemptStarted):
                reading.node_ids.append(event.node_id)


@asynccontextmanager
async def answers(rig: Rig) -> AsyncIterator[list[Reading]]:
    """Begin the load, yield when each answer has brought ids, and wait for their ends."""
    readings = [Reading(number) for number in range(STREAMS)]
    async with rig.network.client() as client, asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        for reading in readings:
            prompt = [*PROMPT, reading.number]
            answer = client.complete(prompt, model=MODEL, max_tokens=TOKENS, temperature=0.0, seed=SEED)
            group.create_task(read(answer, reading))
        while any(len(reading.ids) < 20 for reading in readings):
            await asyncio.sleep(0.01)
        yield readings


def check_whole(rig: Rig, readings: list[Reading], vocabulary: FakeVocabulary) -> None:
    for reading in readings:
        expected = list(expected_ids([*PROMPT, reading.number], GREEDY, TOKENS, vocabulary))
        assert reading.ids == expected, f"answer {reading.number} differs from the undisturbed one"
        assert reading.text == rig.texts[reading.number]


def roamer(network: DevNetwork) -> str:
    return network.ready.agents[ROAMER].node_id


def welcomes(network: DevNetwork) -> int:
    """Return how often the agent has said so far that it is connected."""
    return network.agent_config(ROAMER).with_suffix(".log").read_text().count("connected to the coordinator")


async def welcomed_again(network: DevNetwork, before: int, since: float) -> float:
    """Wait until the agent is connected once more than before; return the seconds since a moment."""
    async with asyncio.timeout(PATIENCE_S):
        while welcomes(network) == before:
            await asyncio.sleep(0.01)
    return time.monotonic() - since


async def check_works_again(rig: Rig, pid: int, engine_pid: int) -> None:
    """The same processes take new work: no restart was needed, of the agent or of its engine."""
    network = rig.network
    async with network.admin() as admin, asyncio.timeout(PATIENCE_S):
        while True:
            node = next(node for node in await admin.nodes() if node.node_id == roamer(network))
            if node.status == "online":
                break
            await asyncio.sleep(0.05)
    assert [engine.pid for engine in node.engines] == [engine_pid]
    async with answers(rig) as readings:
        pass
    assert any(reading.node_ids == [roamer(network)] for reading in readings)
    assert not any(reading.broken for reading in readings)
    # Written once a second.
    status = json.loads((network.agent_config(ROAMER).with_suffix("") / "status.json").read_bytes())
    assert (network.agent_running(ROAMER), status["pid"], status["connected"]) == (True, pid, True)


@pytest.mark.slow
async def test_answers_and_agent_survive_a_reset_of_all_connections(rig: Rig, vocabulary: FakeVocabulary) -> None:
    """Mutations seen to fail here: resume with the prompt alone; wait for minutes before dialling again."""
    network = rig.network
    agent = network.ready.agents[ROAMER]
    async with answers(rig) as readings:
        before = welcomes(network)
        assert rig.forwarder.reset_all() > 0
        reconnected_s = await welcomed_again(network, before, time.monotonic())
    check_whole(rig, readings, vocabulary)
    struck = [reading for reading in readings if reading.broken]
    assert {broken.reason for reading in struck for broken in reading.broken} == {"stream_lost"}
    assert {reading.node_ids[0] for reading in struck} == {agent.node_id}
    assert max(reading.longest_gap_s for reading in readings) < RESET_GAP_S_MAX
    assert reconnected_s < RECONNECT_S_MAX
    await check_works_again(rig, agent.pid, agent.engine_pid)


@pytest.mark.slow
async def test_answers_and_agent_survive_a_network_that_swallows_everything(
    rig: Rig, vocabulary: FakeVocabulary
) -> None:
    """Mutations seen to fail here: call a node silent after 12 s; never take a silent coordinator for gone."""
    network = rig.network
    agent = network.ready.agents[ROAMER]
    async with answers(rig) as readings:
        before, dials = welcomes(network), len(rig.forwarder.dialled_from)
        assert rig.forwarder.swallow_all() > 0
        swallowed_at = time.monotonic()
    check_whole(rig, readings, vocabulary)
    struck = [reading for reading in readings if reading.broken]
    assert {broken.reason for reading in struck for broken in reading.broken} == {"node_silent"}
    assert {reading.node_ids[0] for reading in struck} == {agent.node_id}
    assert max(reading.longest_gap_s for reading in readings) < BLACK_HOLE_GAP_S_MAX
    # Nothing tells the agent but the coordinator's silence.
    assert await welcomed_again(network, before, swallowed_at) < COORDINATOR_SILENT_S_MAX + RECONNECT_S_MAX
    assert set(rig.forwarder.dialled_from[dials:]) == {AWAY}
    await check_works_again(rig, agent.pid, agent.engine_pid)
