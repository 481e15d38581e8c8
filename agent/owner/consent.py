"""What an owner's machine accepts: table `[consent]`, and the checks against it. Pure.

The owner's word is the last one: a signed, valid order outside of it is refused
(`agent.assignments` asks), and a model outside of it is not even loaded. The
hours and the daily count are asked when work arrives; what began inside of them
is finished, and counts.
"""

import difflib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta
from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression

from agent.owner.events import LocalTimeObserved
from agent.owner.schedule import parse_schedule
from inference.licences import LICENCES
from inference.task import PrivacyClass, ServiceClass, TaskKind

# Names of models, patterns and licences: more is no list that a person keeps.
ENTRIES_MAX = 1000
MIB = 1024 * 1024
# What counts as worked on where nobody knows any more: as much as any daily limit, which must fail safe.
TOKENS_NOT_KNOWN = 2**53

ServiceName = Literal["interactive", "standard", "batch"]
PrivacyName = Literal["public", "trusted_owners", "own_nodes"]
KindName = Literal["generate", "score", "embed"]
# Names of public models as `fnmatch` patterns, which tell upper from lower case.
Patterns = Annotated[tuple[str, ...], Meta(max_length=ENTRIES_MAX)]
Tokens = Annotated[int, Meta(ge=1, le=TOKENS_NOT_KNOWN)]

_KIND_WORDS = {"generate": "writing text", "score": "rating text", "embed": "turning text into vectors"}
_SERVICE_WORDS = {"interactive": "somebody waits for it", "standard": "it may wait a little", "batch": "it may wait"}
_PRIVACY_WORDS = {
    "public": "any node may read them",
    "trusted_owners": "nodes of trusted owners may read them",
    "own_nodes": "your own nodes may read them",
}


class ConsentSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Table `[consent]`: what this machine accepts. A change acts at once."""

    models_allowed: Annotated[Patterns, Meta(description='names of public models, as "smollm2*"')] = ("*",)
    models_denied: Annotated[Patterns, Meta(description="never these, whatever models_allowed says")] = ()
    licences: Annotated[Patterns, Meta(description="SPDX identifiers of the models' licences")] = tuple(
        sorted(LICENCES)
    )
    kinds: Annotated[tuple[KindName, ...], Meta(description="kinds of work")] = ("generate", "score", "embed")
    service_classes: Annotated[tuple[ServiceName, ...], Meta(description="how urgent work may be")] = (
        "interactive",
        "standard",
        "batch",
    )
    privacy_classes: Annotated[tuple[PrivacyName, ...], Meta(description="who may read the prompts that come here")] = (
        "public",
        "trusted_owners",
        "own_nodes",
    )
    context_tokens: Annotated[Tokens, Meta(description="prompt and answer together")] | None = None
    answer_tokens: Annotated[Tokens, Meta(description="one answer")] | None = None
    daily_tokens: Annotated[Tokens, Meta(description="prompts and answers of one local day")] | None = None
    hours: Annotated[
        tuple[str, ...], Meta(description='in which work is taken, as "22:00-07:00" or "mon-fri 22:00-07:00"')
    ] = ()
    upload_weights: Annotated[
        bool, Meta(description="send models that are here to other machines of the fleet; no effect yet")
    ] = False
    upload_mib_daily: Annotated[int, Meta(ge=1, le=2**30, description="of weights, at most")] = 10_240

    def __post_init__(self) -> None:
        parse_schedule(self.hours)
        for licence in self.licences:
            _check_licence(licence)


class NamedModel(Protocol):
    """What consent asks of a model; a `Manifest` and a `ServedModel` have it."""

    @property
    def name(self) -> str: ...

    @property
    def licence(self) -> str: ...


class Asked(Protocol):
    """What consent asks of an order; a `TaskOrder` has it."""

    @property
    def kind(self) -> TaskKind: ...

    @property
    def service_class(self) -> ServiceClass: ...

    @property
    def privacy_class(self) -> PrivacyClass: ...

    @property
    def prompt_token_count(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def model(self) -> NamedModel: ...


class Consent:
    """Holds orders and models against an owner's settings. Immutable."""

    def __init__(self, settings: ConsentSettings) -> None:
        self.settings = settings
        self._schedule = parse_schedule(settings.hours)

    def refusal(self, asked: Asked, tokens_today: int, local_time: LocalTimeObserved | None) -> str | None:
        """Return why an order that arrives now is outside of the owner's consent, naming the setting; None if inside.

        Args:
            tokens_today: worked on today, and promised to orders that run; from `TOKENS_NOT_KNOWN` on, nobody knows.
            local_time: None where it is not known; hours are then refused.
        """
        return self.forbids(asked) or self._used_up(tokens_today, _sequence(asked)) or self.closed(local_time)

    def forbids(self, asked: Asked) -> str | None:
        """As `refusal`, at any hour and whatever was worked on today: for what runs while the settings change."""
        settings = self.settings
        return (
            self.allows_model(asked.model)
            or _outside("kinds", asked.kind.value, settings.kinds)
            or _outside("service_classes", asked.service_class.value, settings.service_classes)
            or _outside("privacy_classes", asked.privacy_class.value, settings.privacy_classes)
            or _above("context_tokens", _sequence(asked), settings.context_tokens)
            or _above("answer_tokens", asked.max_tokens, settings.answer_tokens)
        )

    def allows_model(self, model: NamedModel) -> str | None:
        """Return why the owner does not want this model here, naming the setting; None if it is welcome."""
        settings = self.settings
        for pattern in settings.models_denied:
            if fnmatchcase(model.name, pattern):
                return f"consent.models_denied names {pattern!r}, and the model is {model.name!r}"
        if not any(fnmatchcase(model.name, pattern) for pattern in settings.models_allowed):
            return f"consent.models_allowed does not name the model {model.name!r}"
        return _outside("licences", model.licence, settings.licences)

    def upload_refusal(self, size_bytes: int, uploaded_today_bytes: int) -> str | None:
        """Return why these bytes of a model may not go to another machine, naming the setting; None if they may."""
        if not self.settings.upload_weights:
            return "consent.upload_weights is false"
        wanted_mib = -(-(size_bytes + uploaded_today_bytes) // MIB)
        return _above("upload_mib_daily", wanted_mib, self.settings.upload_mib_daily)

    def _used_up(self, tokens_today: int, wanted: int) -> str | None:
        limit = self.settings.daily_tokens
        if limit is not None and tokens_today >= TOKENS_NOT_KNOWN:
            return f"consent.daily_tokens is {limit}, and what was worked on earlier today is not known any more"
        return _above("daily_tokens", tokens_today + wanted, limit)

    def closed(self, local_time: LocalTimeObserved | None) -> str | None:
        if not self._schedule.windows:
            return None
        if local_time is None:
            return "consent.hours are set, and the local time is not known"
        if self._schedule.open_at(local_time.weekday, local_time.minute):
            return None
        return f"consent.hours are {', '.join(self.settings.hours)}"


def _check_licence(name: str) -> None:
    """Refuse what is no SPDX identifier: it would stand for no model, and its owner would not know why.

    Any licence of the SPDX list may be named, also one that no model of the fleet has today.

    Raises:
        ValueError: says what may have been meant.
    """
    try:
        known = canonicalize_license_expression(name)
    except InvalidLicenseExpression:
        close = difflib.get_close_matches(name, sorted(LICENCES), n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"models of the fleet have {', '.join(sorted(LICENCES))}"
        raise ValueError(f"licences: {name!r} is no SPDX identifier; {meant}") from None
    if len(known.split()) > 1:
        raise ValueError(f"licences: {name!r} is more than one; write each as an entry of its own")
    if known != name:
        raise ValueError(f"licences: {name!r} is written {known!r}")


def _sequence(asked: Asked) -> int:
    return asked.prompt_token_count + asked.max_tokens


def _outside(key: str, value: str, allowed: Sequence[str]) -> str | None:
    return None if value in allowed else f"consent.{key} does not name {value!r}"


def _above(key: str, value: int, most: int | None) -> str | None:
    return None if most is None or value <= most else f"consent.{key} is {most}, this would make it {value}"


def describe(settings: ConsentSettings) -> list[str]:
    """Return in plain words what the machine accepts, one line each, for its owner to read before anything is lent."""
    models = "every model of the fleet" if "*" in settings.models_allowed else _listed(settings.models_allowed)
    denied = f", never {_listed(settings.models_denied)}" if settings.models_denied else ""
    lengths = [
        f"{tokens:,} tokens {what}"
        for tokens, what in (
            (settings.context_tokens, "for prompt and answer together"),
            (settings.answer_tokens, "for an answer"),
            (settings.daily_tokens, "a day"),
        )
        if tokens is not None
    ]
    # No machine fetches a model from another one yet; the owner's word stands for when one can.
    upload = (
        f"not yet possible; allowed, up to {settings.upload_mib_daily:,} MiB a day" if settings.upload_weights else "no"
    )
    return [
        "This machine accepts:",
        f"  models    {models}{denied}",
        f"  licences  {_listed(settings.licences)}",
        f"  work      {_listed([_KIND_WORDS[kind] for kind in settings.kinds])}",
        f"  urgency   {_listed([f'{name} ({_SERVICE_WORDS[name]})' for name in settings.service_classes])}",
        f"  prompts   {_listed([f'{name} ({_PRIVACY_WORDS[name]})' for name in settings.privacy_classes])}",
        f"  at most   {_listed(lengths) if lengths else 'what the models allow'}",
        f"  hours     {_listed(settings.hours) if settings.hours else 'whenever a card is lent'}",
        f"It sends models that it has to other machines: {upload}.",
        "Whatever else the fleet asks for is refused. Table [consent] of the agent's file changes this at any time.",
    ]


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"
