"""The coordinator with challenges that take a moment, for tests; and without a layer of its checks, to show what for.

    challenging_coordinator.py LAYER run --config ...

LAYER is "every", or the check that is left out: "compute", "memory", "proofs" (both of them), "binding" (to nonce,
node, boot and certificate), "deadlines" or "barrier". "every-timed" asks for more than a moment, by deadlines that
matter; "deadlines" asks for the same without them.
"""

import sys
from typing import Any, Final

from coordinator.__main__ import main
from coordinator.verification import challenge_agenda, challenge_targets, challenges
from inference.challenge import schedule, wire
from inference.challenge.compute import ComputeSize
from inference.challenge.schedule import DeviceClass
from inference.challenge.testing import leave_out_binding

PROOFS: Final = {
    "every": (),
    "every-timed": (),
    "barrier": (),
    "binding": (),
    "deadlines": (),
    "compute": ("verify_compute",),
    "memory": ("verify_memory",),
    "proofs": ("verify_compute", "verify_memory"),
}


def shrink() -> None:
    """Ask of a processor what it does in less than a second."""
    schedule._COMPUTE[DeviceClass.CPU] = (ComputeSize(columns=256, rows=64, products=8, chains=8), 8)
    schedule._WALKS[DeviceClass.CPU] = schedule._WalkShape(64, 3, 63, steps_drawn=32, blocks_drawn=16, rows_drawn=8)
    # The machine may be busy with other tests; what is late is not what they are about.
    schedule.NETWORK_ALLOWANCE_MS = 60_000  # type: ignore[misc]
    challenge_agenda.RETRY_MS = 1000  # type: ignore[misc]
    challenge_targets.PROCESSOR_MEMORY_BYTES_MAX = 1 << 19  # type: ignore[misc]  # 115 blocks.


def enlarge(*, network_allowance_ms: int) -> None:
    """Ask for so much memory that computing it again takes far longer than walking over it."""
    schedule._COMPUTE[DeviceClass.CPU] = (ComputeSize(columns=512, rows=512, products=16, chains=8), 8)
    schedule._WALKS[DeviceClass.CPU] = schedule._WalkShape(512, 16, 255, steps_drawn=32, blocks_drawn=16, rows_drawn=8)
    schedule.NETWORK_ALLOWANCE_MS = network_allowance_ms  # type: ignore[misc]
    challenge_targets.PROCESSOR_MEMORY_BYTES_MAX = 1 << 23  # type: ignore[misc]  # 28 blocks.
    # An honest walk may be late once where the machine is busy; no test waits for an hour until the next one.
    challenge_agenda.WALK_PAUSE_MS = 5_000  # type: ignore[misc]


def accept(*_: Any, **__: Any) -> None:
    """Take a proof as it comes."""


if __name__ == "__main__":
    layer = sys.argv.pop(1)
    shrink()
    if layer in ("every-timed", "deadlines"):
        enlarge(network_allowance_ms=8_000 if layer == "every-timed" else 600_000)
    if layer == "binding":
        leave_out_binding()
    if layer == "barrier":
        challenge_agenda.barrier_groups = lambda cards: [(card,) for card in cards]  # type: ignore[attr-defined]
    for proof in PROOFS[layer]:
        setattr(challenges, proof, accept)
        # That a root has 32 bytes belongs to it, and of memory that as many states come as were drawn.
        wire.root = bytes  # type: ignore[assignment]
        if proof == "verify_memory":
            wire.memory_openings = lambda message, draw: ([], [])
    main()
