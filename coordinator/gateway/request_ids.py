"""What a request is called in headers and logs."""

import re
import secrets

from aiohttp import web

REQUEST_ID_HEADER = "x-request-id"
TASK_ID_HEADER = "x-slackwater-task-id"

# Set once a request has become a task.
TASK_ID: web.RequestKey[str] = web.RequestKey("task_id", str)

# A caller's id goes into headers and logs, so it is taken only in a harmless form.
_SANE_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z")


def identifying_headers(request: web.Request) -> dict[str, str]:
    """Return the ids for a response: the caller's own id if it is sane, else the task's, else a fresh one."""
    headers: dict[str, str] = {}
    task_id = request.get(TASK_ID)
    if task_id is not None:
        headers[TASK_ID_HEADER] = task_id
    callers = request.headers.get(REQUEST_ID_HEADER, "")
    if _SANE_REQUEST_ID.match(callers):
        headers[REQUEST_ID_HEADER] = callers
    else:
        headers[REQUEST_ID_HEADER] = task_id or "req-" + secrets.token_hex(8)
    return headers
