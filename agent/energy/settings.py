"""Table `[energy]`: what the owner pays for electricity, and where it comes from."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Annotated

import msgspec

# 1 kWh in mJ.
MJ_PER_KWH = 3_600_000_000
_PRICE_PER_KWH_MAX = 1000
_PRICE_DECIMALS = 6
_CURRENCY = re.compile(r"[A-Z]{3}", re.ASCII)


class EnergySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[energy]`: what the owner pays, and where the machine stands.

    Raises:
        ValueError: a price out of range, or a currency that is none; msgspec adds the table.
    """

    price_per_kwh: Annotated[
        Decimal | None,
        msgspec.Meta(description='what a kWh costs, in `currency`; for example "0.32", at most 6 decimals'),
    ] = None
    currency: Annotated[str, msgspec.Meta(description="ISO 4217 code of the currency of `price_per_kwh`")] = "EUR"
    country: (
        Annotated[
            str,
            msgspec.Meta(
                min_length=1,
                description='ISO 3166 code of the country ("DE" or "DEU"), for the carbon intensity of its electricity',
            ),
        ]
        | None
    ) = None
    carbon_file: Annotated[
        Path | None,
        msgspec.Meta(description="a file that another program keeps up to date with the grams of CO2 per kWh"),
    ] = None
    tdp_w: Annotated[
        dict[str, Annotated[float, msgspec.Meta(gt=0, le=5000)]],
        msgspec.Meta(
            description="watts under load, by card uuid, or `cpu`; for cards that tell neither energy nor power"
        ),
    ] = {}

    def __post_init__(self) -> None:
        if not _CURRENCY.fullmatch(self.currency):
            raise ValueError(f'currency must be three capital letters, such as "EUR", not {self.currency!r}')
        price = self.price_per_kwh
        if price is None:
            return
        if not price.is_finite() or not 0 <= price <= _PRICE_PER_KWH_MAX:
            raise ValueError(f"price_per_kwh must lie between 0 and {_PRICE_PER_KWH_MAX}, not be {price}")
        if price != round(price, _PRICE_DECIMALS):
            raise ValueError(f"price_per_kwh has more than {_PRICE_DECIMALS} decimals: {price}")

    @property
    def price_per_kwh_micro(self) -> int | None:
        """Millionths of the currency per kWh."""
        return None if self.price_per_kwh is None else int(self.price_per_kwh.scaleb(_PRICE_DECIMALS))


def cost_micro(energy_mj: int, price_per_kwh_micro: int) -> int:
    """Return what that energy costs in millionths of the currency, rounded half up."""
    return (energy_mj * price_per_kwh_micro + MJ_PER_KWH // 2) // MJ_PER_KWH
