"""Which engine a machine can run for a model, on which card, with how much of its memory. Pure.

vLLM is chosen where driver, card and free memory allow it; else torch; else the answer is a refusal in words. The
checks come before the start, because an engine that cannot run tells so only after minutes, and on WSL an exhausted
card has taken the whole machine down (microsoft/WSL#40732).

Sizes are computed from what is free now, less a margin, and again at each start.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_OK, Gpu, Host

GIB = 1024**3

# What is left to the desktop and to the driver on a card that draws one, or may: less makes desktops stutter, and
# under WSL an exhausted card has taken Windows down (microsoft/WSL#40732).
DESKTOP_MARGIN_BYTES = 2 * GIB
# A card without a desktop: CUDA's own context and the driver's fragmentation take some hundred MiB.
HEADLESS_MARGIN_BYTES = GIB // 2
# vLLM's own default is 0.92; above it there is no room for CUDA graphs.
GPU_UTILIZATION_MAX = 0.92
# Where nothing is known of the card; vLLM refuses to start if this is more than is free.
GPU_UTILIZATION_UNKNOWN = 0.8

# Builds of CUDA 13, which vLLM 0.33 and torch 2.13 from PyPI are, need a driver of this branch or a later one, and
# have no code for cards older than Turing.
DRIVER_MIN = 580
COMPUTE_CAPABILITY_MIN = 7.5
# Older cards compute neither; vLLM refuses to start there rather than emulate.
BFLOAT16_CAPABILITY_MIN = 8.0
FP8_CAPABILITY_MIN = 8.9

# Beside the weights: activations, CUDA graphs, and a first few thousand tokens of keys and values.
_WORKING_SHARE = 0.1
_WORKING_BYTES = GIB
# After so many failed starts in a row with one model, the simpler engine is tried.
VLLM_FAILURES_MAX = 3

_BYTES_PER_PARAMETER = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelNeed:
    """What a model asks of a machine.

    Args:
        weight_bytes: size of its safetensors.
        dtype: "float32", "float16", "bfloat16" or "fp8".
    """

    weight_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """What one card has for an engine; `share` is of its whole memory, as vLLM counts."""

    uuid: str
    free_bytes: int
    margin_bytes: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The engine to run, or none.

    Args:
        kind: "vllm" or "torch"; "" where the model cannot run here.
        reason: for people: why this one, and why not a better one.
        cards: what it runs on; empty: on the processor.
        install: kind of engine to install first (`slackwater-agent install-engine KIND`); "" where none is missing.
    """

    kind: str
    reason: str
    cards: tuple[CardMemory, ...] = ()
    install: str = ""


def choose_engine(
    gpus: Sequence[Gpu],
    host: Host,
    model: ModelNeed,
    installed: Collection[str],
    *,
    asked_uuids: Sequence[str] = (),
    desktop_uuids: Collection[str] | None = None,
    vllm_failures: int = 0,
) -> Choice:
    """Return the best engine for one model on this machine, with the reasons in words.

    Args:
        gpus: newest readings.
        installed: kinds of engine that are installed.
        asked_uuids: cards that the owner names; several mean tensor parallelism. Empty: the best card alone.
        desktop_uuids: cards with a graphics process; None where that cannot be told, which counts as all of them.
        vllm_failures: failed starts of vLLM with this model in a row.
    """
    objections: list[str] = []
    groups = _groups(gpus, asked_uuids)
    if vllm_failures >= VLLM_FAILURES_MAX:
        objections.append(f"vLLM failed {vllm_failures} starts in a row with this model")
    else:
        for group in groups:
            objection = _card_objection(group) or _dtype_objection(group, model.dtype)
            fitting = objection or _fit(group, model, desktop_uuids)
            if not isinstance(fitting, str):
                return _with_installation("vllm", fitting, "driver, card and free memory allow vLLM", installed)
            objections.append(fitting)
    if not gpus:
        objections.append(host.gpu_note or "no NVIDIA card is listed")
    return _fall_back(groups, host, model, installed, desktop_uuids, "; ".join(dict.fromkeys(objections)))


def _fall_back(
    groups: Sequence[Sequence[Gpu]],
    host: Host,
    model: ModelNeed,
    installed: Collection[str],
    desktop_uuids: Collection[str] | None,
    why_not_vllm: str,
) -> Choice:
    """Return torch on one card, else torch on the processor, else a refusal."""
    if model.dtype == "fp8":
        return Choice(kind="", reason=f"{why_not_vllm}; the torch engine computes no FP8: choose another model")
    for group in groups:
        if len(group) > 1 or _card_objection(group):
            continue
        fitting = _fit(group, model, desktop_uuids)
        if not isinstance(fitting, str):
            return _with_installation("torch", fitting, f"torch on the card: {why_not_vllm}", installed)
    # On a processor torch computes in float32 (agent.engines.launch).
    wanted = model.weight_bytes * _BYTES_PER_PARAMETER["float32"] // _BYTES_PER_PARAMETER.get(model.dtype, 2)
    wanted += _working_bytes(wanted)
    if wanted > host.memory_free_bytes:
        return Choice(
            kind="",
            reason=f"{why_not_vllm}; on the processor it would need {_gib(wanted)} of memory and "
            f"{_gib(host.memory_free_bytes)} are free: choose a smaller model",
        )
    return _with_installation("torch", (), f"torch on the processor: {why_not_vllm}", installed)


def memory_utilization(
    gpu_uuids: Sequence[str],
    gpus: Sequence[Gpu],
    share_max: float,
    desktop_uuids: Collection[str] | None,
) -> float:
    """Return the share of each card's memory that vLLM may take: what is free on the fullest, less its margin.

    vLLM does not start when less is free than it is told to take (vllm-project/vllm#20305).

    Args:
        share_max: what the owner allows.
        desktop_uuids: cards with a graphics process; None where that cannot be told, which counts as all of them.
    """
    shares = [GPU_UTILIZATION_MAX, share_max]
    by_uuid = {gpu.uuid.value: gpu for gpu in gpus}
    for uuid in gpu_uuids:
        gpu = by_uuid.get(uuid)
        shares.append(GPU_UTILIZATION_UNKNOWN if gpu is None else _card_memory(gpu, desktop_uuids).share)
    return min(shares)


def models_memory_bytes(gpus: Sequence[Gpu], host: Host, cards: Sequence[str]) -> int:
    """Return what an empty machine has for a model on these cards, or on its processor where none of them is one."""
    ours = [gpu for gpu in gpus if gpu.uuid.value in cards and gpu.memory_total_bytes.status == READING_STATUS_OK]
    if not ours:
        return max(0, host.memory_total_bytes - DESKTOP_MARGIN_BYTES)
    return sum(max(0, int(gpu.memory_total_bytes.value) - DESKTOP_MARGIN_BYTES) for gpu in ours)


def runs_under_wsl(kernel_release: str) -> bool:
    """Whether this Linux runs inside Windows; the name of its kernel (`platform.release()`) says so."""
    return "microsoft" in kernel_release.lower()


def launch_adjustments(wsl: bool, gpus: Sequence[Gpu], gpu_uuids: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return arguments and environment to add to a start of vLLM on these cards.

    Under WSL, allocator segments that grow fail with what looks like exhausted memory and is none
    (noonghunna/club-3090#60). Two cards that meet over PCIe hang in peer-to-peer and in vLLM's own all-reduce
    (vllm-project/vllm#51513, #14449); what NVLink or a data-centre board gives is not touched.
    """
    argv: list[str] = []
    env: dict[str, str] = {}
    if wsl:
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:False"
    if len(gpu_uuids) > 1:
        names = {gpu.uuid.value: gpu.name.value for gpu in gpus}
        if any(is_consumer_card(names.get(uuid, "")) for uuid in gpu_uuids):
            env["NCCL_P2P_DISABLE"] = "1"
            argv.append("--disable-custom-all-reduce")
    return argv, env


def is_consumer_card(name: str) -> bool:
    """Whether a card of this name has no NVLink and no peer-to-peer over PCIe; an unknown one counts as such."""
    return not any(part in name for part in ("A100", "A800", "H100", "H200", "H800", "B100", "B200", "B300", "GH200"))


def _groups(gpus: Sequence[Gpu], asked_uuids: Sequence[str]) -> list[list[Gpu]]:
    """Return what may carry the model, best first: the cards asked for together, else each card by itself."""
    if asked_uuids:
        by_uuid = {gpu.uuid.value: gpu for gpu in gpus}
        found = [by_uuid[uuid] for uuid in asked_uuids if uuid in by_uuid]
        return [found] if len(found) == len(asked_uuids) else []
    return [[gpu] for gpu in sorted(gpus, key=_free_bytes, reverse=True)]


def _card_objection(group: Sequence[Gpu]) -> str:
    for gpu in group:
        name = gpu.name.value or gpu.uuid.value
        if gpu.uuid.status != READING_STATUS_OK:
            return "a card does not answer"
        # What cannot be read is no objection: vLLM tolerates a blind NVML, and so does WSL.
        if gpu.driver_version.status == READING_STATUS_OK and _leading_number(gpu.driver_version.value) < DRIVER_MIN:
            return f"{name}: driver {gpu.driver_version.value} is older than {DRIVER_MIN}: update the driver"
        if _capability(gpu) < COMPUTE_CAPABILITY_MIN:
            return f"{name}: compute capability {gpu.compute_capability.value} is below {COMPUTE_CAPABILITY_MIN}"
    return ""


def _dtype_objection(group: Sequence[Gpu], dtype: str) -> str:
    least = {"bfloat16": BFLOAT16_CAPABILITY_MIN, "fp8": FP8_CAPABILITY_MIN}.get(dtype, 0.0)
    for gpu in group:
        if _capability(gpu) < least:
            return f"{gpu.name.value}: {dtype} needs compute capability {least}, it has {gpu.compute_capability.value}"
    return ""


def _fit(group: Sequence[Gpu], model: ModelNeed, desktop: Collection[str] | None) -> tuple[CardMemory, ...] | str:
    """Return the memory of these cards if an equal part of the model fits on each, else why not."""
    part_bytes = model.weight_bytes // len(group)
    needed = part_bytes + _working_bytes(part_bytes)
    cards = tuple(_card_memory(gpu, desktop) for gpu in group)
    for gpu, card in zip(group, cards, strict=True):
        if gpu.memory_free_bytes.status == READING_STATUS_OK and card.free_bytes - card.margin_bytes < needed:
            return (
                f"{gpu.name.value}: the model needs {_gib(needed)}, {_gib(card.free_bytes)} are free and "
                f"{_gib(card.margin_bytes)} of that stay with the desktop and the driver"
            )
    return cards


def _card_memory(gpu: Gpu, desktop_uuids: Collection[str] | None) -> CardMemory:
    desktop = desktop_uuids is None or gpu.uuid.value in desktop_uuids
    margin = DESKTOP_MARGIN_BYTES if desktop else HEADLESS_MARGIN_BYTES
    free, total = gpu.memory_free_bytes, gpu.memory_total_bytes
    if not free.status == total.status == READING_STATUS_OK or total.value <= 0:
        share = GPU_UTILIZATION_UNKNOWN
    else:
        share = min(GPU_UTILIZATION_MAX, max(0.0, (free.value - margin) / total.value))
    return CardMemory(uuid=gpu.uuid.value, free_bytes=int(free.value), margin_bytes=margin, share=share)


def _with_installation(kind: str, cards: tuple[CardMemory, ...], reason: str, installed: Collection[str]) -> Choice:
    """Return the choice as wanted, or with what is installed, or with what to install."""
    if kind in installed:
        return Choice(kind=kind, reason=reason, cards=cards)
    if kind == "vllm" and "torch" in installed and len(cards) == 1:
        return Choice(kind="torch", reason="vLLM would be faster and is not installed", cards=cards, install="vllm")
    return Choice(kind=kind, reason=f"{reason}; it is not installed", cards=cards, install=kind)


def _working_bytes(weight_bytes: int) -> int:
    return int(weight_bytes * _WORKING_SHARE) + _WORKING_BYTES


def _free_bytes(gpu: Gpu) -> float:
    return gpu.memory_free_bytes.value if gpu.memory_free_bytes.status == READING_STATUS_OK else 0.0


def _capability(gpu: Gpu) -> float:
    """Return the compute capability; infinite where it is not told, so that nothing is refused for it."""
    if gpu.compute_capability.status != READING_STATUS_OK:
        return inf
    return float(gpu.compute_capability.value)


def _leading_number(version: str) -> int:
    head = version.split(".")[0]
    return int(head) if head.isdecimal() else DRIVER_MIN


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
