"""A whole network on this machine: one coordinator and some agents, as separate processes on free ports.

    dev_network.py --agents 3 --engine fake --json

Every agent joins with a join string of its own, of an owner of its own unless told otherwise, and
speaks mutual TLS, as it would over the internet. When all engines are ready,
one line of JSON goes to standard output; progress and troubles go to standard
error. The network runs until SIGTERM or SIGINT and then leaves no process and
no file. A process that dies in between is told of and stays dead: killing
agents from outside is one of the uses. Configurations, logs and databases lie
in `state_dir`; `slackwater-coordinator run --config STATE_DIR/coordinator.toml`
starts a killed coordinator again.

Tests, demo and benchmarks use `DevNetwork`, which can also kill, freeze and
restart what it started.
"""

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from child_process import MARKER_VARIABLE, ChildFailed, ChildProcess, deadline, kill_marked
from network_ready import AgentReady, Ready, describe
from network_settings import (
    ENVIRONMENTS,
    EngineOptions,
    NetworkError,
    agent_config,
    clean_environment,
    coordinator_config,
    gpu_uuids,
    require,
    write_private,
)
from slackwater import AsyncClient, Node, Owner, RetryableError, SlackwaterError

# A coordinator makes keys, a database and two ports: a second, or ten on a machine that is busy.
COORDINATOR_START_S = 60.0
# One handshake and two calls, by a Python that imports gRPC first.
JOIN_S = 60.0
# As `--yes`, which agents of earlier releases do not know.
ACCEPT_TERMS = {"SLACKWATER_ACCEPT_TERMS": "1"}
# Until the first real token: vLLM takes a minute on a processor, several on a GPU with a cold cache.
ENGINE_START_S = {"fake": 90.0, "torch": 300.0, "vllm": 900.0}
POLL_S = 0.1


class DevNetwork:
    """A coordinator and its agents for as long as the `async with` block runs.

        async with DevNetwork(agents=3, engine=EngineOptions(kind="fake")) as network:
            async with network.client() as client:
                ...
            await network.kill_agent(0)

    Agents are counted from 0. Raises NetworkError where it does not come up.
    """

    def __init__(
        self,
        *,
        agents: int = 3,
        agents_per_owner: int = 1,
        engine: EngineOptions | None = None,
        agent_source: Path | None = None,
        agent_program: Sequence[str] = ("-m", "agent"),
        coordinator_program: Sequence[str] = ("-m", "coordinator"),
        configure: Callable[[int, str], str] | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self._count = agents
        self._per_owner = agents_per_owner
        # Where the agents' code lies; None for this tree. For agents of an earlier release.
        self._agent_source = agent_source
        # What Python runs as `slackwater-agent` and `slackwater-coordinator`; tests put something before it.
        self._agent_program = tuple(agent_program)
        self._coordinator_program = tuple(coordinator_program)
        # Changes the configuration of an agent, counted from 0, before it is written.
        self._configure = configure or (lambda index, text: text)
        self._engine = engine or EngineOptions()
        if self._engine.kind == "vllm":
            self._engine = replace(self._engine, gpu_uuids=gpu_uuids())
        self._say = say or say_on_stderr
        self._state_dir = Path()
        self._ready: Ready | None = None
        self._coordinator: ChildProcess | None = None
        self._agents: list[ChildProcess] = []

    async def __aenter__(self) -> Self:
        require(self._engine)
        # Short, since engines put Unix sockets below it.
        self._state_dir = Path(tempfile.mkdtemp(prefix="sw-dev-"))
        try:
            await self._start()
        except BaseException as error:
            await self._clean_up()
            if isinstance(error, ChildFailed | SlackwaterError):
                raise NetworkError(str(error)) from error
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._clean_up()

    @property
    def ready(self) -> Ready:
        """The network as it came up, with the process ids of later restarts."""
        assert self._ready is not None, "the network is not up"
        return self._ready

    def client(self) -> AsyncClient:
        """Return a client with the tenant's key; closing it is the caller's."""
        return AsyncClient(self.ready.grpc_address, api_key=self.ready.api_key, ca_file=self.ready.ca_file)

    def admin(self) -> AsyncClient:
        """Return a client with the administrator's key; closing it is the caller's."""
        return AsyncClient(self.ready.grpc_address, api_key=self.ready.admin_key, ca_file=self.ready.ca_file)

    def index_of(self, node_id: str) -> int:
        """Return which agent a node is."""
        return [agent.node_id for agent in self.ready.agents].index(node_id)

    def agent_running(self, index: int) -> bool:
        return self._agents[index].running

    def agent_log(self, index: int) -> str:
        """Return the last lines of an agent's log."""
        return self._agents[index].tail()

    def coordinator_log(self) -> str:
        assert self._coordinator is not None
        return self._coordinator.tail()

    async def kill_agent(self, index: int) -> None:
        """SIGKILL an agent; its engine dies with it."""
        await self._agents[index].kill()

    def signal_agent(self, index: int, number: signal.Signals) -> None:
        """Send any signal: SIGSTOP freezes an agent, SIGCONT wakes it."""
        self._agents[index].send(number)

    async def stop_agent(self, index: int) -> None:
        """SIGTERM an agent and wait for its end."""
        await self._agents[index].stop()

    async def restart_agent(self, index: int) -> None:
        """Start an agent that has ended, and wait until its engine is ready."""
        old = self.ready.agents[index]
        await self._agents[index].start()
        async with self.admin() as admin:
            engine_pids = await self._wait_for_engines(admin, {old.node_id: index}, stale={old.engine_pid})
        agents = list(self.ready.agents)
        agents[index] = AgentReady(old.node_id, self._agents[index].pid, engine_pids[old.node_id])
        self._ready = replace(self.ready, agents=tuple(agents))

    def agent_config(self, index: int) -> Path:
        """Return the configuration file of an agent."""
        return Path(self.ready.state_dir) / f"agent-{index + 1}.toml"

    async def agent_command(self, index: int, *arguments: str) -> str:
        """Run a command of `slackwater-agent` on an agent's machine and return what it prints.

        Raises:
            NetworkError: it failed; with what it said.
        """
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, *self._agent_program, *arguments, "--config", str(self.agent_config(index))),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=clean_environment(),
        )
        out, err = await process.communicate()
        if process.returncode:
            raise NetworkError(f"{' '.join(arguments)}: {err.decode().strip()}")
        return out.decode()

    async def kill_coordinator(self) -> None:
        assert self._coordinator is not None
        await self._coordinator.kill()

    def signal_coordinator(self, number: signal.Signals) -> None:
        assert self._coordinator is not None
        self._coordinator.send(number)

    async def restart_coordinator(self) -> None:
        """Start a coordinator that has ended, on its old state and ports, and wait until it answers."""
        assert self._coordinator is not None
        await self._coordinator.start()
        async with self.admin() as admin:
            await self._wait_for_coordinator(self._coordinator, admin)
        self._ready = replace(self.ready, coordinator_pid=self._coordinator.pid)

    async def deaths(self) -> AsyncIterator[str]:
        """Yield a line for each process that ends; never ends itself."""
        told: set[int] = set()
        while True:
            for child in [self._coordinator, *self._agents]:
                if child is not None and child.status is not None and child.pid not in told:
                    told.add(child.pid)
                    yield f"{child.name} (pid {child.pid}) ended with status {child.status}"
            await asyncio.sleep(POLL_S)

    async def _start(self) -> None:
        state = self._state_dir
        home = state / "coordinator"
        runtime = state / "run"
        runtime.mkdir(mode=0o700)
        environment = {**clean_environment(), MARKER_VARIABLE: str(state), "XDG_RUNTIME_DIR": str(runtime)}
        config = state / "coordinator.toml"
        write_private(config, coordinator_config(home, self._engine))
        coordinator = self._child("coordinator", "coordinator", ["run", "--config", config], environment)
        self._coordinator = coordinator
        self._say("starting the coordinator")
        await coordinator.start()
        addresses = json.loads(await self._read_when_there(home / "addresses.json", coordinator))
        public, node, gateway = (addresses[key] for key in ("public_port", "node_port", "gateway_port"))
        # Agents and clients know these ports, so a restarted coordinator must take them again.
        config.write_text(coordinator_config(home, self._engine, (public, node, gateway)))
        ready = Ready(
            gateway_url=f"http://127.0.0.1:{gateway}",
            grpc_address=f"127.0.0.1:{public}",
            ca_file=str(home / "ca.pem"),
            api_key="",
            admin_key=(await self._read_when_there(home / "admin.key", coordinator)).strip(),
            coordinator_pid=coordinator.pid,
            agents=(),
            state_dir=str(state),
            model=self._engine.model_directory.name,
        )
        self._ready = ready
        async with self.admin() as admin:
            await self._wait_for_coordinator(coordinator, admin)
            self._ready = replace(ready, api_key=(await admin.create_api_key("dev")).secret)
            await self._start_agents(admin, environment)

    async def _start_agents(self, admin: AsyncClient, environment: dict[str, str]) -> None:
        self._say(f"enrolling {self._count} agents, each with a join string of its own")
        owners = [
            await admin.create_owner(f"owner-{number}") for number in range(1, self._count // self._per_owner + 1)
        ]
        configs = [
            await self._write_agent(admin, index + 1, owners[index // self._per_owner]) for index in range(self._count)
        ]
        async with asyncio.TaskGroup() as group:
            for number, config in enumerate(configs, start=1):
                arguments: list[str | Path] = ["join", "--config", config, "--file", config.with_suffix(".join")]
                child = self._child(f"agent {number} (join)", "agent", arguments, environment | ACCEPT_TERMS)
                group.create_task(child.run(JOIN_S))
        labels = {node.label: node.node_id for node in await admin.nodes()}
        for number, config in enumerate(configs, start=1):
            self._agents.append(self._child(f"agent {number}", "agent", ["run", "--config", config], environment))
            await self._agents[-1].start()
        nodes = {labels[f"agent-{number}"]: number - 1 for number in range(1, self._count + 1)}
        engine_pids = await self._wait_for_engines(admin, nodes, stale=set())
        agents = tuple(AgentReady(node_id, self._agents[nodes[node_id]].pid, engine_pids[node_id]) for node_id in nodes)
        self._ready = replace(self.ready, agents=agents)

    async def _write_agent(self, admin: AsyncClient, number: int, owner: Owner) -> Path:
        """Write configuration and join string of an agent; return the path of the former."""
        name = f"agent-{number}"
        join = await admin.create_join_string(owner.owner_id)
        config = self._state_dir / f"{name}.toml"
        table = self._engine.settings(number - 1, self._count)
        text = agent_config(self._state_dir / name, name, table)
        write_private(config, self._configure(number - 1, text))
        write_private(config.with_suffix(".join"), join.join_string + "\n")
        return config

    def _child(self, name: str, module: str, arguments: list[str | Path], environment: dict[str, str]) -> ChildProcess:
        log = self._state_dir / f"{name.split(' (')[0].replace(' ', '-')}.log"
        # `python -m` looks into its working directory before the installed packages.
        source = self._agent_source if module == "agent" else None
        program = self._agent_program if module == "agent" else self._coordinator_program
        return ChildProcess(name, [sys.executable, *program, *arguments], log, environment, source)

    async def _read_when_there(self, path: Path, coordinator: ChildProcess) -> str:
        """Wait for a file that the coordinator writes at its start; it writes files whole or not at all."""
        async with deadline(COORDINATOR_START_S, f"the coordinator makes no {path.name}", coordinator):
            while not await asyncio.to_thread(path.exists):
                coordinator.check()
                await asyncio.sleep(POLL_S)
            return await asyncio.to_thread(path.read_text)

    async def _wait_for_coordinator(self, coordinator: ChildProcess, admin: AsyncClient) -> None:
        async with deadline(COORDINATOR_START_S, "the coordinator does not answer", coordinator):
            while True:
                coordinator.check()
                try:
                    await admin.owners()
                except RetryableError:
                    await asyncio.sleep(POLL_S)
                else:
                    return

    async def _wait_for_engines(
        self, admin: AsyncClient, nodes: dict[str, int], *, stale: Collection[int]
    ) -> dict[str, int]:
        """Wait until each node has a ready engine that is none of the stale processes; return their process ids."""
        self._say(f"waiting for {len(nodes)} {self._engine.kind} engine(s)")
        ready: dict[str, int] = {}
        timeout_s = ENGINE_START_S[self._engine.kind]
        async with deadline(timeout_s, "not all engines are ready", *(self._agents[i] for i in nodes.values())):
            while nodes.keys() - ready.keys():
                for node in await admin.nodes():
                    self._note_engine(node, nodes, stale, ready)
                for index in nodes.values():
                    self._agents[index].check()
                await asyncio.sleep(POLL_S)
        return ready

    def _note_engine(self, node: Node, nodes: dict[str, int], stale: Collection[int], ready: dict[str, int]) -> None:
        if node.node_id not in nodes or node.node_id in ready or node.status != "online":
            return
        for engine in node.engines:
            if engine.status == "failed":
                raise NetworkError(
                    f"the engine of {node.label} failed: {engine.note}\n{self._agents[nodes[node.node_id]].tail()}"
                )
            unplaced = engine.open is not None and not engine.model
            if unplaced or (engine.status == "ready" and engine.pid not in stale):
                ready[node.node_id] = engine.pid
                self._say(f"{node.label} is ready: {engine.kind} engine, {engine.tokens_per_second:.0f} tokens/s")

    async def _clean_up(self) -> None:
        async with asyncio.TaskGroup() as group:
            for agent in self._agents:
                group.create_task(agent.stop())
        if self._coordinator is not None:
            await self._coordinator.stop()
        left = await asyncio.to_thread(kill_marked, self._state_dir)
        if left:
            self._say(f"killed {len(left)} process(es) that were left over")
        await asyncio.to_thread(shutil.rmtree, self._state_dir)


def say_on_stderr(message: str) -> None:
    print(f"[network] {message}", file=sys.stderr, flush=True)


async def serve(options: argparse.Namespace) -> None:
    """Run a network until a signal comes; a signal during the start ends it too."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        # A second signal must not break into the clean-up.
        asyncio.get_running_loop().add_signal_handler(number, stop_once(task))
    engine = EngineOptions(
        kind=options.engine,
        slots=options.slots,
        fake_tokens_per_second=options.fake_tokens_per_second,
        fake_ttft_ms=options.fake_ttft_ms,
    )
    async with DevNetwork(agents=options.agents, engine=engine) as network:
        print(describe(network.ready, as_json=options.json), flush=True)
        async for death in network.deaths():
            say_on_stderr(death)


def stop_once(task: "asyncio.Task[None]") -> Callable[[], None]:
    """Return a signal handler that cancels a task the first time it is called."""

    def stop() -> None:
        if not task.cancelling():
            task.cancel()

    return stop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--engine", choices=list(ENVIRONMENTS), default="fake")
    parser.add_argument("--slots", type=int, default=8, help="sequences that each engine runs at once")
    parser.add_argument("--fake-tokens-per-second", type=float, default=100.0)
    parser.add_argument("--fake-ttft-ms", type=float, default=20.0)
    parser.add_argument("--json", action="store_true", help="print one line of JSON when it is ready")
    options = parser.parse_args()
    if options.agents < 1:
        parser.error("--agents must be at least 1")
    try:
        asyncio.run(serve(options))
    except asyncio.CancelledError:
        say_on_stderr("ended")
    except NetworkError as error:
        sys.exit(f"dev_network: {error}")


if __name__ == "__main__":
    main()
