"""What the HTTP edge counts, and GET /metrics."""

import asyncio
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

LOOP_LAG_INTERVAL_S = 0.1

# From an idle small model to a request that queued.
_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# From a data-centre card to the gap of a failover.
_GAP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 3.0, 10.0)
# 5 ms is what one callback may take; 50 ms is the promise under load.
_LAG_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class FrameGaps(Collector):
    """Time between two frames of one stream, as a histogram.

    Observed for every frame of every stream: prometheus_client's histogram
    takes a lock twice and walks its buckets, some 2 us; this takes 0.2.
    """

    def __init__(self, name: str, documentation: str, buckets_s: Sequence[float], registry: CollectorRegistry) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = tuple(buckets_s)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, gap_s: float) -> None:
        self._counts[bisect_left(self._bounds, gap_s)] += 1
        self._sum += gap_s

    def collect(self) -> Iterator[HistogramMetricFamily]:
        cumulated: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            cumulated.append((bound, total))
        family = HistogramMetricFamily(self._name, self._documentation)
        family.add_metric([], cumulated, self._sum)
        yield family


class GatewayMetrics:
    """The gateway's metrics, in a registry that its process may share with others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.requests = Counter(
            "slackwater_gateway_requests",
            "HTTP requests answered.",
            ["endpoint", "status"],
            registry=registry,
        )
        self.in_flight = Gauge(
            "slackwater_gateway_requests_in_flight",
            "Completion requests admitted and not finished.",
            ["endpoint"],
            registry=registry,
        )
        self.errors = Counter(
            "slackwater_gateway_errors",
            "Failures said to clients, as a status or in mid-stream, by code.",
            ["code"],
            registry=registry,
        )
        self.disconnects = Counter(
            "slackwater_gateway_disconnects",
            "Requests whose client left, or was cut off for not reading.",
            ["cause"],
            registry=registry,
        )
        self.tokens = Counter(
            "slackwater_gateway_tokens",
            "Tokens of finished answers.",
            ["kind"],
            registry=registry,
        )
        self.time_to_first_token_s = Histogram(
            "slackwater_gateway_time_to_first_token_seconds",
            "From the request's arrival to its first token ids.",
            ["endpoint"],
            buckets=_TTFT_BUCKETS_S,
            registry=registry,
        )
        self.frame_gap_s = FrameGaps(
            "slackwater_gateway_inter_token_seconds",
            "Between two frames of token ids of one answer.",
            _GAP_BUCKETS_S,
            registry,
        )
        self.loop_lag_s = Histogram(
            "slackwater_gateway_event_loop_lag_seconds",
            f"How late the event loop wakes a sleeper, sampled every {LOOP_LAG_INTERVAL_S:g} s.",
            buckets=_LAG_BUCKETS_S,
            registry=registry,
        )

    async def sample_loop_lag(self) -> None:
        """Measure the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOP_LAG_INTERVAL_S
            await asyncio.sleep(LOOP_LAG_INTERVAL_S)
            self.loop_lag_s.observe(max(0.0, loop.time() - due))

    def response(self) -> web.Response:
        return web.Response(body=generate_latest(self.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})
