"""The fleet as its operator sees it. What a node says of itself is self-reported, never evidence."""

from dataclasses import dataclass
from typing import Generic, TypeVar

Value = TypeVar("Value", float, str)


@dataclass(frozen=True, slots=True)
class Reading(Generic[Value]):
    """A value, or why there is none: "ok", "unsupported", "denied", "timeout", "lost", "error", "unspecified"."""

    status: str
    # None unless the status is "ok".
    value: Value | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    uuid: Reading[str]
    name: Reading[str]
    memory_total_bytes: Reading[float]
    memory_free_bytes: Reading[float]
    compute_capability: Reading[str]
    driver_version: Reading[str]
    power_draw_w: Reading[float]
    power_limit_w: Reading[float]
    power_limit_min_w: Reading[float]
    power_limit_max_w: Reading[float]
    energy_mj: Reading[float]
    temperature_c: Reading[float]
    clock_graphics_mhz: Reading[float]
    clock_memory_mhz: Reading[float]
    utilization_percent: Reading[float]
    pcie_generation: Reading[float]
    pcie_generation_max: Reading[float]
    pcie_width: Reading[float]
    unified_memory: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    operating_system: str
    cpu_model: str
    cpu_cores: int
    memory_total_bytes: int
    memory_free_bytes: int
    # Why there is no GPU, where there is none.
    gpu_note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Millionths of a credit per 1,000 tokens of prompt and of answer."""

    prompt_micro: int
    completion_micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEngine:
    """How an engine stands whose model its owner leaves to the fleet."""

    # The manifest that it is to have next; empty for none.
    wanted_digest: str
    # Of its files; 0 of 0 before the manifest is on the node.
    fetched_bytes: int
    total_bytes: int
    # By digest of the manifest, why the node will not have it for now.
    refusals: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    engine_id: str
    # "torch", "vllm" or "fake".
    kind: str
    version: str
    # "starting", "ready", "failed", "stopped".
    status: str
    manifest_digest: str
    model: str
    sampler_profile: str
    slots: int
    running: int
    # Measured by the agent when the engine started: self-reported.
    tokens_per_second: float
    gpu_uuids: tuple[str, ...]
    restarts: int
    pid: int
    fenced: bool
    note: str
    # What its owner asks; None for what the list price leaves after the platform's fee.
    asked: Ask | None
    # What it is paid; None where it gets no work, or where that is not known.
    paid: Ask | None
    # Why what it asks is not paid; empty where it is.
    ask_refusal: str
    # None where its owner has chosen its model.
    open: OpenEngine | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownCapability:
    """What a card has shown by exact work that the coordinator put to it; `card_id` is empty for the processor."""

    card_id: str
    # "cpu", "consumer_card" or "data_centre_card".
    device_class: str
    # int8 multiplications and additions a second, on the coordinator's clock.
    operations_per_s: int
    shown_at_ms: int
    # Memory that was filled and read back, and how fast; 0 where none was shown.
    memory_bytes: int = 0
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRate:
    """A model on a node, timed on the coordinator's clock; energy and engine build are the node's word."""

    manifest_digest: str
    engine_build: str
    # Answers at once.
    streams: int
    # Of all of them together, from the order to the last id.
    tokens_per_second: float
    # From the order to the first id of the slowest of them.
    first_token_ms: int
    # None where the node cannot tell.
    joules_per_token: float | None
    # "counter", "integrated_power", "estimate" or "none".
    energy_method: str
    measured_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    node_id: str
    owner_id: str
    owner_name: str
    label: str
    # "online", "draining", "offline", "banned".
    status: str
    agent_version: str
    host: Host
    gpus: tuple[Gpu, ...]
    engines: tuple[Engine, ...]
    enrolled_at_ms: int
    # 0 for never since the coordinator started.
    last_seen_at_ms: int
    certificate_not_after_ms: int
    running_attempts: int
    ban_reason: str
    # "verified" where each of its cards, or its processor, has shown what it can do; else "self-reported".
    capability: str
    shown: tuple[ShownCapability, ...]
    rates: tuple[MeasuredRate, ...]
    # How often an engine of it is lost per hour that it is lent: the fleet's figure while it has no history of its own.
    losses_per_h: float
    # How long an engine of it that is lent now stays so, on average; 0 from a coordinator that does not say.
    expected_lent_s: float
    # Engine hours on which that stands, the older ones counting less.
    observed_lent_h: float
    # Digests of the manifests of models that lie on its disk, as it says.
    stored: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    owner_id: str
    name: str
    trusted: bool
    created_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinString:
    """A secret: one machine of one owner joins with it, once, before it expires."""

    join_string: str
    token_id: str
    expires_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    key_id: str
    name: str
    # "tenant" or "admin".
    role: str
    created_at_ms: int
    # 0 for not revoked.
    revoked_at_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CreatedApiKey:
    """A new key; the secret cannot be shown again."""

    key: ApiKey
    secret: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerAccount:
    """What stands on one account, in millionths of a credit."""

    account: str
    balance_micro: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """`entry` is JSON, exactly as it is hashed into the coordinator's log."""

    sequence: int
    entry: bytes
