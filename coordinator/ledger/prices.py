"""What tokens cost the tenant, and bring the node. Pure; integers only.

A tenant pays the list price of its model, a node earns its ask, the platform
keeps the difference. Charges are rounded up and earnings down, each once per
sum, so that no split of an answer over attempts costs the platform a fraction.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

MICRO_PER_CREDIT = 1_000_000
# Prices are per so many tokens.
TOKENS_PER_PRICE = 1_000
PRICE_MICRO_MAX = 1_000 * MICRO_PER_CREDIT
PERMILLE = 1_000


@dataclass(frozen=True, slots=True)
class Price:
    """Micro-credits per 1,000 tokens of prompt and of completion."""

    prompt_micro: int
    completion_micro: int

    def charge_micro(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return what these tokens cost, rounded up."""
        return -(-(prompt_tokens * self.prompt_micro + completion_tokens * self.completion_micro) // TOKENS_PER_PRICE)

    def earned_micro(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return what these tokens bring, rounded down."""
        return (prompt_tokens * self.prompt_micro + completion_tokens * self.completion_micro) // TOKENS_PER_PRICE

    def less(self, fee_permille: int) -> "Price":
        """Return the ask of a node that states none: this price less the platform's fee."""
        kept = PERMILLE - fee_permille
        return Price(self.prompt_micro * kept // PERMILLE, self.completion_micro * kept // PERMILLE)

    def within(self, most: "Price") -> bool:
        """Return whether neither part is above `most`."""
        return self.prompt_micro <= most.prompt_micro and self.completion_micro <= most.completion_micro


# One credit for 1,000 generated tokens: a round number to count in. Reading a prompt is some four times cheaper
# than generating, as on the price lists of hosted open models.
DEFAULT_PRICE = Price(prompt_micro=MICRO_PER_CREDIT // 4, completion_micro=MICRO_PER_CREDIT)
# What runs the coordinator, pays for failures, and remains.
DEFAULT_FEE_PERMILLE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the operator asks for. Args: `grant_micro` is a new tenant's budget; None for no budget, and no limit."""

    list_prices: Mapping[str, Price] = field(default_factory=dict)
    fee_permille: int = DEFAULT_FEE_PERMILLE
    grant_micro: int | None = None

    def price(self, model: str) -> Price:
        return self.list_prices.get(model, DEFAULT_PRICE)

    def node_share(self, model: str) -> Price:
        """Return what the list leaves after the fee: the most that a node may ask, and its pay if it asks nothing."""
        return self.price(model).less(self.fee_permille)
