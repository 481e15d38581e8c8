"""An OpenAI endpoint that streams words at a set pace: what the relay benchmark puts behind other routers.

It does as little as it can: the pieces are made once, and each token is one
write at its due time, so that what is measured in front of it is the router.

    bench_upstream.py --port 9000 --interval-ms 5 --ttft-ms 20
"""

import argparse
import asyncio
from typing import Any

from aiohttp import web

MODEL = "mock"
_HEAD = '{"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1,"model":"mock","choices":[{"index":0,'
_ROLE = f'data: {_HEAD}"delta":{{"role":"assistant","content":""}},"finish_reason":null}}]}}\n\n'.encode()
_TOKEN = f'data: {_HEAD}"delta":{{"content":"word "}},"finish_reason":null}}]}}\n\n'.encode()
_STOP = f'data: {_HEAD}"delta":{{}},"finish_reason":"stop"}}]}}\n\n'.encode()


def usage_event(prompt_tokens: int, completion_tokens: int) -> bytes:
    usage = (
        f'{{"prompt_tokens":{prompt_tokens},"completion_tokens":{completion_tokens},'
        f'"total_tokens":{prompt_tokens + completion_tokens}}}'
    )
    head = '{"id":"chatcmpl-mock","object":"chat.completion.chunk","created":1,"model":"mock","choices":[],'
    return f'data: {head}"usage":{usage}}}\n\ndata: [DONE]\n\n'.encode()


class Upstream:
    def __init__(self, interval_s: float, ttft_s: float) -> None:
        self._interval_s = interval_s
        self._ttft_s = ttft_s

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        count = int(body.get("max_tokens") or 16)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(_ROLE)
        loop = asyncio.get_running_loop()
        due_s = loop.time() + self._ttft_s
        for _ in range(count):
            # Due times are absolute: a late token does not make all later ones late.
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            await response.write(_TOKEN)
            due_s += self._interval_s
        await response.write(_STOP + usage_event(16, count))
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "bench"}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interval-ms", type=float, default=5.0)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    options = parser.parse_args()
    upstream = Upstream(options.interval_ms / 1000, options.ttft_ms / 1000)
    app = web.Application()
    app.router.add_post("/v1/chat/completions", upstream.chat)
    app.router.add_get("/v1/models", upstream.models)
    app.router.add_get("/health", upstream.health)
    web.run_app(app, host="127.0.0.1", port=options.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
