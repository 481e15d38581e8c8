"""A network whose coordinator audits, with agents that are honest and engines that may not be.

For tests and the demo. Each agent is as it is installed; only the program that it takes for a Python interpreter starts
cheating_engine.py. What the coordinator has found is read from its database.
"""

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
import msgspec
from dev_network import DevNetwork
from network_settings import ENVIRONMENTS, MODELS, RELEASE_KEY, ROOT, EngineOptions
from slackwater import AsyncClient, AttemptStarted
from verification_figures import calibrate, honest_pool

from inference.calibration import encode_calibration
from inference.canaries import Canary, encode_bank, read_bank
from inference.manifest import load_release_public_key, read_manifest
from inference.model_files import CALIBRATION_FILE, CANARIES_FILE
from protos.slackwater.fleet.v1 import fleet_service_pb2 as fleet
from protos.slackwater.fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

MODEL = "smollm2-135m-instruct"
RECORD = ROOT / "tests" / "golden" / "verification"
BANK = ROOT / "tests" / "golden" / "cheats" / CANARIES_FILE
CHEATING_ENGINE = Path(__file__).with_name("cheating_engine.py")
TORCH = ROOT / ENVIRONMENTS["torch"] / "bin" / "python"
VLLM = ROOT / ENVIRONMENTS["vllm"] / "bin" / "python"
# The answers of the bank are cut off here: every cheat parts from them within a dozen ids, and what an engine writes
# after that only takes time. Ten of them are still as many ids as a node has to show before it is trusted.
CANARY_TOKENS = 32
QUESTION = "Write a short story about a lighthouse keeper and the tide."
POLL_S = 0.5
# Of an id, and of a float32.
PACKED_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Engines(EngineOptions):
    """An engine for each agent: which Python starts it, and how many sequences it runs at once."""

    directory: Path
    programs: tuple[Path, ...]
    slots_of: tuple[int, ...] = ()
    kind: str = "torch"

    @property
    def model_directory(self) -> Path:
        return self.directory

    def settings(self, index: int = 0, agents: int = 1) -> dict[str, object]:
        program = self.programs[index]
        slots = self.slots_of[index] if self.slots_of else self.slots
        kind = "vllm" if program == VLLM else "torch"
        return super().settings(index, agents) | {"python": str(program), "slots": slots, "kind": kind}


@dataclass(frozen=True)
class Audit:
    """A row of the coordinator's `audits`."""

    audit_id: str
    kind: str
    tokens: int
    log_evidence: float
    hard: str | None
    not_measured: str | None
    at_ms: int


@dataclass(frozen=True)
class Verdict:
    state: str
    shadow: bool
    at_ms: int


class AuditedNetwork(DevNetwork):
    """A network whose rules in shadow are set before the first agent joins."""

    def __init__(
        self,
        engines: Engines,
        *,
        shadow: Sequence[str] = (),
        agent_program: Sequence[str] = ("-m", "agent"),
        coordinator_program: Sequence[str] = ("-m", "coordinator"),
        say: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(
            agents=len(engines.programs),
            engine=engines,
            agent_program=agent_program,
            coordinator_program=coordinator_program,
            say=say,
        )
        self._shadow = shadow

    async def _start_agents(self, admin: AsyncClient, environment: dict[str, str]) -> None:
        for rule in self._shadow:
            await self.set_mode(rule, fleet.VERIFICATION_MODE_SHADOW)
        await super()._start_agents(admin, environment)

    async def set_mode(self, rule: str, mode: "fleet.VerificationMode.ValueType") -> None:
        """Put a rule in force, or into shadow."""
        ca_pem = await asyncio.to_thread(Path(self.ready.ca_file).read_bytes)
        credentials = grpc.ssl_channel_credentials(ca_pem)
        async with grpc.aio.secure_channel(self.ready.grpc_address, credentials) as channel:
            await FleetServiceStub(channel).SetVerificationMode(
                fleet.SetVerificationModeRequest(rule=rule, mode=mode),
                metadata=(("authorization", f"Bearer {self.ready.admin_key}"),),
            )

    def audits(self, index: int, kind: str) -> list[Audit]:
        """Return what has been measured of an agent, by time."""
        rows = self._rows("SELECT audit_id, kind, tokens, log_evidence, hard, not_measured, at_ms FROM audits", index)
        return [audit for row in rows if (audit := Audit(*row)).kind == kind and audit.not_measured is None]

    def audits_of_resumed(self) -> int:
        """Return how many attempts were audited that were not the first of their task."""
        ids = [audit.audit_id for index in range(len(self.ready.agents)) for audit in self.audits(index, "rescore")]
        return sum(not audit_id.endswith(".1") for audit_id in ids)

    def verdicts(self, index: int) -> list[Verdict]:
        return [
            Verdict(row[0], bool(row[1]), row[2])
            for row in self._rows("SELECT state, shadow, at_ms FROM verdicts", index)
        ]

    def state(self, index: int) -> str:
        """Return the verdict in force; before the first that is probation."""
        states = [verdict.state for verdict in self.verdicts(index) if not verdict.shadow]
        return states[-1] if states else "probation"

    def found(self, index: int, kind: str, *, shadow: bool = False, since_ms: int = 0) -> "Found | None":
        """Return after how many audits of this kind an agent was quarantined, or would have been."""
        times = [one.at_ms for one in self.verdicts(index) if one.state == "quarantined" and one.shadow is shadow]
        if not times or times[-1] < since_ms:
            return None
        audits = [audit for audit in self.audits(index, kind) if since_ms <= audit.at_ms <= times[-1]]
        return Found(len(audits), sum(audit.tokens for audit in audits))

    def query(self, query: str, *values: str) -> list[tuple]:  # type: ignore[type-arg]  # As SQLite gives them.
        """Read from the coordinator's database. Blocks."""
        path = Path(self.ready.state_dir) / "coordinator" / "coordinator.db"
        with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as connection:
            return connection.execute(query, values).fetchall()

    def _rows(self, query: str, index: int) -> list[tuple]:  # type: ignore[type-arg]
        return self.query(f"{query} WHERE node_id = ? ORDER BY at_ms", self.ready.agents[index].node_id)

    async def until(self, reached: Callable[[], bool], timeout_s: float) -> None:
        """Wait until the coordinator's records say so."""
        end_s = time.monotonic() + timeout_s
        while not await asyncio.to_thread(reached):
            assert time.monotonic() < end_s, self.story()
            await asyncio.sleep(POLL_S)

    def story(self) -> str:
        """Return what is on record of every agent, for a test that fails."""
        lines = []
        for index in range(len(self.ready.agents)):
            states = [("shadow " if one.shadow else "") + one.state for one in self.verdicts(index)]
            for kind in ("canary", "score", "rescore", "peer"):
                audits = [f"{one.log_evidence:+.1f}/{one.tokens}{one.hard or ''}" for one in self.audits(index, kind)]
                lines.append(f"agent {index} {states} {kind} {len(audits)}: {' '.join(audits)}")
        return "\n".join(lines)

    async def ask(self, client: AsyncClient, number: int, max_tokens: int) -> list[str]:
        """Ask the network a question and return which nodes have worked on it."""
        answer = client.chat(
            f"{QUESTION} Number {number}.", model=MODEL, temperature=1.0, seed=number, max_tokens=max_tokens
        )
        return [event.node_id async for event in answer if isinstance(event, AttemptStarted)]

    async def ask_many(self, count: int, first: int = 0, max_tokens: int = 32) -> set[int]:
        """Ask some questions at once and return which agents have worked on them."""
        async with self.client() as client:
            nodes = await asyncio.gather(*(self.ask(client, first + number, max_tokens) for number in range(count)))
        return {self.index_of(node_id) for worked in nodes for node_id in worked}


@dataclass(frozen=True)
class Found:
    """What it took until a node was quarantined."""

    audits: int
    tokens: int


def shortened(canary: Canary) -> Canary:
    """Return a canary whose answer is over after CANARY_TOKENS ids."""
    listed = PACKED_BYTES * CANARY_TOKENS
    return msgspec.structs.replace(
        canary,
        max_tokens=min(canary.max_tokens, CANARY_TOKENS),
        output=canary.output[:listed],
        candidates=canary.candidates[: listed * canary.top],
        logprobs=canary.logprobs[: listed * canary.top],
    )


class Workshop:
    """Makes models and programs, each once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def model(self) -> Path:
        """Return a copy of the real model, with what its record says of honest output, and a bank, beside it."""
        directory = self._folder / MODEL
        if directory.exists():
            return directory
        shutil.copytree(MODELS / MODEL, directory)
        manifest = read_manifest(directory, [load_release_public_key(RELEASE_KEY)])
        calibration = calibrate(
            honest_pool(RECORD), digest=manifest.digest, model=MODEL, dtype=manifest.dtype, verifier="torch float32"
        )
        (directory / CALIBRATION_FILE).write_bytes(encode_calibration(calibration))
        bank = read_bank(BANK, manifest.digest)
        canaries = [*bank.to_score, *map(shortened, bank.to_answer)]
        (directory / CANARIES_FILE).write_bytes(encode_bank(msgspec.structs.replace(bank, canaries=tuple(canaries))))
        return directory

    def python(self, cheat: str) -> Path:
        """Return what an agent takes for a Python interpreter: one, or what starts an engine that cheats."""
        if cheat in ("honest", "vllm"):
            return TORCH if cheat == "honest" else VLLM
        program = self._folder / cheat
        if not program.exists():
            weights = self._weights(cheat) if cheat in ("int4", "int8", "dropped-layer") else None
            named = "weights" if weights else cheat
            program.write_text(f'#!/bin/sh\nexec {TORCH} -P {CHEATING_ENGINE} {named} {weights} "$@"\n')
            program.chmod(0o700)
        return program

    def engines(self, *cheats: str, slots_of: tuple[int, ...] = ()) -> Engines:
        """Return what agents run, one each: a cheat of cheating_engine.py, altered weights, "honest" or "vllm"."""
        programs = tuple(self.python(cheat) for cheat in cheats)
        return Engines(directory=self.model(), programs=programs, slots_of=slots_of)

    def _weights(self, alteration: str) -> Path:
        directory = self._folder / f"{alteration}-weights"
        script = ROOT / "scripts" / "altered_models.py"
        command = map(str, [TORCH, script, MODELS / MODEL, alteration, directory])
        subprocess.run([*command], check=True, capture_output=True)
        return directory
