"""The fleets and loads that are simulated: the paper's, one engine on each card, and both kinds of card together. Pure.

A load of the paper is offered for as long as it takes, and not in 200 requests:
after a warm-up that fills the batches, at least 300 s and 3,000 requests are
counted. Lengths are those of the benchmark; no prompt was seen before.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from coordinator.planning.catalog import CardPrice
from coordinator.planning.cost import SECONDS_PER_HOUR
from coordinator.planning.paper.printed import H100, RTX_4090
from coordinator.planning.paper.printed import MODEL as QWEN_14B
from coordinator.planning.simulation.scenario import Fleet, Load, Network, Scenario, Target
from inference.task import ServiceClass

QWEN_7B: Final = "DeepSeek-R1-Distill-Qwen-7B"
LLAMA_8B: Final = "Meta-Llama-3-8B-Instruct"
LOADS: Final = (1.0, 4.0, 8.0, 16.0, 32.0)

# The longest answers of the slowest engine take two minutes; after three its batch is full.
WARM_UP_S: Final = 180.0
COUNTED_S_MIN: Final = 300.0
# Thirty of them are beyond the 99th percentile.
COUNTED_REQUESTS_MIN: Final = 3_000
# The upper end of the paper's "200-500 ms", and the pace that the router keeps for readers (scheduler/targets.py).
INTERACTIVE: Final = Target(first_token_ms=500.0, token_ms=100.0)
BATCH: Final = Target(end_to_end_s=3_600.0)
BATCH_DEADLINE_S: Final = 3_600.0
# Client and server shared a host.
NO_NETWORK: Final = Network(one_way_ms=0.0, spread=0.0)
# Micro-credits per 1,000 tokens of prompt and of answer: half of what the list leaves, as in scenarios/hybrid.toml. The
# H100 asks all of it, so that the router sends to the consumer cards first what they can do in time.
CONSUMER_ASK: Final = (100_000, 400_000)


@dataclass(frozen=True, slots=True)
class Part:
    """Equal machines, each with one engine on all of its cards."""

    card: str
    cards: int
    machines: int

    @property
    def name(self) -> str:
        card = "H100" if self.card == H100 else "4090"
        if self.cards == 1:
            return f"{self.machines}x{card}" if self.card == H100 else f"{self.machines}x(1x{card})"
        return f"{self.cards}x{card}" if self.machines == 1 else f"{self.machines}x({self.cards}x{card})"


@dataclass(frozen=True, slots=True)
class PaperFleet:
    """Machines that hold one model. Args: `batch_share` of the requests are batch, the rest interactive."""

    model: str
    parts: tuple[Part, ...]
    batch_share: float = 0.0

    @property
    def name(self) -> str:
        return " + ".join(part.name for part in self.parts)

    @property
    def first_tokens_fitted(self) -> bool:
        """Whether its engines' first tokens were fitted: those of several RTX 4090 contradict each other."""
        return all(part.card == H100 or part.cards == 1 for part in self.parts)

    def usd_per_hour(self, prices: Mapping[str, CardPrice]) -> float:
        return sum(part.machines * part.cards * prices[part.card].usd_per_hour for part in self.parts)


def h100s(machines: int = 1) -> Part:
    return Part(H100, 1, machines)


def rtx_4090s(cards: int, machines: int = 1) -> Part:
    return Part(RTX_4090, cards, machines)


def _alone(model: str, *parts: Part) -> tuple[PaperFleet, ...]:
    return tuple(PaperFleet(model, (part,)) for part in parts)


# As the paper has them: all cards of a machine in one engine.
TENSOR_PARALLEL: Final = _alone(QWEN_14B, h100s(), rtx_4090s(2), rtx_4090s(4), rtx_4090s(8))
# Its figure has four machines behind a load balancer, "expected".
FOUR_PAIRS: Final = PaperFleet(QWEN_14B, (rtx_4090s(2, 4),))
SINGLES: Final = (
    *_alone(LLAMA_8B, h100s(), *(rtx_4090s(1, machines) for machines in (1, 2, 4, 8))),
    *_alone(QWEN_7B, h100s(), *(rtx_4090s(1, machines) for machines in (1, 2, 4, 8)), rtx_4090s(2), rtx_4090s(4)),
)
HALF: Final = 0.5
HYBRIDS: Final = (
    *(
        PaperFleet(LLAMA_8B, parts, HALF)
        for parts in (
            (h100s(),),
            (rtx_4090s(1, 4),),
            (rtx_4090s(1, 8),),
            *((h100s(), rtx_4090s(1, machines)) for machines in (1, 2, 4, 8)),
        )
    ),
    *(
        PaperFleet(QWEN_14B, parts, HALF)
        for parts in (
            (h100s(),),
            (h100s(2),),
            (rtx_4090s(2, 4),),
            (h100s(), rtx_4090s(2, 2)),
            (h100s(), rtx_4090s(2, 4)),
        )
    ),
)
FULL_LOAD: Final = 64.0
FLEETS: Final = (*TENSOR_PARALLEL, FOUR_PAIRS, *SINGLES, *HYBRIDS)


def loads_of(fleet: PaperFleet) -> tuple[float, ...]:
    """Return the paper's loads; one H100 with a small model serves them all, so that it gets one that fills it."""
    small = fleet.model != QWEN_14B and fleet.parts == (h100s(),) and not fleet.batch_share
    return (*LOADS, FULL_LOAD) if small else LOADS


def scenario_of(fleet: PaperFleet, requests_per_second: float, prices: Mapping[str, CardPrice]) -> Scenario:
    """Return a fleet under a load, long enough for its tail to be seen."""
    counted_s = max(COUNTED_S_MIN, COUNTED_REQUESTS_MIN / requests_per_second)
    shares = {ServiceClass.INTERACTIVE: 1.0 - fleet.batch_share, ServiceClass.BATCH: fleet.batch_share}
    return Scenario(
        hours=(WARM_UP_S + counted_s) / SECONDS_PER_HOUR,
        warm_up_s=WARM_UP_S,
        network=NO_NETWORK,
        fleet=tuple(_nodes(fleet.model, part, prices[part.card]) for part in fleet.parts),
        load=tuple(
            Load(
                model=fleet.model,
                service_class=service_class,
                requests_per_second=share * requests_per_second,
                deadline_s=BATCH_DEADLINE_S if service_class is ServiceClass.BATCH else None,
            )
            for service_class, share in shares.items()
            if share
        ),
        targets={ServiceClass.INTERACTIVE: INTERACTIVE, ServiceClass.BATCH: BATCH},
    )


def _nodes(model: str, part: Part, price: CardPrice) -> Fleet:
    return Fleet(
        model=model,
        card=part.card,
        cards=part.cards,
        nodes=part.machines,
        usd_per_hour=part.cards * price.usd_per_hour,
        idle_w=part.cards * price.idle_watts,
        load_w=part.cards * price.load_watts,
        ask=CONSUMER_ASK if price.consumer else None,
    )
