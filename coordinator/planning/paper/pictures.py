"""The report's figures. The same study gives the same bytes."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from coordinator.planning.charts import Axis, Line, draw_lines
from coordinator.planning.paper.fleets import FOUR_PAIRS, LLAMA_8B, LOADS, SINGLES, TENSOR_PARALLEL, PaperFleet
from coordinator.planning.paper.measured import of_configuration
from coordinator.planning.paper.study import Study
from coordinator.planning.paper.sustained import Sustained

_LOAD: Final = Axis(label="requests/s offered", log=True, low=LOADS[0], high=LOADS[-1])
_DOLLARS: Final = Axis(label="$ per million tokens, prompts and answers", log=True, low=0.01, high=2.0)
_WAIT: Final = Axis(label="ms to the first token, P99", log=True, low=10.0, high=20_000.0)


def pictures(study: Study) -> Iterator[tuple[str, str]]:
    """Yield each figure's name and SVG; the fleets must have been run at all loads."""
    small = [fleet for fleet in SINGLES if fleet.model == LLAMA_8B]
    yield "paper_throughput", _ratios(study)
    for name, model, fleets, measured in (
        ("14b", "Qwen-14B", (*TENSOR_PARALLEL, FOUR_PAIRS), list(_measured_waits(study))),
        ("8b", "Llama-3-8B", small, []),
    ):
        rents = _lines(study, fleets, _usd, dash_equal_rents=True)
        title = f"{model}, sustained: rent by load (dashed: an H100's rent)"
        yield f"paper_cost_{name}", draw_lines(title, _LOAD, _DOLLARS, rents)
        waits = [*_lines(study, fleets, _wait), *measured]
        yield (
            f"paper_first_token_{name}",
            draw_lines(f"{model}: first tokens, where a fleet keeps up", _LOAD, _WAIT, waits),
        )


def _lines(
    study: Study,
    fleets: Sequence[PaperFleet],
    value: Callable[[Sustained], float | None],
    *,
    dash_equal_rents: bool = False,
) -> list[Line]:
    """Return a line of each fleet. Args: `dash_equal_rents`: of those that cost as much as the first one."""
    cards = study.prices.cards
    lines: list[Line] = []
    for fleet in fleets:
        values = [(one.requests_per_second, value(one)) for one in study.by_load(fleet)]
        equal = fleet.usd_per_hour(cards) == fleets[0].usd_per_hour(cards)
        points = [(load, of) for load, of in values if of is not None]
        lines.append(Line(fleet.name, points, dashed=dash_equal_rents and bool(lines) and equal))
    return lines


def _usd(one: Sustained) -> float:
    return one.usd_per_million_rented


def _wait(one: Sustained) -> float | None:
    return one.first_token_ms.p99 if one.kept_up else None


def _ratios(study: Study) -> str:
    h100, *others = TENSOR_PARALLEL
    lines = []
    for number, fleet in enumerate(others):
        (part,) = fleet.parts
        rows = of_configuration(study.table, part.card, part.cards)
        measured = [(row.run.requests_per_second, row.throughput_ratio) for row in rows]
        lines.append(Line(f"{fleet.name}, 200 requests", measured, dashed=True, colour=number + 1))
    for number, fleet in enumerate(others):
        pairs = zip(study.by_load(fleet), study.by_load(h100), strict=True)
        points = [(one.requests_per_second, one.tokens_per_second / of.tokens_per_second) for one, of in pairs]
        lines.append(Line(f"{fleet.name}, sustained", points, colour=number + 1))
    share = Axis(label="tokens/s, of the H100's at the same load", low=0.0, high=1.0, percent=True)
    return draw_lines("Qwen-14B: throughput beside one H100", _LOAD, share, lines)


def _measured_waits(study: Study) -> Iterator[Line]:
    for number, fleet in enumerate(TENSOR_PARALLEL):
        (part,) = fleet.parts
        rows = of_configuration(study.table, part.card, part.cards)
        points = [(row.run.requests_per_second, row.run.first_token_ms_p99) for row in rows]
        yield Line(f"{fleet.name}, measured", points, dashed=True, colour=number)
