"""The one writer of errors: OpenAI's envelope, and the headers that its clients obey."""

import json
import math

from aiohttp import web

from coordinator.errors import Actor, SlackwaterError

# Said to whoever may retry when the failure itself gives no time: long enough for a failover.
DEFAULT_RETRY_AFTER_S = 1.0


def error_object(message: str, type_: str, code: str, param: str | None = None) -> dict[str, dict[str, str | None]]:
    """Return the envelope; all four keys are always there, since clients index them."""
    return {"error": {"message": message, "type": type_, "param": param, "code": code}}


def error_event(error: SlackwaterError) -> bytes:
    """Return the server-sent event that ends a stream which cannot go on."""
    return f"data: {json.dumps(_envelope_of(error))}\n\n".encode("ascii")


def error_response(error: SlackwaterError) -> web.Response:
    return web.json_response(_envelope_of(error), status=error.presentation.http_status, headers=_retry_headers(error))


def http_error_response(status: int, message: str, code: str, allow: str | None = None) -> web.Response:
    """Return an error of HTTP itself (an unknown path, a wrong method), which no reason of ours stands for."""
    headers = {"x-should-retry": "false"}
    if allow is not None:
        headers["Allow"] = allow
    return web.json_response(error_object(message, "invalid_request_error", code), status=status, headers=headers)


def _envelope_of(error: SlackwaterError) -> dict[str, dict[str, str | None]]:
    shown = error.presentation
    return error_object(error.message, shown.type, shown.code, error.param)


def _retry_headers(error: SlackwaterError) -> dict[str, str]:
    if error.presentation.actor is not Actor.RETRY:
        # Without this the official client sends the same failing request three times.
        return {"x-should-retry": "false"}
    wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
    # However long: a client that will not wait for so long does better to give up than to come back too early.
    wait_s = max(wait_s, 0.0)
    return {
        "x-should-retry": "true",
        "retry-after": str(math.ceil(wait_s)),
        "retry-after-ms": str(math.ceil(wait_s * 1000)),
    }
