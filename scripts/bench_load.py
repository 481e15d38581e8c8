"""The load generator of the benchmarks: many streaming clients in one cheap process.

A client library costs 100 to 200 µs a token, which on a small machine would be
the largest part of what is measured. So this speaks just enough HTTP/1.1 to
send a POST and to read server-sent events: it counts events with one regular
expression and reads the clock once for each piece that arrives.

As a program it reads a `Job` as JSON from standard input and writes a list of
`Stream` to standard output, so that it runs in a process of its own.
"""

import asyncio
import json
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# A stream that brings nothing for so long is hung; the slowest comparison takes 2.5 s to its first token.
SILENCE_S_MAX = 30.0

USAGE = re.compile(rb'"completion_tokens":\s*(\d+)')
STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})")
# What a token looks like in OpenAI's chat stream: a content that is not empty.
CHAT_TOKEN = r'"content":\s*"[^"]'
# And in OpenAI's completions stream.
COMPLETION_TOKEN = r'"text":\s*"[^"]'
# And in the stream of an engine.
ENGINE_TOKEN = r'"token_ids":\s*\[\s*\d'


@dataclass(frozen=True, kw_only=True)
class Job:
    """`clients` clients at once, each sending its request `rounds` times, one after the other.

    Attributes:
        host, port: where; or `socket_path` for a Unix socket.
        bodies: one JSON body per client, taken in turn.
        token_pattern: what marks an event that brings a token.
    """

    path: str
    bodies: list[dict[str, Any]]
    clients: int
    rounds: int
    token_pattern: str
    host: str = "127.0.0.1"
    port: int = 0
    socket_path: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    # Clients begin so long one after the other.
    stagger_s: float


@dataclass(kw_only=True)
class Stream:
    """What one request brought. Times in milliseconds."""

    status: int = 0
    ttft_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    events: int = 0
    usage_tokens: int = 0
    complete: bool = False
    error: str = ""


class _Reader(asyncio.Protocol):
    """Counts the events of one answer."""

    def __init__(self, token: re.Pattern[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self.stream = Stream()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.last_s = 0.0
        self._token = token
        self._loop = loop
        self._started_s = 0.0
        self._rest = b""
        self._transport: asyncio.BaseTransport | None = None

    def send(self, transport: asyncio.WriteTransport, request: bytes) -> None:
        self._transport = transport
        self._started_s = self.last_s = self._loop.time()
        transport.write(request)

    def data_received(self, data: bytes) -> None:
        now_s = self._loop.time()
        stream = self.stream
        if not stream.status and (match := STATUS.match(data)):
            stream.status = int(match[1])
        whole, separator, self._rest = (self._rest + data).rpartition(b"\n\n")
        if not separator:
            if stream.status >= 400:
                stream.error = data[-400:].decode(errors="replace")
            return
        tokens = len(self._token.findall(whole))
        if tokens:
            if stream.events:
                stream.gaps_ms.append((now_s - self.last_s) * 1000)
            else:
                stream.ttft_ms = (now_s - self._started_s) * 1000
            stream.events += tokens
            self.last_s = now_s
        if usage := USAGE.findall(whole):
            stream.usage_tokens = int(usage[-1])
        if b"data: [DONE]" in whole:
            stream.complete = True
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


async def _run_request(job: Job, body: bytes, token: re.Pattern[bytes]) -> Stream:
    loop = asyncio.get_running_loop()

    def make() -> _Reader:
        return _Reader(token, loop)

    if job.socket_path:
        transport, reader = await loop.create_unix_connection(make, job.socket_path)
    else:
        transport, reader = await loop.create_connection(make, job.host, job.port)
    headers = {
        "Host": job.host,
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        "Accept": "text/event-stream",
        **job.headers,
    }
    head = f"POST {job.path} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    reader.send(transport, head.encode() + b"\r\n" + body)
    while not reader.closed.done():
        await asyncio.wait([reader.closed], timeout=1.0)
        if not reader.closed.done() and loop.time() - reader.last_s > SILENCE_S_MAX:
            reader.stream.error = f"nothing for {SILENCE_S_MAX:.0f} s"
            transport.abort()
            break
    return reader.stream


async def run(job: Job) -> list[Stream]:
    """Carry out a job; one stream per request, in no special order."""
    token = re.compile(job.token_pattern.encode())
    bodies = [json.dumps(body).encode() for body in job.bodies]
    streams: list[Stream] = []

    async def client(number: int) -> None:
        await asyncio.sleep(number * job.stagger_s)
        for _ in range(job.rounds):
            streams.append(await _run_request(job, bodies[number % len(bodies)], token))

    async with asyncio.TaskGroup() as group:
        for number in range(job.clients):
            group.create_task(client(number))
    return streams


async def run_in_process(job: Job) -> list[Stream]:
    """Carry out a job in a process of its own, whose work disturbs no measurement of this one."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(Path(__file__)), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate(json.dumps(asdict(job)).encode())
    if process.returncode != 0:
        raise RuntimeError(f"the load generator ended with status {process.returncode}; its messages are above")
    return [Stream(**stream) for stream in json.loads(output)]


def main() -> None:
    job = Job(**json.load(sys.stdin))
    json.dump([asdict(stream) for stream in asyncio.run(run(job))], sys.stdout)


if __name__ == "__main__":
    main()
