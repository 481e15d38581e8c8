"""The agent as a process: its commands, its exit statuses, and what is left of it when it dies."""

import asyncio
import json
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from agent.errors import ExitStatus
from agent.owner.asks import NOTHING_ASKED, describe_asks
from agent.owner.consent import ConsentSettings, describe
from agent.testing import NODE_ID, PATIENCE_S, write_model
from agent.testing_coordinator import AgentStream, ScriptedCoordinator
from protos.slackwater.common.v1 import capability_pb2, verdict_pb2
from protos.slackwater.node.v1 import node_service_pb2

CONFIG = """
state_dir = "state"
label = "a machine"
[owner]
mode = "always"
[consent]
models_denied = ["*-uncensored"]
[[engines]]
engine_id = "main"
kind = "fake"
model_directory = "model"
slots = 2
"""


@dataclass(frozen=True, slots=True)
class Ended:
    status: int
    out: str
    err: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A directory with a configuration, and the commands on it."""

    path: Path
    coordinator: ScriptedCoordinator
    processes: list[asyncio.subprocess.Process] = field(default_factory=list)

    async def call(self, *arguments: str, stdin: str = "", **environment: str) -> Ended:
        process = await self._start(*arguments, **environment)
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate(stdin.encode())
        assert process.returncode is not None
        return Ended(process.returncode, out.decode(), err.decode())

    async def join(self) -> Ended:
        return await self.call(
            "join", "--config", "agent.toml", "--file", "-", "--yes", stdin=self.coordinator.join_string
        )

    async def run(self) -> asyncio.subprocess.Process:
        return await self._start("run", "--config", "agent.toml")

    async def ready_stream(self) -> tuple[AgentStream, int]:
        """Return the stream of a running agent, and the pid of its engine."""
        async with asyncio.timeout(PATIENCE_S):
            stream = await self.coordinator.welcomed_stream()
            while True:
                for engine in (await stream.next("state")).state.engines:
                    if engine.status == capability_pb2.ENGINE_STATUS_READY:
                        return stream, engine.pid

    async def _start(self, *arguments: str, **environment: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "agent",
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1", **environment},
        )
        self.processes.append(process)
        return process

    async def clear_up(self) -> None:
        """End what a failed test has left; an agent takes its engine with it."""
        for process in self.processes:
            if process.returncode is None:
                process.terminate()
                await process.communicate()


@pytest.fixture
async def machine(tmp_path: Path) -> AsyncIterator[Machine]:
    async with ScriptedCoordinator().serve() as coordinator:
        write_model(tmp_path / "model", coordinator.release_key)
        (tmp_path / "agent.toml").write_text(CONFIG)
        machine = Machine(tmp_path, coordinator)
        yield machine
        await machine.clear_up()


async def test_a_machine_joins_serves_tells_its_status_and_stops(machine: Machine) -> None:
    joined = await machine.join()
    assert (joined.status, joined.err) == (0, "")
    assert joined.out.endswith(f"\njoined as node {NODE_ID}\n")
    agent = await machine.run()
    _, engine_pid = await machine.ready_stream()

    told = await machine.call("status", "--config", "agent.toml", "--json")
    while not told.out or json.loads(told.out)["engines"][0]["status"] != "ready":
        told = await machine.call("status", "--config", "agent.toml", "--json")
    status = json.loads(told.out)
    assert (status["node_id"], status["pid"], status["connected"]) == (NODE_ID, agent.pid, True)
    assert status["engines"][0]["pid"] == engine_pid
    second = await machine.call("run", "--config", "agent.toml")
    assert second.status == ExitStatus.CONFIG_INVALID
    assert "another agent runs" in second.err

    agent.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        assert await agent.wait() == ExitStatus.STOPPED
    assert not runs(engine_pid)
    assert (await machine.call("status", "--config", "agent.toml")).status == ExitStatus.NOT_RUNNING


async def test_sigterm_while_the_coordinator_is_away_ends_the_agent(machine: Machine) -> None:
    await machine.join()
    agent = await machine.run()
    stream, _ = await machine.ready_stream()
    stream.end()
    await machine.coordinator.next_stream()
    agent.send_signal(signal.SIGTERM)
    async with asyncio.timeout(PATIENCE_S):
        assert await agent.wait() == ExitStatus.STOPPED


def runs(pid: int) -> bool:
    """Whether a process computes; one that waits for init to collect it does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


async def test_no_engine_outlives_a_killed_agent_for_long(machine: Machine) -> None:
    await machine.join()
    agent = await machine.run()
    _, engine_pid = await machine.ready_stream()
    agent.kill()
    await agent.wait()
    again = await machine.run()
    _, next_engine_pid = await machine.ready_stream()
    assert not runs(engine_pid)
    assert next_engine_pid != engine_pid
    again.terminate()
    assert await again.wait() == ExitStatus.STOPPED


async def test_a_frozen_coordinator_loses_nothing(machine: Machine) -> None:
    """SIGSTOP of a coordinator for ten seconds, in small: heartbeats go unanswered, the stream stays."""
    await machine.join()
    agent = await machine.run()
    stream, _ = await machine.ready_stream()
    stream.answer_heartbeats = False
    for _ in range(5):
        await stream.next("heartbeat")
    assert not stream.ended.is_set()
    agent.terminate()
    await agent.wait()


async def test_a_superseded_agent_says_so_and_does_not_come_back(machine: Machine) -> None:
    await machine.join()
    agent = await machine.run()
    stream, _ = await machine.ready_stream()
    reason = node_service_pb2.CLOSING_REASON_SUPERSEDED
    stream.say(closing=node_service_pb2.Closing(reason=reason, detail="boot 2"))
    async with asyncio.timeout(PATIENCE_S):
        _, err = await agent.communicate()
    assert agent.returncode == ExitStatus.SUPERSEDED
    assert err.decode().splitlines()[-1] == (
        "slackwater-agent: a newer agent with this identity has connected (boot 2)"
    )


async def test_whoever_joins_reads_first_what_the_fleet_and_this_machine_accept(machine: Machine) -> None:
    """Mutation seen to fail: `agree` called after the keys are made; `agree` that only prints."""
    coordinator = machine.coordinator
    silent = await machine.call("join", "--config", "agent.toml", SLACKWATER_JOIN=coordinator.join_string)
    assert silent.status == ExitStatus.CONFIG_INVALID
    assert silent.err == (
        "slackwater-agent: nothing was joined: nobody can be asked here; read the terms above, then give --yes\n"
    )
    assert "  abuse contact   this fleet names no abuse contact\n" in silent.out
    assert "  content policy  this fleet names no content policy\n" in silent.out
    assert not coordinator.token_used
    assert not list((machine.path / "state").glob("*pending*"))

    coordinator.abuse_contact = "abuse@fleet.example\x1b[2J"
    coordinator.content_policy = "https://fleet.example/policy"
    joined = await machine.join()
    assert joined.status == 0, joined.err
    assert joined.out.splitlines() == [
        "Fleet cluster-under-test",
        "  abuse contact   abuse@fleet.example [2J",
        "  content policy  https://fleet.example/policy",
        "",
        *describe(ConsentSettings(models_denied=("*-uncensored",))),
        *describe_asks(NOTHING_ASKED),
        "",
        f"joined as node {NODE_ID}",
    ]


@pytest.mark.parametrize(("answer", "status"), [("y", 0), ("", ExitStatus.ENROLMENT_REFUSED)])
async def test_an_owner_at_a_terminal_is_asked(machine: Machine, answer: str, status: int) -> None:
    (machine.path / "join").write_text(machine.coordinator.join_string)
    ours, theirs = pty.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "agent", "join", "--config", "agent.toml", "--file", "join"),
            stdin=theirs,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=machine.path,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        machine.processes.append(process)
        os.write(ours, f"{answer}\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            out, err = await process.communicate()
    finally:
        os.close(ours)
        os.close(theirs)
    assert process.returncode == status, err
    assert b"Join this fleet on these terms? [y/N] " in out
    assert machine.coordinator.token_used is (status == 0)


async def test_every_mistake_of_the_operator_is_one_line_and_a_status(machine: Machine) -> None:
    not_joined = await machine.call("run", "--config", "agent.toml")
    assert (not_joined.status, len(not_joined.err.splitlines())) == (ExitStatus.NOT_JOINED, 1)
    missing = await machine.call("run", "--config", "none.toml")
    assert (missing.status, len(missing.err.splitlines())) == (ExitStatus.CONFIG_INVALID, 1)
    no_string = await machine.call("join", "--config", "agent.toml")
    assert (no_string.status, len(no_string.err.splitlines())) == (ExitStatus.CONFIG_INVALID, 1)
    garbage = await machine.call("join", "--config", "agent.toml", SLACKWATER_JOIN="garbage")
    assert (garbage.status, len(garbage.err.splitlines())) == (ExitStatus.ENROLMENT_REFUSED, 1)
    machine.coordinator.token_used = True
    used = await machine.join()
    assert used.status == ExitStatus.ENROLMENT_REFUSED
    assert used.err == "slackwater-agent: the coordinator refuses: this join string was used already\n"
    assert (await machine.call("check-config", "--config", "agent.toml")).status == 0


async def test_a_model_with_one_altered_byte_is_refused_by_name(machine: Machine) -> None:
    await machine.join()
    tokenizer = machine.path / "model" / "tokenizer.json"
    tokenizer.write_text("[]")
    ended = await machine.call("run", "--config", "agent.toml")
    assert ended.status == ExitStatus.NO_ENGINE
    assert "tokenizer.json" in ended.err.splitlines()[-1]


async def test_an_owner_reads_why_its_node_is_quarantined_and_appeals(machine: Machine) -> None:
    await machine.join()
    nothing = await machine.call("why", "--config", "agent.toml")
    assert (nothing.status, nothing.out.startswith("no verdict yet: this node is in probation")) == (0, True)
    evidence = verdict_pb2.AuditEvidence(
        audit_id="audit-7", kind="rescore", tokens=120, log_evidence=8.5, hard="rank", detail='{"mean_margin": 0.2}'
    )
    machine.coordinator.verdicts = [
        verdict_pb2.Verdict(
            verdict_id="verdict-1",
            manifest_digest="sha256:abc",
            state="quarantined",
            previous="watch",
            reason="rescore failed by rank, confirmed by a second verifier",
            log_evidence=8.5,
            evidence=[evidence],
        )
    ]
    why = await machine.call("why", "--config", "agent.toml")
    assert why.out.splitlines() == [
        "1970-01-01 00:00:00  watch -> quarantined  verdict-1",
        "    sha256:abc: rescore failed by rank, confirmed by a second verifier",
        "    1970-01-01 00:00:00  audit-7  rescore, broke rank, 120 tokens, +8.50 nats, mean_margin 0.2",
    ]
    told = json.loads((await machine.call("why", "--config", "agent.toml", "--json")).out)
    assert told["verdicts"][0]["evidence"][0]["detail"] == {"mean_margin": 0.2}

    taken_up = await machine.call("appeal", "verdict-1", "--config", "agent.toml")
    assert (taken_up.status, "against verdict-1 is taken up" in taken_up.out) == (0, True)
    refused = await machine.call("appeal", "verdict-2", "--config", "agent.toml")
    assert (refused.status, refused.err) == (
        ExitStatus.CONFIG_INVALID,
        "slackwater-agent: no appeal against verdict-2: the coordinator refuses: there is no such verdict\n",
    )
    machine.coordinator.banned = True
    banned = await machine.call("why", "--config", "agent.toml")
    assert (banned.status, "has banned this node" in banned.err) == (ExitStatus.BANNED, True)
