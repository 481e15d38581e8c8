"""Companions are heard if they are who they must be, and nothing that anybody sends disturbs the agent."""

import asyncio
import json
import os
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.owner.events import BusyObserved, InputObserved, Unknown
from agent.signals import companion_socket
from agent.signals.companion_report import (
    LINE_BYTES_MAX,
    REPORT_PERIOD_S,
    SILENT_S_MAX,
    InputReport,
    Report,
    ReportRefused,
    decode_report,
    encode_report,
    report_events,
)
from agent.signals.companion_socket import CompanionSource
from agent.signals.settings import default_companion_socket
from agent.signals.source import SourceAbsent, SourceBroken
from agent.signals.testing import NoPace, ScriptedPace, Seen

UID = os.geteuid()
WELL = b'{"version":1,"input":[{"source":"x11","idle_ms":1500}],"busy":[{"source":"gamemode","what":""}]}\n'


class Agent:
    """A listening agent with a clock; the peer's user is what the test says."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "signals.sock"
        self.runtimes = directory / "user"
        self.runtimes.mkdir()
        (self.runtimes / str(UID)).mkdir()
        self.now = 0.0
        self.seen = Seen()
        self.pace = GatedPace()
        self.source = CompanionSource(self.path, runtimes=self.runtimes, now=lambda: self.now)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["asyncio.Task[None]"]:
        task: asyncio.Task[None] = asyncio.create_task(self.source.watch(self.seen, self.pace))
        await self.seen.value("companion", Unknown.ABSENT)
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(self.path)

    async def say(self, *lines: bytes) -> asyncio.StreamWriter:
        _, writer = await self.connect()
        writer.writelines(lines)
        await writer.drain()
        return writer

    async def refused(self, data: bytes) -> None:
        """Send what must end the connection."""
        reader, writer = await self.connect()
        writer.write(data)
        async with asyncio.timeout(20):
            assert await reader.read() == b""  # nothing is ever sent back
        writer.close()

    async def pass_time(self, seconds: float) -> None:
        """Let time pass, and let the agent look once for silent companions."""
        self.now += seconds
        self.pace.resting.clear()
        self.pace.ticks.release()
        await self.pace.resting.wait()


class GatedPace(NoPace):
    """Rests as long as the test wants."""

    def __init__(self) -> None:
        super().__init__()
        self.resting = asyncio.Event()

    async def rest(self, duration_s: float) -> None:
        self.rests.append(duration_s)
        self.resting.set()
        await self.ticks.acquire()


@pytest.fixture
def agent(tmp_path: Path) -> Agent:
    return Agent(tmp_path)


def test_a_report_survives_the_wire() -> None:
    report = Report(version=1, input=(InputReport(source="x11", idle_ms=7),))
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff\xfe",
        b'{"version":2}',
        b'{"version":1,"pause":true}',
        b'{"version":1,"input":[{"source":"x11"}]}',
        b'{"version":1,"input":[{"source":"x11","idle_ms":1,"unknown":"broken"}]}',
        b'{"version":1,"input":[{"source":"x11","idle_ms":-1}]}',
        b'{"version":1,"input":[{"source":"x11","idle_ms":1e300}]}',
        b'{"version":1,"input":[{"source":"x11","idle_ms":999999999999999}]}',
        b'{"version":1,"input":[{"source":"x11","idle_ms":true}]}',
        b'{"version":1,"input":[{"source":"logind:0","idle_ms":1}]}',
        b'{"version":1,"input":[{"source":"x11\\n","idle_ms":1}]}',
        b'{"version":1,"input":[{"source":"' + b"x" * 17 + b'","idle_ms":1}]}',
        b'{"version":1,"busy":[{"source":"x11","what":"' + b"x" * 201 + b'"}]}',
        b'{"version":1,"busy":[{"source":"x11"}]}',
        b'{"version":1,"busy":[' + b",".join([b'{"source":"x11","what":""}'] * 9) + b"]}",
        b'{"version":1,"leaving":"yes"}',
        b'{"version":1}' + b" " * LINE_BYTES_MAX,
        b"[" * 8000,
    ],
)
def test_a_line_that_is_no_report_is_refused(line: bytes) -> None:
    """Mutation: without forbid_unknown_fields a companion could ask for what a later agent might understand."""
    with pytest.raises(ReportRefused):
        decode_report(line)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_refused(line: bytes) -> None:
    complaint = ""
    try:
        report_events(decode_report(line), 1)
    except ReportRefused as error:
        complaint = str(error)
    assert complaint == "" or complaint.isprintable()


def test_texts_of_others_are_made_printable() -> None:
    line = json.dumps({"version": 1, "busy": [{"source": "desktop", "what": "a\x1b[2J\nb"}]}).encode()
    assert report_events(decode_report(line), 7) == [BusyObserved("desktop:7", "a [2J b")]


@pytest.mark.parametrize(
    ("environment", "socket"),
    [
        ({}, "/run/slackwater-agent/signals.sock"),
        ({"RUNTIME_DIRECTORY": "/run/user/1000/slackwater-agent"}, "/run/user/1000/slackwater-agent/signals.sock"),
    ],
)
def test_the_socket_lies_in_the_runtime_directory_that_systemd_made(
    environment: dict[str, str], socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert default_companion_socket() == Path(socket)


async def test_a_report_becomes_events_named_for_the_user(agent: Agent) -> None:
    async with agent.listening():
        writer = await agent.say(WELL)
        await agent.seen.value(f"x11:{UID}", 1.5)
        assert agent.seen.last(f"gamemode:{UID}") == BusyObserved(f"gamemode:{UID}", "")
        writer.close()
    assert not agent.path.exists()


async def test_a_report_may_come_byte_by_byte(agent: Agent) -> None:
    async with agent.listening():
        _, writer = await agent.connect()
        for byte in WELL:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        await agent.seen.value(f"x11:{UID}", 1.5)
        writer.close()


async def test_everybody_may_connect_but_nobody_else_may_change_the_socket(agent: Agent) -> None:
    async with agent.listening():
        assert stat.S_IMODE(agent.path.stat().st_mode) == 0o666


async def test_a_socket_that_a_killed_agent_left_is_taken_over(agent: Agent) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(agent.path))
    async with agent.listening():
        (await agent.say(WELL)).close()
        await agent.seen.value(f"x11:{UID}", 1.5)


async def test_a_file_in_the_place_of_the_socket_is_not_removed(agent: Agent) -> None:
    agent.path.write_text("somebody's")
    with pytest.raises(SourceBroken, match="cannot listen"):
        await agent.source.watch(Seen(), ScriptedPace())
    assert agent.path.read_text() == "somebody's"


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 3 * LINE_BYTES_MAX,
        b'{"version":1,"pause":true}\n',
        b"\x00" * 100 + b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        WELL + b"garbage\n",
    ],
)
async def test_garbage_ends_its_connection_and_is_logged_once_and_the_next_companion_is_heard(
    agent: Agent, data: bytes
) -> None:
    """Mutation: an exception that leaves `_serve` is printed for each attempt by anybody."""
    async with agent.listening() as task:
        with capture_logs() as logs:
            for _ in range(3):
                await agent.refused(data)
        assert len(logs) == 1
        (await agent.say(WELL)).close()
        await agent.seen.value(f"x11:{UID}", 1.5)
        assert not task.done()


async def test_half_a_report_says_nothing(agent: Agent) -> None:
    async with agent.listening():
        (await agent.say(WELL[:-1])).close()
        (await agent.say(WELL.replace(b"1500", b"2500"))).close()
        await agent.seen.value(f"x11:{UID}", 2.5)
        assert InputObserved(f"x11:{UID}", 1.5) not in agent.seen.events


@pytest.mark.parametrize(
    ("uid", "logged_in", "listed", "heard"),
    [(0, False, False, True), (12345, False, False, False), (12345, True, False, False), (12345, False, True, True)],
)
async def test_heard_are_root_the_own_user_the_listed_and_the_logged_in(
    agent: Agent, monkeypatch: pytest.MonkeyPatch, uid: int, logged_in: bool, listed: bool, heard: bool
) -> None:
    """Mutation: without the owner check of the runtime directory whoever may make a directory there is logged in.

    The third case: a directory of that name, made by somebody else.
    """
    monkeypatch.setattr(companion_socket, "peer_uid", lambda connection: uid)
    if logged_in:
        (agent.runtimes / str(uid)).mkdir()
    agent.source = CompanionSource(
        agent.path, uids=[uid] if listed else [], runtimes=agent.runtimes, now=lambda: agent.now
    )
    async with agent.listening():
        if heard:
            (await agent.say(WELL)).close()
            await agent.seen.value(f"x11:{uid}", 1.5)
        else:
            await agent.refused(b"")
            assert agent.seen.last(f"x11:{uid}") is None


def test_a_logged_in_user_is_known_by_their_own_runtime_directory(agent: Agent) -> None:
    source = CompanionSource(agent.path, runtimes=agent.runtimes)
    source._uids = frozenset()
    assert source._heard(UID) is True
    assert source._heard(UID + 1) is False


async def test_a_companion_that_falls_silent_is_broken_after_a_minute_and_recovers(agent: Agent) -> None:
    """Mutation: without this the last word of a companion that hangs, "idle", grows older for ever."""
    async with agent.listening():
        writer = await agent.say(WELL)
        await agent.seen.value(f"x11:{UID}", 1.5)
        await agent.pass_time(SILENT_S_MAX - 1)
        assert agent.seen.last(f"x11:{UID}") == InputObserved(f"x11:{UID}", 1.5)
        with capture_logs() as logs:
            await agent.pass_time(1)
            await agent.seen.value(f"x11:{UID}", Unknown.BROKEN)
            await agent.pass_time(60)
            assert len(logs) == 1
        assert agent.seen.last(f"gamemode:{UID}") == BusyObserved(f"gamemode:{UID}", Unknown.BROKEN)
        writer.write(WELL)
        await agent.seen.value(f"x11:{UID}", 1.5)
        writer.close()
    assert agent.pace.rests[0] == REPORT_PERIOD_S


async def test_a_companion_that_ends_with_its_session_is_absent_at_once(agent: Agent) -> None:
    async with agent.listening():
        writer = await agent.say(WELL, b'{"version":1,"leaving":true}\n')
        await agent.seen.value(f"x11:{UID}", Unknown.ABSENT)
        writer.close()


async def test_a_companion_killed_at_logout_is_absent_and_not_broken_for_ever(agent: Agent) -> None:
    """Mutation: without looking at the runtime directory the machine lends nothing until its next login."""
    async with agent.listening():
        (await agent.say(WELL)).close()
        await agent.seen.value(f"x11:{UID}", 1.5)
        await agent.pass_time(SILENT_S_MAX)
        await agent.seen.value(f"x11:{UID}", Unknown.BROKEN)
        (agent.runtimes / str(UID)).rmdir()
        await agent.pass_time(5)
        await agent.seen.value(f"x11:{UID}", Unknown.ABSENT)


async def test_a_source_that_a_report_leaves_out_is_gone(agent: Agent) -> None:
    async with agent.listening():
        writer = await agent.say(WELL, b'{"version":1}\n')
        await agent.seen.value(f"x11:{UID}", Unknown.ABSENT)
        assert agent.seen.last(f"gamemode:{UID}") == BusyObserved(f"gamemode:{UID}", Unknown.ABSENT)
        writer.close()


async def test_the_newest_connection_of_a_user_counts(agent: Agent) -> None:
    async with agent.listening():
        reader, writer = await agent.connect()
        writer.write(WELL)
        await agent.seen.value(f"x11:{UID}", 1.5)
        newer = await agent.say(WELL.replace(b"1500", b"2500"))
        await agent.seen.value(f"x11:{UID}", 2.5)
        assert await reader.read() == b""
        newer.close()
        writer.close()


async def test_more_reports_than_anybody_needs_end_the_connection(agent: Agent) -> None:
    async with agent.listening():
        await agent.refused(WELL * 1000)
        assert len([event for event in agent.seen.events if isinstance(event, BusyObserved)]) <= 41
        agent.now += 10
        (await agent.say(WELL.replace(b"1500", b"2500"))).close()
        await agent.seen.value(f"x11:{UID}", 2.5)


async def test_one_user_cannot_take_all_places(agent: Agent) -> None:
    async with agent.listening():
        held = [await agent.connect() for _ in range(companion_socket.CONNECTIONS_PER_USER_MAX)]
        await agent.refused(b"")
        for _, writer in held:
            writer.close()


async def test_without_the_runtime_directory_there_is_no_companion(tmp_path: Path) -> None:
    source = CompanionSource(tmp_path / "missing" / "signals.sock")
    with pytest.raises(SourceAbsent):
        await source.watch(Seen(), ScriptedPace())
