"""The report's sentences, which are in words.toml, with the study's figures in them."""

import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from coordinator.planning.benchmark import REQUESTS
from coordinator.planning.paper import claims
from coordinator.planning.paper.fleets import COUNTED_REQUESTS_MIN, COUNTED_S_MIN, INTERACTIVE, WARM_UP_S
from coordinator.planning.paper.measured import of_configuration
from coordinator.planning.paper.printed import H100, MODEL, PAPER_WATTS, RTX_4090
from coordinator.planning.paper.study import Study

WORDS: Final[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "words.toml").read_text(encoding="utf-8"))
# A median first token of a second, with one request a second: the machine had little else to do.
SLOW_MS: Final = 1_000.0


def said(name: str, **figures: object) -> str:
    """Return a text with figures in it."""
    return str(WORDS[name]).format(**figures)


def head() -> str:
    return said("head", benchmark=REQUESTS, warm_up=WARM_UP_S, span=COUNTED_S_MIN, requests=COUNTED_REQUESTS_MIN)


def sustained() -> str:
    return said("sustained", first=INTERACTIVE.first_token_ms, token=INTERACTIVE.token_ms)


def table_2(study: Study) -> str:
    counts = [len(row.differing) for row in study.table if row.differing]
    name = "not_as_printed" if counts else "as_printed"
    differing = said(name, rows=len(study.table), count=len(counts), cells=sum(counts))
    return said("table_2", model=MODEL, differing=differing)


def energy(study: Study) -> str:
    differing = listed(claims.table_3_differing(study))
    told = f"The paper prints {differing}." if differing else ""
    return said("energy", paper=PAPER_WATTS[H100], maker=claims.makers_watts(study)[H100], differing=told)


def method(study: Study) -> str:
    run = of_configuration(study.table, H100, 1)[-1].run
    error, worst = max(claims.replay_errors(study), key=lambda pair: abs(pair[0]))
    where = f"{worst.configuration.cards}x{worst.configuration.card} at {worst.requests_per_second:g}/s"
    burst_s, took_s = REQUESTS / run.requests_per_second, REQUESTS / run.served_per_second
    load = run.requests_per_second
    return said("method", requests=REQUESTS, load=load, burst=burst_s, took=took_s, error=error, worst=where)


def limits(study: Study) -> str:
    odd = [
        said(
            "slow",
            cards=run.configuration.cards,
            model=short(run.configuration.model),
            seconds=run.first_token_ms_p50 / 1000.0,
            load=run.requests_per_second,
        )
        for run in study.runs
        if run.configuration.card == RTX_4090 and run.requests_per_second == 1.0 and run.first_token_ms_p50 > SLOW_MS
    ]
    cards = study.prices.cards.items()
    prices = [said("price", card=name, usd=card.usd_per_hour, watts=card.load_watts) for name, card in cards]
    return said("limits", benchmark=REQUESTS, slow=" ".join(odd), as_of=study.prices.as_of, prices=listed(prices))


def loads(study: Study) -> list[float]:
    """Return the paper's loads, ascending."""
    return sorted({row.run.requests_per_second for row in study.table})


def short(model: str) -> str:
    return model.removeprefix("DeepSeek-R1-Distill-").removeprefix("Meta-").removesuffix("-Instruct")


def listed(values: Iterable[str]) -> str:
    """Return "a, b and c"."""
    *front, last = list(values) or ["none"]
    return f"{', '.join(front)} and {last}" if front else last


def numbers(values: Sequence[float], form: str = "g") -> str:
    """Return "1, 2 and 3", each in that form."""
    return listed(format(value, form) for value in values)
