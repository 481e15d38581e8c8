"""The HTTP edge as an aiohttp application: OpenAI's API over the `Tasks` port.

Depends on that port, the error table and `inference` alone, so that a gateway
worker can be a process of its own.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from coordinator.errors import Reason, SlackwaterError, store_unavailable
from coordinator.gateway.api_keys import Authenticate, bearer_secret
from coordinator.gateway.calls import Calls
from coordinator.gateway.chat import CHAT
from coordinator.gateway.completions import COMPLETIONS
from coordinator.gateway.envelope import error_response, http_error_response
from coordinator.gateway.limits import DEFAULT_LIMITS, GatewayLimits
from coordinator.gateway.metrics import GatewayMetrics
from coordinator.gateway.models import get_model, list_models
from coordinator.gateway.request_ids import identifying_headers
from coordinator.gateway.server_sent_events import ClientTooSlowError
from coordinator.store.port import StoreError
from coordinator.tasks_port import Tasks

_log = structlog.get_logger()

# A refused body is read and dropped for this long, so that the client gets to see the refusal.
_LINGERING_S = 5.0
# Longer than the 60 s for which proxies keep idle connections, so that they close first.
_KEEPALIVE_S = 75.0
# Codes for refusals of HTTP itself; the path or the method is at fault, not a parameter.
_HTTP_CODES = {
    404: "unknown_url",
    405: "method_not_allowed",
    408: "request_timeout",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


def make_app(
    tasks: Tasks,
    authenticate: Authenticate,
    metrics: GatewayMetrics,
    now_s: Callable[[], float],
    limits: GatewayLimits = DEFAULT_LIMITS,
) -> web.Application:
    """Build the application. Serve it with `make_runner`: without it a client that leaves goes unnoticed.

    Args:
        tasks: where requests go.
        authenticate: from an API key's secret to its tenant; raises SlackwaterError(UNAUTHENTICATED).
        metrics: counters, in a registry that the process may share with others; GET /metrics shows it all.
        now_s: the wall clock, in Unix seconds; answers say when they were made.
        limits: the bounds of this process.
    """
    app = web.Application(middlewares=[_answering(metrics, limits)])
    calls = Calls(tasks, authenticate, metrics, now_s, limits)

    _add_openai_routes(app, tasks, authenticate, calls)
    _add_operators_routes(app, tasks, metrics)

    async def stop_calls(_: web.Application) -> None:
        calls.stop()

    app.on_shutdown.append(stop_calls)
    app.cleanup_ctx.append(_loop_lag_sampler(metrics))
    return app


def _add_openai_routes(app: web.Application, tasks: Tasks, authenticate: Authenticate, calls: Calls) -> None:
    async def chat(request: web.Request) -> web.StreamResponse:
        return await calls.serve(request, CHAT)

    async def completions(request: web.Request) -> web.StreamResponse:
        return await calls.serve(request, COMPLETIONS)

    async def quote(request: web.Request) -> web.Response:
        return await calls.quote(request)

    async def models(request: web.Request) -> web.Response:
        await authenticate(bearer_secret(request))
        return web.json_response(list_models(tasks))

    async def model(request: web.Request) -> web.Response:
        await authenticate(bearer_secret(request))
        return web.json_response(get_model(tasks, request.match_info["id"]))

    app.router.add_post("/v1/chat/completions", chat, name="chat")
    app.router.add_post("/v1/completions", completions, name="completions")
    app.router.add_post("/v1/quote", quote, name="quote")
    app.router.add_get("/v1/models", models, name="models")
    # Names of models may contain slashes.
    app.router.add_get("/v1/models/{id:.+}", model, name="model")


def _add_operators_routes(app: web.Application, tasks: Tasks, metrics: GatewayMetrics) -> None:
    """Add what probes and Prometheus read; these need no key, and say nothing of any tenant."""

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "alive"})

    async def readyz(_: web.Request) -> web.Response:
        if tasks.ready():
            return web.json_response({"status": "ready"})
        raise SlackwaterError(Reason.NO_CAPACITY, "no engine can take a task now")

    async def show_metrics(_: web.Request) -> web.Response:
        return metrics.response()

    app.router.add_get("/healthz", healthz, name="healthz")
    app.router.add_get("/readyz", readyz, name="readyz")
    app.router.add_get("/metrics", show_metrics, name="metrics")


class _NoBrokenRequests(logging.Filter):
    """Drops aiohttp's records of unreadable HTTP: they quote its bytes, which may be part of a prompt."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


_http_logger = logging.getLogger("slackwater.gateway.http")
_http_logger.addFilter(_NoBrokenRequests())


def make_runner(app: web.Application) -> web.AppRunner:
    """Return the runner that serves the application; the caller adds its site (address, port, TLS)."""
    return web.AppRunner(
        app,
        # A lost connection cancels its handler: the one way in which disconnects reach the engine.
        handler_cancellation=True,
        # Costs more than a short request; the metrics count what it would list.
        access_log=None,
        logger=_http_logger,
        keepalive_timeout=_KEEPALIVE_S,
        lingering_time=_LINGERING_S,
        # No client compresses its prompts, and none can send a bomb.
        auto_decompress=False,
    )


def _loop_lag_sampler(metrics: GatewayMetrics) -> Callable[[web.Application], AsyncIterator[None]]:
    async def sampling(_: web.Application) -> AsyncIterator[None]:
        sampler = asyncio.create_task(metrics.sample_loop_lag(), name="loop-lag-sampler")
        yield
        sampler.cancel()

    return sampling


def _answering(metrics: GatewayMetrics, limits: GatewayLimits) -> Middleware:
    """Return the middleware through which every response goes: ids, envelope, counts, and a deadline."""

    @web.middleware
    async def answer(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            response = await _respond(request, handler, metrics)
            if not response.prepared:
                response.headers.update(identifying_headers(request))
                if request.content.exception() is not None:
                    # What follows a body of broken framing is no request.
                    response.force_close()
                await _send_whole(request, response, limits)
        except asyncio.CancelledError:
            metrics.disconnects.labels("left").inc()
            raise
        except ClientTooSlowError:
            metrics.disconnects.labels("too_slow").inc()
            raise
        except ConnectionError:
            metrics.disconnects.labels("left").inc()
            raise
        endpoint = request.match_info.route.name or "unknown"
        metrics.requests.labels(endpoint, str(response.status)).inc()
        return response

    return answer


async def _respond(request: web.Request, handler: Handler, metrics: GatewayMetrics) -> web.StreamResponse:
    """Run the handler; whatever it raises, short of the client's leaving, becomes the envelope."""
    try:
        return await handler(request)
    except SlackwaterError as error:
        failure = error
    except web.HTTPException as error:
        code = _HTTP_CODES.get(error.status, "http_error")
        metrics.errors.labels(code).inc()
        message = f"{request.method} {request.path[:128]!a}: {error.reason}"
        return http_error_response(error.status, message, code, error.headers.get("Allow"))
    except ConnectionError:
        raise
    except StoreError as error:
        _log.error("store_unavailable", path=request.path, reason=str(error), **identifying_headers(request))
        failure = store_unavailable()
    except Exception as error:
        ids = identifying_headers(request)
        _log.error("request_failed", path=request.path, **ids, exc_info=error)
        failure = SlackwaterError(Reason.INTERNAL, "the coordinator failed; its log says more under the x-request-id")
    metrics.errors.labels(failure.presentation.code).inc()
    return error_response(failure)


async def _send_whole(request: web.Request, response: web.StreamResponse, limits: GatewayLimits) -> None:
    """Send a response that does not stream, to a client that has a bounded time to fetch it."""
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            await response.prepare(request)
            await response.write_eof()
    except TimeoutError:
        _log.warning("client_too_slow", path=request.path, unread_for_s=limits.body_timeout_s)
        if request.transport is not None:
            request.transport.abort()
        raise ClientTooSlowError(f"the client left its answer unread for {limits.body_timeout_s:g} s") from None
