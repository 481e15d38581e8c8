"""The report as Markdown: words.py's sentences around the tables."""

from collections.abc import Iterator, Sequence
from typing import Final

from coordinator.planning.paper import claims, verdicts, words
from coordinator.planning.paper.fleets import (
    FOUR_PAIRS,
    HYBRIDS,
    LLAMA_8B,
    QWEN_7B,
    SINGLES,
    TENSOR_PARALLEL,
    PaperFleet,
)
from coordinator.planning.paper.measured import Table2Row
from coordinator.planning.paper.printed import H100, MODEL
from coordinator.planning.paper.study import Study
from coordinator.planning.paper.sustained import Sustained
from coordinator.planning.simulation.figures import Quantiles
from inference.task import ServiceClass

_NAMES: Final = {"H100-PCIe": "H100", "RTX-4090": "4090"}


def measured_part(study: Study) -> str:
    """Return what follows from the rows and the curves alone."""
    return "\n".join(
        [words.table_2(study), *_table_2(study), "", *_energy(study), "", words.method(study), *_replays(study)]
    )


def simulated_part(study: Study) -> str:
    """Return the claims and what was simulated; all fleets must have been run."""
    parts = [
        words.said("claims_head"),
        *_claims(study),
        "",
        words.sustained(),
        *_picture("paper_throughput", "Throughput by load"),
    ]
    for model, fleets, pictures in (
        (MODEL, (*TENSOR_PARALLEL, FOUR_PAIRS), ("paper_cost_14b", "paper_first_token_14b")),
        (LLAMA_8B, _with(LLAMA_8B, SINGLES), ("paper_cost_8b", "paper_first_token_8b")),
        (QWEN_7B, _with(QWEN_7B, SINGLES), ()),
    ):
        parts += [f"### {model}", "", *_sustained(study, fleets), ""]
        for name in pictures:
            parts += _picture(name, f"{model}: {'rent' if 'cost' in name else 'first tokens'} by load")
    parts.append(words.said("hybrid"))
    for model in (LLAMA_8B, MODEL):
        parts += [f"### {model}", "", *_hybrids(study, _with(model, HYBRIDS)), ""]
    return "\n".join(parts)


def report(study: Study) -> str:
    """Return the whole page."""
    return "\n".join([words.head(), simulated_part(study), measured_part(study), "", words.limits(study)])


def _with(model: str, fleets: Sequence[PaperFleet]) -> tuple[PaperFleet, ...]:
    return tuple(fleet for fleet in fleets if fleet.model == model)


def _picture(name: str, says: str) -> list[str]:
    return [f"![{says}](images/{name}.svg)", ""]


def _head(*columns: str) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield "|" + "|".join("---" if not number else "--:" for number in range(len(columns))) + "|"


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _claims(study: Study) -> Iterator[str]:
    yield "| claim | rows (measured) | sustained (simulated) | verdict |"
    yield "|---|---|---|---|"
    for claim in verdicts.all_claims(study):
        yield _row(*claim)


def _table_2(study: Study) -> Iterator[str]:
    yield from _head(
        "fleet",
        "requests/s",
        "#",
        "$/M tokens",
        "tokens/s",
        "requests/s served",
        "first token P50",
        "P90",
        "P99",
        "ratio",
        "$ ratio",
    )
    for row in study.table:
        run = row.run
        yield _row(
            f"{run.configuration.cards}x{_NAMES[run.configuration.card]}",
            f"{run.requests_per_second:g}",
            f"{row.printed.number}",
            _beside(row, "usd_per_million", 3),
            _beside(row, "tokens_per_second", 2),
            _beside(row, "served_per_second", 2),
            _beside(row, "first_token_ms_p50", 2),
            _beside(row, "first_token_ms_p90", 2),
            _beside(row, "first_token_ms_p99", 2),
            f"{row.throughput_ratio:.2f}",
            f"{row.usd_ratio:.2f}",
        )


def _beside(row: Table2Row, name: str, digits: int) -> str:
    text = f"{getattr(row.run, name):.{digits}f}"
    return f"{text} (prints {row.differing[name]})" if name in row.differing else text


def _energy(study: Study) -> Iterator[str]:
    yield words.energy(study)
    yield from _head(
        "", "requests/s", "J per token, paper's watts", "M tokens/kWh", "gCO2/M tokens", "J per token, makers' watts"
    )
    for row, paper, maker in claims.table_3(study):
        yield _row(
            f"{row.run.configuration.cards}x{_NAMES[row.run.configuration.card]}",
            f"{row.run.requests_per_second:g}",
            f"{paper.joules_per_million / 1e6:.3f}",
            f"{paper.million_tokens_per_kwh:.1f}",
            f"{paper.grams_per_million:.1f}",
            f"{maker.joules_per_million / 1e6:.3f}",
        )
    yield ""
    yield from _head("joules beside the H100's at the same load", *(f"{load:g}/s" for load in words.loads(study)))
    for cards in (2, 4, 8):
        ratios = claims.matched_energy(study, cards)
        yield _row(f"{cards}x4090, paper's watts", *(f"{one.paper_watts:.2f}" for one in ratios))
        yield _row(f"{cards}x4090, makers' watts", *(f"{one.maker_watts:.2f}" for one in ratios))


def _replays(study: Study) -> Iterator[str]:
    yield from _head(
        "fleet",
        "requests/s",
        "measured tokens/s",
        "replayed",
        "sustained",
        "measured P99 first token, ms",
        "replayed, kept prompts",
        "replayed, new prompts",
    )
    sustained = {
        (_part(fleet), load): one for (fleet, load), one in study.sustained.items() if fleet in TENSOR_PARALLEL
    }
    for row in study.table:
        run = row.run
        replay = study.replays[run.configuration][run.requests_per_second]
        name = (run.configuration.card, run.configuration.cards)
        odd = "" if run.configuration.card == H100 else "‡"
        one = sustained.get((name, run.requests_per_second))
        yield _row(
            f"{run.configuration.cards}x{_NAMES[run.configuration.card]}",
            f"{run.requests_per_second:g}",
            f"{run.tokens_per_second:,.0f}",
            f"{replay.tokens_per_second:,.0f}",
            "-" if one is None else _throughput(study, one),
            f"{run.first_token_ms_p99:,.0f}",
            f"{replay.as_measured.first_token_ms_p99:,.0f}{odd}" if replay.prompts_kept else "-",
            f"{replay.fresh.first_token_ms_p99:,.0f}{odd}",
        )


def _part(fleet: PaperFleet) -> tuple[str, int]:
    return fleet.parts[0].card, fleet.parts[0].cards


def _throughput(study: Study, one: Sustained) -> str:
    return f"{one.tokens_per_second:,.0f}{'†' if study.extrapolated(one) else ''}"


def _sustained(study: Study, fleets: Sequence[PaperFleet]) -> Iterator[str]:
    yield from _head(
        "fleet",
        "requests/s",
        "tokens/s",
        "first token ms P50 / P90 / P99",
        "ms per token P50",
        "in target",
        "$/M rented",
        "$/M worked",
        "J per token",
        "at once",
    )
    for fleet in fleets:
        for one in (of for (which, _), of in study.sustained.items() if which == fleet):
            yield _row(
                fleet.name,
                f"{one.requests_per_second:g}",
                _throughput(study, one),
                _waits(one, one.first_token_ms),
                f"{one.token_ms.p50:.1f}",
                f"{one.classes[ServiceClass.INTERACTIVE].in_target:.1%}",
                f"{one.usd_per_million_rented:.3f}",
                f"{one.usd_per_million_worked:.3f}",
                f"{one.joules_per_million / 1e6:.3f}",
                f"{one.answers_at_once:.2g}" if one.answers_at_once < 1.0 else f"{one.answers_at_once:.0f}",
            )


def _hybrids(study: Study, fleets: Sequence[PaperFleet]) -> Iterator[str]:
    yield from _head(
        "fleet",
        "requests/s",
        "$/h",
        "tokens/s",
        "interactive: first token ms P50 / P90 / P99",
        "in target",
        "batch in target",
        "$/M rented",
        "$/M worked",
        "J per token",
        "busy",
    )
    for fleet in fleets:
        for one in study.by_load(fleet):
            interactive = one.classes[ServiceClass.INTERACTIVE]
            yield _row(
                fleet.name,
                f"{one.requests_per_second:g}",
                f"{one.usd_per_hour:.2f}",
                _throughput(study, one),
                _waits(one, interactive.first_token_ms),
                f"{interactive.in_target:.1%}",
                f"{one.classes[ServiceClass.BATCH].in_target:.1%}",
                f"{one.usd_per_million_rented:.3f}",
                f"{one.usd_per_million_worked:.3f}",
                f"{one.joules_per_million / 1e6:.3f}",
                " / ".join(f"{share:.0%}" for share in one.busy),
            )


def _waits(one: Sustained, waits: Quantiles) -> str:
    odd = "" if one.fleet.first_tokens_fitted else "‡"
    if not one.kept_up and (waits.p50 is None or waits.p50 > 1_000.0):
        return f"**full**, {one.unserved:.1%}"
    told = " / ".join(f"{value:,.0f}" for value in (waits.p50, waits.p90, waits.p99) if value is not None)
    return told + odd if one.kept_up else f"{told}{odd}, **full**, {one.unserved:.1%}"
