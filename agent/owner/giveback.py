"""The give-back of one card: every engine on it killed, and proof that the card is free.

By the time this begins the attempts are handed back: `agent.state` queues that
before it orders the kill, and the kill waits for no network.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from agent.clock import monotonic_s
from agent.engines.engines import Engines
from agent.owner.events import CPU_CARD, GiveBackFailed, GivenBack

# Freed memory shows within 0.5 to 1.5 s of the end of the process that held it.
CONFIRM_POLL_S = 0.25
CONFIRM_S_MAX = 5.0
# SIGKILL is repeated for 10 s (agent.engines.supervisor); an engine that is still being waited for after that is stuck.
GONE_S_MAX = 12.0


@dataclass(frozen=True, slots=True)
class CardMemory:
    """What of a card tells that it is free; None where the driver does not tell."""

    # Processes of ours on the card.
    own_pids: frozenset[int] | None
    free_bytes: int | None


class GiveBackLadder:
    """Gives cards back, one at a time or several at once.

    Args:
        prover_gone: waits until no prover of a challenge is left on a card and returns the processes that survived
            their kill; None where none was there.
        read: asks the driver about a card now; None where the card does not answer.
    """

    def __init__(
        self,
        engines: Engines,
        prover_gone: Callable[[str], Awaitable[tuple[int, ...] | None]],
        read: Callable[[str], Awaitable[CardMemory | None]],
    ) -> None:
        self._engines = engines
        self._prover_gone = prover_gone
        self._read = read

    async def give_back(self, card: str, engine_ids: Sequence[str]) -> GivenBack | GiveBackFailed:
        """Wait until engines and prover on the card are gone and the driver agrees. Their kill was ordered before."""
        try:
            async with asyncio.timeout(GONE_S_MAX):
                gone = await asyncio.gather(*(self._engines.gone(engine_id) for engine_id in engine_ids))
                prover = await self._prover_gone(card)
        except TimeoutError:
            return GiveBackFailed(card, f"an engine on it does not end within {GONE_S_MAX:g} s")
        survivors = sorted([*(pid for pids in gone for pid in pids), *(prover or ())])
        if survivors:
            listed = ", ".join(map(str, survivors))
            detail = f"processes {listed} survive SIGKILL (the driver holds them): reboot this machine"
            return GiveBackFailed(card, detail)
        if card != CPU_CARD and (engine_ids or prover is not None):
            held = await self._confirm(card)
            if held is not None:
                return GiveBackFailed(card, held)
        return GivenBack(card)

    async def _confirm(self, card: str) -> str | None:
        """Return what still holds the card though its processes are gone; None where it is free, or does not tell."""
        deadline = monotonic_s() + CONFIRM_S_MAX
        while True:
            memory = await self._read(card)
            if memory is None or memory.own_pids is None:
                # The process table is all there is to go by, and it says that they are gone.
                return None
            if not memory.own_pids:
                return None
            if monotonic_s() >= deadline:
                listed = ", ".join(map(str, sorted(memory.own_pids)))
                return f"the driver says that processes {listed} are still on the card: reboot this machine"
            await asyncio.sleep(CONFIRM_POLL_S)
