"""What a lent card may draw: table `[power]` of the agent's file."""

from dataclasses import dataclass
from typing import Annotated

import msgspec

# More than any card can draw (an SXM module of 2026 is limited to 1,400 W).
WATTS_MAX = 3000.0


class PowerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[power]`: what a lent card may draw. The owner's own limit comes back with the card.

    Raises:
        ValueError: a cap that is none; msgspec adds the key.
    """

    cap: Annotated[
        str | float,
        msgspec.Meta(description='"off", watts (280), or a part of the card\'s default limit ("80%")'),
    ] = "80%"
    cards: Annotated[dict[str, str | float], msgspec.Meta(description="the same by card uuid, where one differs")] = {}

    def __post_init__(self) -> None:
        parse_cap(self.cap)
        for uuid, cap in self.cards.items():
            try:
                parse_cap(cap)
            except ValueError as error:
                raise ValueError(f"{uuid}: {error}") from error

    def cap_of(self, card: str) -> "Cap | None":
        """Return the cap of a card; None for none."""
        return parse_cap(self.cards.get(card, self.cap))


@dataclass(frozen=True, slots=True)
class Cap:
    """Either watts, or a share of the default limit."""

    watts: float | None = None
    share: float | None = None


def parse_cap(text: str | float) -> Cap | None:
    """Return what a setting asks for; None for "off".

    Raises:
        ValueError: it is neither "off", nor watts, nor per cent.
    """
    if text == "off":
        return None
    if isinstance(text, str):
        number = text.removesuffix("%").strip()
        if not text.endswith("%") or not number.isascii() or not number.isdecimal() or not 10 <= int(number) <= 100:
            raise ValueError(f'a cap is "off", watts without quotes (280), or "10%" to "100%", not {text!r}')
        return Cap(share=int(number) / 100)
    # The comparison refuses NaN too.
    if not 1 <= text <= WATTS_MAX:
        raise ValueError(f"a cap in watts lies between 1 and {WATTS_MAX:g}, not at {text!r}")
    return Cap(watts=float(text))
