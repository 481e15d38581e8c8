"""The API key of a request, out of its header."""

from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from coordinator.errors import Reason, SlackwaterError
from coordinator.gateway.limits import MAX_API_KEY_CHARS
from inference.task import TenantId

# Takes a key's secret; raises SlackwaterError(UNAUTHENTICATED) for one that is not in force.
Authenticate = Callable[[str], Awaitable[TenantId]]

_SCHEME = "bearer "


def bearer_secret(request: web.Request) -> str:
    """Return the secret of `Authorization: Bearer SECRET`.

    Raises:
        SlackwaterError: UNAUTHENTICATED, when the header is missing, double or of another form.
    """
    headers = request.headers.getall(hdrs.AUTHORIZATION, [])
    if len(headers) != 1 or headers[0][: len(_SCHEME)].lower() != _SCHEME:
        raise SlackwaterError(Reason.UNAUTHENTICATED, "send your API key as one header 'Authorization: Bearer KEY'")
    secret = headers[0][len(_SCHEME) :].strip()
    if not secret or len(secret) > MAX_API_KEY_CHARS or not secret.isascii() or not secret.isprintable():
        raise SlackwaterError(
            Reason.UNAUTHENTICATED, "the API key has not the form of a key; check it for typing errors"
        )
    return secret
