"""How large a challenge is, how long it may take, and which challenges start together. Pure arithmetic.

Sizes are made so that a slow card of its class works for a few seconds, and the verifier for at most 2 s of one core.
A deadline is what the slowest card of the class needs by the floors below, doubled, and what a network may take. It
sorts out machines of another kind (a processor that says it is a card is 50 times too slow); how fast a card is, the
time between question and commitment says, and only that figure counts for the scheduler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from inference.challenge.compute import ComputeSize
from inference.challenge.memory import MemorySize


class DeviceClass(Enum):
    CPU = "cpu"
    CONSUMER_CARD = "consumer_card"
    DATA_CENTRE_CARD = "data_centre_card"


@dataclass(frozen=True, slots=True)
class Floor:
    """What the slowest machine of a class reaches in this challenge, end to end.

    A processor's floors are half of what one core of a 2019 desktop does in float32. A card's are a fifth of the data
    sheet of the weakest card worth lending (RTX 3060: 102 TOPS of int8, 360 GB/s; A10: 250 TOPS, 600 GB/s): reductions
    mod 251 and the host's part of each step take more than half. They are data-sheet figures, to be replaced by
    measured ones.
    """

    operations_per_s: int
    walk_bytes_per_s: int


_FLOORS: Final = {
    DeviceClass.CPU: Floor(30_000_000_000, 200_000_000),
    DeviceClass.CONSUMER_CARD: Floor(20_000_000_000_000, 72_000_000_000),
    DeviceClass.DATA_CENTRE_CARD: Floor(50_000_000_000_000, 120_000_000_000),
}
_SLACK: Final = 2
# Question there, commitment back, and the prover's process being told: a loaded home connection.
NETWORK_ALLOWANCE_MS: Final = 2_000
# Results travel after the clock has stopped; 5 Mbit/s is the uplink of a slow home connection.
_UPLINK_BYTES_PER_S: Final = 625_000

# A walk may take this part of the time that computing its blocks again would take at the speed the machine has shown,
# but not more than the class's floor allows. A processor walks in a 70th of it (measured, int8 products). Cards are not
# measured: by data sheets, and with the shown speed a third of the sheet's, an RTX 4090 would walk in a 40th and an
# H200, on which starting the steps takes most of the time, in a 20th.
_RECOMPUTING_DIVISORS: Final = {
    DeviceClass.CPU: 8,
    DeviceClass.CONSUMER_CARD: 16,
    DeviceClass.DATA_CENTRE_CARD: 16,
}

# Of the free memory a node claims: the rest is for products on their way to residues, and for the driver.
FILL_PERCENT: Final = 90

# Two cards that are one, asked at once, take twice as long as asked alone. Cards of one machine share its processor and
# memory, which may cost them something; 1.6 is nearer to two than to one for that reason.
SHARED_CARD_SLOWDOWN: Final = 1.6


@dataclass(frozen=True, slots=True)
class ComputePlan:
    """A compute challenge: its size, the chains drawn, and how long each part may take."""

    size: ComputeSize
    drawn: int
    commitment_deadline_ms: int
    opening_deadline_ms: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """A memory challenge: its size, what is drawn, and how long each part may take."""

    size: MemorySize
    steps_drawn: int
    blocks_drawn: int
    rows_drawn: int
    fill_deadline_ms: int
    walk_deadline_ms: int
    opening_deadline_ms: int


# Operations: 1.1e12 for a processor (14 s of one core in numpy, 2 s with int8 instructions), 1.4e14 for a consumer
# card, 1.1e15 for a data-centre card.
_COMPUTE: Final = {
    DeviceClass.CPU: (ComputeSize(columns=1024, rows=1024, products=64, chains=8), 8),
    DeviceClass.CONSUMER_CARD: (ComputeSize(columns=2048, rows=2048, products=64, chains=128), 8),
    DeviceClass.DATA_CENTRE_CARD: (ComputeSize(columns=4096, rows=2048, products=32, chains=512), 6),
}


@dataclass(frozen=True, slots=True)
class _WalkShape:
    """A step of a data-centre card reads 512 MiB: with less, most of its time would go into starting it."""

    columns: int
    blocks_per_step: int
    steps: int
    steps_drawn: int
    blocks_drawn: int
    rows_drawn: int


_WALKS: Final = {
    DeviceClass.CPU: _WalkShape(1024, 8, 1023, steps_drawn=32, blocks_drawn=16, rows_drawn=4),
    DeviceClass.CONSUMER_CARD: _WalkShape(4096, 8, 8191, steps_drawn=16, blocks_drawn=8, rows_drawn=4),
    DeviceClass.DATA_CENTRE_CARD: _WalkShape(4096, 32, 8191, steps_drawn=16, blocks_drawn=16, rows_drawn=1),
}


def compute_plan(device_class: DeviceClass) -> ComputePlan:
    """Return the compute challenge of a class."""
    size, drawn = _COMPUTE[device_class]
    work_ms = _milliseconds(size.operations, _FLOORS[device_class].operations_per_s)
    # Chains that were not kept are computed again.
    opening_ms = work_ms * drawn // size.chains + _milliseconds(drawn * size.result_bytes, _UPLINK_BYTES_PER_S)
    return ComputePlan(
        size=size,
        drawn=drawn,
        commitment_deadline_ms=_deadline_ms(work_ms),
        opening_deadline_ms=_deadline_ms(opening_ms),
    )


def memory_plan(device_class: DeviceClass, free_bytes: int, shown_operations_per_s: int) -> MemoryPlan:
    """Return the memory challenge for what a node says is free.

    Args:
        shown_operations_per_s: by the compute challenge that came before. Who dawdled there, to be given more time
            here, is credited with that speed.

    Raises:
        ValueError: less than one block is free, or no speed was shown.
    """
    if shown_operations_per_s < 1:
        raise ValueError("the memory challenge comes after a compute challenge that passed")
    shape = _WALKS[device_class]
    size = MemorySize(
        columns=shape.columns,
        blocks=free_bytes * FILL_PERCENT // 100 // shape.columns**2,
        blocks_per_step=shape.blocks_per_step,
        steps=shape.steps,
    )
    floor = _FLOORS[device_class]
    recomputing_ms = _milliseconds(
        2 * size.columns * size.walk_bytes, shown_operations_per_s * _RECOMPUTING_DIVISORS[device_class]
    )
    walk_ms = min(_SLACK * _milliseconds(size.walk_bytes, floor.walk_bytes_per_s), recomputing_ms)
    opened_bytes = (2 * shape.steps_drawn + 1 + shape.blocks_drawn) * size.state_bytes
    return MemoryPlan(
        size=size,
        steps_drawn=shape.steps_drawn,
        blocks_drawn=min(shape.blocks_drawn, size.blocks),
        rows_drawn=shape.rows_drawn,
        fill_deadline_ms=_deadline_ms(_milliseconds(size.fill_operations, floor.operations_per_s)),
        walk_deadline_ms=NETWORK_ALLOWANCE_MS + walk_ms,
        opening_deadline_ms=_deadline_ms(_milliseconds(opened_bytes, _UPLINK_BYTES_PER_S)),
    )


def per_second(amount: int, elapsed_ms: int) -> int:
    """Return operations or bytes a second, as shown by a challenge that passed."""
    return amount * 1000 // max(elapsed_ms, 1)


@dataclass(frozen=True, slots=True, order=True)
class Card:
    """One card as a node names it; a node without one is its own card.

    Args:
        owner_id: whose it is.
        network: where its node connects from, as a prefix: the /24 or the autonomous system.
    """

    node_id: str
    card_id: str
    owner_id: str
    network: str


def barrier_groups(cards: Sequence[Card]) -> list[tuple[Card, ...]]:
    """Return the cards that must be challenged at the same moment: linked by owner or by network, over any number of
    links. Groups of one need no barrier; they come too.
    """
    leader = {card: card for card in cards}

    def leader_of(card: Card) -> Card:
        while leader[card] != card:
            leader[card] = leader[leader[card]]
            card = leader[card]
        return card

    first_with: dict[tuple[str, str], Card] = {}
    for card in cards:
        for link in (("owner", card.owner_id), ("network", card.network)):
            leader[leader_of(card)] = leader_of(first_with.setdefault(link, card))
    groups: dict[Card, list[Card]] = {}
    for card in sorted(cards):
        groups.setdefault(leader_of(card), []).append(card)
    return sorted(tuple(group) for group in groups.values())


def sharing(alone_ms: Mapping[Card, int], together_ms: Mapping[Card, int]) -> list[Card]:
    """Return the cards that took much longer together than alone, as one card under several names must.

    Args:
        alone_ms: how long each took when nothing of its group was asked. A card that dawdles then is credited with
            the speed it showed.
        together_ms: how long it took in the barrier; cards in one of the two only are left out.
    """
    return [
        card
        for card in sorted(alone_ms.keys() & together_ms.keys())
        if together_ms[card] > SHARED_CARD_SLOWDOWN * max(alone_ms[card], 1)
    ]


def _milliseconds(amount: int, amount_per_s: int) -> int:
    return -(-amount * 1000 // amount_per_s)


def _deadline_ms(work_ms: int) -> int:
    return NETWORK_ALLOWANCE_MS + _SLACK * work_ms
