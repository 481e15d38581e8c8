"""Why an engine ended, read from the end of its log; and how patient to be with each cause. Pure.

A restart cures bad luck and nothing else: a model that does not load, a driver that waits for a reboot and a flag that
the installed engine does not know fail the same way every time, and each try costs minutes of a card. So each cause has
a budget of its own, and words for the owner.
"""

import re
import signal
from dataclasses import dataclass
from enum import Enum

# Characters of the log's end that are looked at: a traceback of vLLM with its worker's own is about 8 KB.
LOG_TAIL_CHARACTERS = 32 * 1024


class CrashCause(Enum):
    """What kind of thing went wrong; the value stands in logs and reports."""

    CARD_MEMORY = "out of card memory"
    HOST_MEMORY = "out of host memory"
    DRIVER = "driver"
    MODEL = "model"
    INSTALLATION = "engine installation"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashPatience:
    """How often an engine is restarted for one cause.

    Args:
        restart_budget: restarts within `window_s`.
        pause_s: how long it stays down after that; never shorter than the window.
        advice: for the owner, as one sentence.
    """

    restart_budget: int
    window_s: float
    pause_s: float
    advice: str


# Budgets: 3 in 10 minutes tells bad luck from a lasting fault where nothing else is known. What another program's
# memory caused passes in minutes. Driver, model and installation change only when a person does something.
PATIENCE = {
    CrashCause.CARD_MEMORY: CrashPatience(
        restart_budget=2,
        window_s=600.0,
        pause_s=1_800.0,
        advice="close other programs on the card, or lower gpu_memory_share or slots of this engine",
    ),
    CrashCause.HOST_MEMORY: CrashPatience(
        restart_budget=1,
        window_s=600.0,
        pause_s=1_800.0,
        advice="the machine ran out of main memory: choose a smaller model, or fewer engines",
    ),
    CrashCause.DRIVER: CrashPatience(
        restart_budget=1,
        window_s=600.0,
        pause_s=3_600.0,
        advice="the driver failed: `slackwater-agent doctor` says which command helps; a reboot always does",
    ),
    CrashCause.MODEL: CrashPatience(
        restart_budget=1,
        window_s=600.0,
        pause_s=86_400.0,
        advice="this engine cannot load this model: choose another model or engine, then restart the agent",
    ),
    CrashCause.INSTALLATION: CrashPatience(
        restart_budget=0,
        window_s=600.0,
        pause_s=86_400.0,
        advice="the engine's installation does not fit: run `slackwater-agent install-engine`, then restart the agent",
    ),
    CrashCause.UNKNOWN: CrashPatience(
        restart_budget=3,
        window_s=600.0,
        pause_s=600.0,
        advice="`slackwater-agent logs --engine ID` shows the engine's last lines",
    ),
}

# Read in this order; the first that is found decides. What looks like exhausted memory under WSL is the driver's
# (noonghunna/club-3090#60), so it stands in front.
_SIGNS = (
    (CrashCause.DRIVER, r"dxgkio_make_resident|device not ready"),
    (CrashCause.CARD_MEMORY, r"CUDA out of memory|OutOfMemoryError|CUDA_ERROR_OUT_OF_MEMORY"),
    (CrashCause.CARD_MEMORY, r"Free memory on device .* is less than desired|No available memory for the cache blocks"),
    (CrashCause.CARD_MEMORY, r"larger than the available KV cache memory|KV cache is needed, which is larger"),
    (CrashCause.DRIVER, r"CUDA driver version is insufficient|Driver/library version mismatch|CUDA unknown error"),
    (CrashCause.DRIVER, r"no CUDA-capable device|CUDA-capable device\(s\) is/are busy|GPU is lost|fallen off the bus"),
    (CrashCause.DRIVER, r"NVRM: Xid|uncorrectable ECC|CUDA error: (?!out of memory)|Failed to initialize NVML"),
    (CrashCause.DRIVER, r"NCCL (error|WARN)|ncclUnhandledCudaError|ncclSystemError"),
    (CrashCause.HOST_MEMORY, r"^MemoryError|Cannot allocate memory|DefaultCPUAllocator: can't allocate"),
    (CrashCause.INSTALLATION, r"unrecognized arguments|ModuleNotFoundError|ImportError|undefined symbol"),
    (CrashCause.INSTALLATION, r"error: argument|No module named|cannot start .*: No such file"),
    (CrashCause.MODEL, r"not supported for now|Model architectures .* (are|failed)|Unknown architecture"),
    (CrashCause.MODEL, r"SafetensorError|size mismatch for|does not recognize this architecture|KeyError: '.*weight"),
    (CrashCause.MODEL, r"Error in model execution|Bfloat16 is only supported on GPUs|max_model_len .* is greater than"),
)
_COMPILED = tuple((cause, re.compile(pattern, re.MULTILINE)) for cause, pattern in _SIGNS)


def classify_crash(log_tail: str, exit_status: int | None) -> CrashCause:
    """Return why an engine ended.

    Args:
        log_tail: the end of its log; more than LOG_TAIL_CHARACTERS is not looked at.
        exit_status: as asyncio tells it, negative for a signal; None where it still ran and was ended by us.
    """
    tail = log_tail[-LOG_TAIL_CHARACTERS:]
    for cause, sign in _COMPILED:
        if sign.search(tail):
            return cause
    # A build for newer processors than this one. SIGKILL tells nothing: the kernel sends it for memory, and people do.
    if exit_status == -signal.SIGILL:
        return CrashCause.INSTALLATION
    return CrashCause.UNKNOWN
