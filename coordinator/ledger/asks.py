"""Whether a node gets work for what its owner asks. Pure.

An ask is taken as far as the list price of the model leaves it after the
platform's fee. An engine that asks for more gets no work, rather than work for
less than its owner wants. One that asks for nothing is paid all that is left.
The ask travels in the order that the coordinator signs, so that neither side
can say afterwards that another one was agreed.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from coordinator.ledger.prices import Price, Terms
from coordinator.scheduler.events import EngineView
from inference.task import EngineId, ManifestDigest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """What an engine is paid for orders from now on.

    Args:
        ask: None where what was asked is refused.
        most: what may be asked.
        refusal: why it gets no work; empty where it does.
    """

    engine_id: EngineId
    ask: Price | None
    most: Price
    refusal: str


class Asks:
    """Holds asks against the list prices of the models that are served."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._most: dict[ManifestDigest, Price] = {}

    def add_model(self, manifest_digest: ManifestDigest, name: str) -> None:
        """Take note of a model and the name under which it has a price."""
        self._most[manifest_digest] = self._terms.node_share(name)

    def most(self, manifest_digest: ManifestDigest) -> Price:
        """Return the most that may be asked for work with a model. One that is not served has no price of its own."""
        return self._most.get(manifest_digest) or self._terms.node_share("")

    def in_force(self, engine: EngineView) -> Price | None:
        """Return what an engine would be paid for an order; None where it asks for too much."""
        most = self.most(engine.manifest_digest)
        if engine.ask is None:
            return most
        return engine.ask if engine.ask.within(most) else None

    def terms(self, engines: Iterable[EngineView]) -> Iterator[EngineTerms]:
        """Yield what each engine is paid, for its owner."""
        for engine in engines:
            most, ask = self.most(engine.manifest_digest), self.in_force(engine)
            refusal = "" if ask is not None else _refusal(engine, most)
            yield EngineTerms(engine_id=engine.engine_id, ask=ask, most=most, refusal=refusal)


def _refusal(engine: EngineView, most: Price) -> str:
    assert engine.ask is not None, "who asks for nothing is not refused"
    return (
        f"it asks {engine.ask.prompt_micro}/{engine.ask.completion_micro} micro-credits per 1,000 tokens of prompt and "
        f"answer, and the list leaves {most.prompt_micro}/{most.completion_micro}: ask no more than that"
    )
