"""POST /v1/quote: the shape of its answers. Ours; OpenAI has nothing like it."""

from dataclasses import asdict

from coordinator.tasks_port import ClassQuote, TaskQuote


def quote_document(quote: TaskQuote) -> dict[str, object]:
    """Return the body of an answer; what is not known is null."""
    return {
        "object": "quote",
        **asdict(quote),
        "classes": [_class_document(one) for one in quote.classes],
    }


def _class_document(one: ClassQuote) -> dict[str, object]:
    return {**asdict(one), "service_class": one.service_class.value, "energy_method": one.energy_method or None}
