"""What an owner asks for work: table `[asks]`, and what the coordinator says to it. Pure.

An ask is what a node is paid for an order. It goes out with each engine's
report, and an order that pays less is refused: the owner's word is the last one.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any

import msgspec
from msgspec import Meta

MICRO_PER_CREDIT = 1_000_000
# A thousand credits for 1,000 tokens: no list price is above it.
ASK_MICRO_MAX = 1_000 * MICRO_PER_CREDIT
# Models with an ask of their own; more is no list that a person keeps.
MODELS_MAX = 1000

Micro = Annotated[int, Meta(ge=0, le=ASK_MICRO_MAX)]


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Micro-credits per 1,000 tokens of prompt and of answer."""

    prompt_micro: Micro
    completion_micro: Micro

    def covered_by(self, paid: "Ask") -> bool:
        """Return whether neither part is below what is asked."""
        return paid.prompt_micro >= self.prompt_micro and paid.completion_micro >= self.completion_micro


class ModelAsk(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An ask for models by name, which may be a pattern as in `[consent]`."""

    model: Annotated[str, Meta(min_length=1)]
    prompt_micro: Micro
    completion_micro: Micro


class AskSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[asks]`: what this machine wants for its work. A change acts at once, for orders that come after it."""

    default: Annotated[Ask, Meta(description="for models that are not named below")] | None = None
    models: Annotated[tuple[ModelAsk, ...], Meta(max_length=MODELS_MAX, description="the first that fits counts")] = ()

    def ask_for(self, model: str) -> Ask | None:
        """Return what is asked for work with a model; None for whatever the list price leaves."""
        for one in self.models:
            if fnmatchcase(model, one.model):
                return Ask(prompt_micro=one.prompt_micro, completion_micro=one.completion_micro)
        return self.default


NOTHING_ASKED = AskSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTerms:
    """What the coordinator pays for an engine's work.

    Args:
        ask: None where what was asked is refused.
        most: what may be asked.
        refusal: why it gets no work; empty where it does.
    """

    engine_id: str
    ask: Ask | None
    most: Ask
    refusal: str


def shortfall(asked: Ask | None, paid: Ask | None) -> str | None:
    """Return why an order pays too little; None where it pays what is asked.

    Args:
        paid: as the order says; None where it says nothing, which is only good where nothing is asked.
    """
    if asked is None or (paid is not None and asked.covered_by(paid)):
        return None
    said = "does not say what it pays" if paid is None else f"pays {_in_credits(paid)}"
    return f"the order {said}; table [asks] asks {_in_credits(asked)} credits per 1,000 tokens of prompt / answer"


def describe_asks(settings: AskSettings) -> list[str]:
    """Return in plain words what the machine asks for its work, one line each, for its owner to read."""
    rest = "models that are not named" if settings.models else "every model"
    lines = [
        f"  {one.model}: {_in_credits(Ask(prompt_micro=one.prompt_micro, completion_micro=one.completion_micro))}"
        for one in settings.models
    ]
    default = "whatever the list price leaves" if settings.default is None else _in_credits(settings.default)
    return [
        "It asks for its work, in credits per 1,000 tokens of prompt / answer:",
        *lines,
        f"  {rest}: {default}",
        "It gets no work for which it asks more than the fleet's list price leaves. Table [asks] changes this.",
    ]


def terms_line(engine: dict[str, Any]) -> str | None:
    """Return what an engine is paid, in words; None before the coordinator has told it.

    Args:
        engine: an `agent.status.EngineLine` as it was read back from JSON.
    """
    terms, asked = engine["terms"], engine["asked"]
    if terms is None:
        return None
    if terms["ask"] is None:
        return f"engine {engine['engine_id']} gets no work: {terms['refusal']}"
    whose = "as you ask" if asked is not None else "what the list price leaves"
    paid = _in_credits(msgspec.convert(terms["ask"], Ask))
    return f"engine {engine['engine_id']} earns {paid} credits per 1,000 tokens of prompt / answer: {whose}"


def _in_credits(ask: Ask) -> str:
    return " / ".join(f"{micro / MICRO_PER_CREDIT:,.6g}" for micro in (ask.prompt_micro, ask.completion_micro))
