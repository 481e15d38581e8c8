"""What is asked and paid, as its wire messages: one function per type."""

from coordinator.ledger.asks import EngineTerms
from coordinator.ledger.prices import Price
from protos.slackwater.common.v1 import capability_pb2 as wire


def ask_to_wire(ask: Price) -> wire.Ask:
    return wire.Ask(prompt_micro=ask.prompt_micro, completion_micro=ask.completion_micro)


def ask_of(engine: wire.Engine) -> Price | None:
    """Return what an engine asks; None where it leaves that to the list price."""
    return Price(engine.ask.prompt_micro, engine.ask.completion_micro) if engine.HasField("ask") else None


def terms_to_wire(terms: EngineTerms) -> wire.EngineTerms:
    return wire.EngineTerms(
        engine_id=terms.engine_id,
        ask=None if terms.ask is None else ask_to_wire(terms.ask),
        most=ask_to_wire(terms.most),
        refusal=terms.refusal,
    )
