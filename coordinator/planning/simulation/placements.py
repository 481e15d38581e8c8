"""The real placement in virtual time: what open nodes hold follows what is asked for.

`coordinator.fleet.placing` decides, as in a coordinator; here nodes become the
views that it reads. It looks every 15 s and not every 5, and a second after
somebody asks for what is ready nowhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from coordinator.fleet.churn import Churn
from coordinator.fleet.placing import OpenNode as Expected
from coordinator.fleet.placing import Placing, Wanted
from coordinator.fleet.registry import OFFLINE, ONLINE, NodeView
from coordinator.planning.hardware import CARDS
from coordinator.planning.simulation.node import ENGINE_ID, Node
from coordinator.planning.simulation.open_node import OpenNode
from coordinator.quotes import AnswerLengths
from coordinator.scheduler.busy import busy_s
from coordinator.scheduler.events import ModelsComing, ModelsWanted
from coordinator.scheduler.state import Scheduler
from coordinator.store.port import NodeRow
from coordinator.store.verification_port import RateRow
from inference.task import ManifestDigest
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1.node_service_pb2 import NodeState

LOOK_MS: Final = 15_000.0
# After the first that asks for what is ready nowhere, with all that ask meanwhile.
LOOK_SOON_MS: Final = 1_000.0
# Nobody here fills his disk.
ROOM_BYTES: Final = 2**50


class Placements:
    """The placement of one run.

    Args:
        sizes_bytes: of the files of each model.
        histories: of owners, which say how long nodes are expected to stay.
    """

    def __init__(
        self, nodes: Sequence[Node], sizes_bytes: Mapping[ManifestDigest, int], scheduler: Scheduler, histories: Churn
    ) -> None:
        self._nodes = nodes
        self._scheduler = scheduler
        self._histories = histories
        self._placing = Placing()
        self._lengths = AnswerLengths()
        self._wanted: Wanted = {}
        self._coming: frozenset[ManifestDigest] = frozenset()
        self._rows = [_row(node) for node in nodes]
        self._digests = list(sizes_bytes)
        for digest, size_bytes in sizes_bytes.items():
            self._placing.add_model(digest, size_bytes)

    def asked(self, digest: ManifestDigest, max_tokens: int, now_ms: float) -> bool:
        """Note a task; return whether its model is ready nowhere, so that somebody should look at once."""
        self._placing.demand.asked(digest, self._lengths.likely(digest, max_tokens), now_ms / 1000.0)
        return digest in self._coming

    def answered(self, digest: ManifestDigest, tokens: int) -> None:
        """Note how long an answer was."""
        self._lengths.ended(digest, tokens)

    def look(self, now_ms: float, unix_s: float) -> list[ModelsWanted | ModelsComing]:
        """Return what the scheduler is to know. Args: `unix_s` is the time that `histories` count in."""
        now_s = now_ms / 1000.0
        views = [
            _view(node, row, _report(node, self._digests, now_ms))
            for node, row in zip(self._nodes, self._rows, strict=True)
        ]
        open_nodes = {}
        for node, view in zip(self._nodes, views, strict=True):
            if isinstance(node, OpenNode) and view.report is not None:
                self._placing.saw(node.node_id, view.report, now_s)
                expected_s = self._histories.expected_lent_s(node.node_id, unix_s)
                open_nodes[node.node_id] = Expected(expected_s, busy_s(self._scheduler, node.node_id))
        looked = self._placing.look(views, open_nodes, now_s)
        news = looked.news(self._wanted)
        self._wanted = {**self._wanted, **looked.wanted}
        self._coming = frozenset(looked.waits_s)
        return news


def _row(node: Node) -> NodeRow:
    return NodeRow(
        node_id=node.node_id,
        owner_id=node.owner_id,
        label="",
        signing_public_key=b"",
        key_epoch=1,
        certificate_serial="",
        certificate_not_after_ms=0,
        enrolled_at_ms=0,
        banned_at_ms=None,
        ban_reason=None,
        draining=False,
    )


def _view(node: Node, row: NodeRow, report: NodeState) -> NodeView:
    return NodeView(
        row=row,
        owner_name="",
        status=ONLINE if node.connected else OFFLINE,
        agent_version="",
        report=report,
        last_seen_at_ms=0,
        running_attempts=0,
        rates=_rates(node),
    )


def _rates(node: Node) -> tuple[RateRow, ...]:
    """Return what a node has been measured to do with each model that it has had, all its slots taken."""
    if not isinstance(node, OpenNode):
        curves = {node.digest: node.curve}
    else:
        curves = {digest: node.models[digest].curve for digest in node.stored}
    rates = []
    for digest, curve in curves.items():
        slots = node.fleet.slots_of(curve)
        rates.append(
            RateRow(
                node_id=node.node_id,
                manifest_digest=digest,
                streams=slots,
                engine_build="simulated",
                tokens_per_second=1000.0 * slots / curve.step_ms(slots, 0),
                first_token_ms=0,
                joules_per_token=0.0,
                energy_method="none",
                measured_at_ms=0,
            )
        )
    return tuple(rates)


def _report(node: Node, digests: Iterable[ManifestDigest], now_ms: float) -> NodeState:
    engine = capability_pb2.Engine(
        engine_id=ENGINE_ID,
        kind="simulated",
        status=_status(node),
        manifest_digest=node.digest,
        tokens_per_second=1000.0 / node.curve.step_ms(1, 0),
    )
    if not isinstance(node, OpenNode):
        return NodeState(engines=[engine])
    total_bytes = node.models[node.wanted].size_bytes if node.wanted else 0
    engine.open.CopyFrom(
        capability_pb2.OpenEngine(
            memory_bytes=round(node.fleet.cards * CARDS[node.fleet.card].memory_bytes),
            wanted_digest=node.wanted or "",
            fetched_bytes=node.fetched_bytes(now_ms),
            total_bytes=total_bytes,
            refusals=[
                capability_pb2.ModelRefusal(manifest_digest=digest, reason="not measured on this card")
                for digest in digests
                if digest not in node.models
            ],
        )
    )
    store = capability_pb2.ModelStore(
        manifest_digests=node.stored, room_bytes=ROOM_BYTES, line_bytes_per_s=round(node.fleet.line_bytes_per_s)
    )
    return NodeState(engines=[engine], models=store)


def _status(node: Node) -> "capability_pb2.EngineStatus.ValueType":
    if not node.lent:
        return capability_pb2.ENGINE_STATUS_GIVEN_BACK
    if isinstance(node, OpenNode) and node.loading:
        return capability_pb2.ENGINE_STATUS_STARTING
    return capability_pb2.ENGINE_STATUS_READY
