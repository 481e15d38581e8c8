"""The energy that a node's statement claims: the node's own figure, never evidence."""

from typing import NamedTuple

from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.common.v1.statement_pb2 import EnergyMethod, ResultStatement

# Sixteen cards of 3 kW, twice over. A figure beyond it is no measurement, and the sum of many would fit no column.
POWER_W_MAX = 100_000
# How a method is named outside of the protocol, for one that this release does not know.
UNKNOWN_METHOD = "unknown"

_NAMES: dict[int, str] = {
    EnergyMethod.ENERGY_METHOD_UNSPECIFIED: "none",
    EnergyMethod.ENERGY_METHOD_NONE: "none",
    EnergyMethod.ENERGY_METHOD_COUNTER: "counter",
    EnergyMethod.ENERGY_METHOD_INTEGRATED_POWER: "integrated_power",
    EnergyMethod.ENERGY_METHOD_ESTIMATE: "estimate",
}


class StatedEnergy(NamedTuple):
    """Millijoules of the cards, attributed to one attempt, and how the node knows them.

    Args:
        method: "counter", "integrated_power", "estimate", "none" (with 0 mJ), or "unknown" from a newer node.
    """

    energy_mj: int
    method: str


def stated_energy(statement: SignedEnvelope) -> StatedEnergy:
    """Return what a statement says, which `read_statement` has checked before."""
    stated = ResultStatement.FromString(statement.payload)
    return StatedEnergy(stated.energy_mj, _NAMES.get(stated.energy_method, UNKNOWN_METHOD))


def energy_fault(stated: ResultStatement) -> str | None:
    """Return what cannot be in a statement's figure, if anything."""
    if _NAMES.get(stated.energy_method) == "none" and stated.energy_mj:
        return "the statement gives joules that it says are not known"
    # A watt for a millisecond is a millijoule; times are rounded to one.
    if stated.energy_mj > POWER_W_MAX * (stated.total_ms + 1):
        return f"the statement claims {stated.energy_mj} mJ in {stated.total_ms} ms, more than cards draw"
    return None
