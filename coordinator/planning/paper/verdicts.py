"""Each headline claim with what rows and simulation say of it: figures for words.toml, and which verdict they bear."""

from collections.abc import Callable, Mapping
from typing import Final

from coordinator.planning.paper import claims
from coordinator.planning.paper.fleets import LLAMA_8B, QWEN_7B
from coordinator.planning.paper.measured import of_configuration, runs_by_load
from coordinator.planning.paper.printed import H100, MODEL, PAPER_WATTS, RTX_4090
from coordinator.planning.paper.study import Study
from coordinator.planning.paper.words import WORDS, listed, loads, numbers, short
from coordinator.planning.rows import Configuration
from inference.task import ServiceClass

# The paper's figures that verdicts are held against.
SHARE_LOW, SHARE_HIGH = 0.62, 0.78
HALF_USD: Final = "0.111"
BATCH_SAVING: Final = 0.75
H100_WAIT_MS: Final = 55.0
CONSUMER_WAIT_MS: Final = 500.0
GROUP_TIMES: Final = 1.5
SMALL: Final = (LLAMA_8B, QWEN_7B)

# Figures by the names that words.toml has for them, and the name of the verdict.
Finding = tuple[Mapping[str, object], str]


def all_claims(study: Study) -> list[tuple[str, str, str, str]]:
    """Return of each claim: itself, what the rows say, what the simulation says, the verdict."""
    told = []
    for name, find in _CLAIMS.items():
        figures, verdict = find(study)
        text = WORDS["claims"][name]
        claim, rows, simulated, last = (
            text[part].format(**figures) for part in ("claim", "rows", "simulated", verdict)
        )
        told.append((claim, rows, simulated, last))
    return told


def _holds(true: bool) -> str:
    return "holds" if true else "fails"


def _throughput(study: Study) -> Finding:
    rows = of_configuration(study.table, RTX_4090, 4)
    beside = claims.pairs(study, claims.H100_14B, claims.FOUR_14B)
    h100, four = claims.best(study, claims.H100_14B), claims.best(study, claims.FOUR_14B)
    share = four.tokens_per_second / h100.tokens_per_second
    low, high = (
        listed(f"row {row.printed.number} over {of.printed.number}" for row, of in claims.rows_at(study.table, 4, at))
        for at in (SHARE_LOW, SHARE_HIGH)
    )
    inside = [row.run.requests_per_second for row in rows if SHARE_LOW <= row.throughput_ratio <= SHARE_HIGH]
    figures = {
        "shares": numbers([row.throughput_ratio for row in rows], ".2f"),
        "loads": numbers(loads(study)),
        "inside": numbers(inside),
        "low": low,
        "high": high,
        "sustained": numbers([pair.throughput for pair in beside], ".2f"),
        "four": four.tokens_per_second,
        "h100": h100.tokens_per_second,
        "together": claims.together(beside),
        "share": share,
    }
    return figures, _holds(SHARE_LOW <= share <= SHARE_HIGH)


def _half_cost(study: Study) -> Finding:
    beside = claims.pairs(study, claims.H100_14B, claims.FOUR_14B)
    lowest = min(study.table, key=lambda row: row.run.usd_per_million)
    named = next(row for row in study.table if row.printed.figures["usd_per_million"] == HALF_USD)
    figures = {
        "ratios": numbers([row.usd_ratio for row in of_configuration(study.table, RTX_4090, 4)], ".2f"),
        "named": named.printed.number,
        "named_cards": named.run.configuration.cards,
        "lowest": lowest.run.usd_per_million,
        "row": lowest.printed.number,
        "cards": lowest.run.configuration.cards,
        "wait_s": lowest.run.first_token_ms_p99 / 1000.0,
        "sustained": numbers([pair.usd for pair in beside], ".2f"),
        "together": claims.together(beside),
        "dearer": numbers([pair.requests_per_second for pair in beside if pair.usd > 1.0]),
    }
    return figures, _holds(all(pair.usd <= 0.5 for pair in beside))


def _three_quarters(study: Study) -> Finding:
    rows = of_configuration(study.table, RTX_4090, 2)
    beside = claims.pairs(study, claims.H100_14B, claims.PAIR_14B)
    full = 1.0 - claims.best_ratio(study, claims.H100_14B, claims.PAIR_14B).usd
    small = [f"{_saves(1.0 - claims.best_ratio(study, *claims.single(model)).usd)} ({short(model)})" for model in SMALL]
    figures = {
        "saved": numbers([1.0 - row.usd_ratio for row in rows], ".0%"),
        "best": min(rows, key=lambda row: row.usd_ratio).run.requests_per_second,
        "sustained": numbers([1.0 - pair.usd for pair in beside], ".0%"),
        "full": _saves(full),
        "small": listed(small),
        "together": claims.together(beside),
    }
    return figures, _holds(full >= BATCH_SAVING)


def _saves(share: float) -> str:
    return f"saves {share:.0%}" if share >= 0.0 else f"costs {-share:.0%} more"


def _first_token(study: Study) -> Finding:
    rows = of_configuration(study.table, H100, 1)
    under = [row.run.requests_per_second for row in rows if row.run.first_token_ms_p99 < H100_WAIT_MS]
    replays = study.replays[Configuration(MODEL, H100, 1)]
    kept = [load for load, one in replays.items() if one.prompts_kept]
    waits = claims.waits(study, claims.H100_14B)
    over = [load for load, wait_ms in waits if wait_ms >= H100_WAIT_MS]
    figures = {
        "waits": numbers([row.run.first_token_ms_p99 for row in rows], ".0f"),
        "loads": numbers(loads(study)),
        "under": numbers(under),
        "kept": numbers(kept),
        "warm": numbers([replays[load].as_measured.first_token_ms_p99 for load in kept], ".0f"),
        "fresh": numbers([replays[load].fresh.first_token_ms_p99 for load in kept], ".0f"),
        "sustained": numbers([wait_ms for _, wait_ms in waits], ".0f"),
        "served": numbers([load for load, _ in waits]),
        "most": max(under),
        "over": numbers(over),
    }
    return figures, _holds(not over)


def _consumer_tails(study: Study) -> Finding:
    tensor = []
    for cards in (2, 4, 8):
        rows = of_configuration(study.table, RTX_4090, cards)
        within = [row.run.requests_per_second for row in rows if row.run.first_token_ms_p99 <= CONSUMER_WAIT_MS]
        tensor.append(f"{cards}x at {numbers(within)}")
    measured = [
        run.first_token_ms_p99
        for model in SMALL
        for run in runs_by_load(study.runs, Configuration(model, RTX_4090, 1)).values()
    ]
    simulated = {model: claims.waits(study, claims.single(model)[1]) for model in SMALL}
    figures = {
        "tensor": listed(tensor),
        "least": min(measured),
        "most": max(measured),
        "singles": listed(f"one RTX 4090 with {short(model)} {_waits(waits)}" for model, waits in simulated.items()),
        "pair": _waits(claims.waits(study, claims.PAIR_14B)),
    }
    return figures, _holds(all(wait <= CONSUMER_WAIT_MS for waits in simulated.values() for _, wait in waits))


def _waits(waits: list[tuple[float, float]]) -> str:
    return f"{numbers([wait for _, wait in waits], '.0f')} ms at {numbers([load for load, _ in waits])} requests/s"


def _energy(study: Study) -> Finding:
    (h100, _, _), (pair, _, _) = claims.table_3(study)
    unmatched = claims.energy_ratio(study, pair, h100)
    two, four = ([one.maker_watts for one in claims.matched_energy(study, cards)] for cards in (2, 4))
    beside = [one for one in claims.pairs(study, claims.H100_14B, claims.PAIR_14B) if one.both_keep_up]
    full = claims.best_ratio(study, claims.H100_14B, claims.PAIR_14B).joules
    small = [f"{short(model)} {claims.best_ratio(study, *claims.single(model)).joules:.1f}" for model in SMALL]
    figures = {
        "unmatched": unmatched.paper_watts,
        "unmatched_maker": unmatched.maker_watts,
        "row": pair.printed.number,
        "of": h100.printed.number,
        "paper": PAPER_WATTS[H100],
        "maker": claims.makers_watts(study)[H100],
        "two": f"{min(two):.1f} to {max(two):.1f}",
        "four": f"{min(four):.1f} to {max(four):.1f}",
        "sustained": numbers([one.joules for one in beside], ".1f"),
        "together": numbers([one.requests_per_second for one in beside]),
        "full": full,
        "small": listed(small),
        "least": min(full, *(one.joules for one in beside)),
        "most": max(full, *(one.joules for one in beside)),
    }
    return figures, "verdict"


def _four_pairs(study: Study) -> Finding:
    named = next(row for row in study.table if row.printed.figures["usd_per_million"] == HALF_USD)
    ok = [one for one in study.by_load(claims.PAIRS_14B) if one.kept_up][-1]
    full, h100 = claims.best(study, claims.PAIRS_14B), claims.best(study, claims.H100_14B)
    figures = {
        "row": named.printed.number,
        "served": named.run.served_per_second,
        "load": ok.requests_per_second,
        "in_target": ok.classes[ServiceClass.INTERACTIVE].in_target,
        "full": full.served_per_second,
        "usd": full.usd_per_hour,
        "h100": h100.served_per_second,
        "h100_usd": h100.usd_per_hour,
        "rents": h100.usd_per_hour / full.usd_per_hour,
        "times": h100.served_per_second / full.served_per_second,
    }
    return figures, _holds(full.served_per_second >= GROUP_TIMES * h100.served_per_second)


def _split(study: Study) -> Finding:
    told, mixed = [], []
    for model in (LLAMA_8B, MODEL):
        found = claims.cheapest(study, model)
        names = [f"{load:g}: {one.fleet.name if one else 'none'}" for load, one in found]
        told.append(f"{short(model)}: {', '.join(names)}")
        mixed += [f"{load:g}/s ({short(model)})" for load, one in found if one and len(one.fleet.parts) > 1]
    figures = {"share": claims.IN_TARGET_MIN, "cheapest": "; ".join(told), "mixed": listed(mixed)}
    return figures, _holds(bool(mixed))


_CLAIMS: Final[dict[str, Callable[[Study], Finding]]] = {
    "throughput": _throughput,
    "half_cost": _half_cost,
    "three_quarters": _three_quarters,
    "first_token": _first_token,
    "consumer_tails": _consumer_tails,
    "energy": _energy,
    "four_pairs": _four_pairs,
    "split": _split,
}
