"""What a network of scripts/dev_network.py tells when it is ready."""

import json
from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class AgentReady:
    node_id: str
    pid: int
    engine_pid: int


@dataclass(frozen=True)
class Ready:
    """What a client of the network needs; also the line of JSON. `gateway_url` is without /v1."""

    gateway_url: str
    grpc_address: str
    ca_file: str
    api_key: str = field(repr=False)
    admin_key: str = field(repr=False)
    coordinator_pid: int
    agents: tuple[AgentReady, ...]
    state_dir: str
    model: str


def describe(ready: Ready, *, as_json: bool) -> str:
    if as_json:
        return json.dumps(asdict(ready))
    lines = [f"{key:16} {value}" for key, value in asdict(ready).items() if key != "agents"]
    lines += [
        f"agent            {agent.node_id} pid {agent.pid}, engine pid {agent.engine_pid}" for agent in ready.agents
    ]
    return "\n".join([*lines, "Ctrl-C ends it"])
