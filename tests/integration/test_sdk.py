"""The asynchronous and the blocking client against a scripted coordinator over TLS."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from slackwater import AsyncClient, Client, errors
from slackwater._protos.slackwater.task.v1.task_service_pb2 import AttachTaskRequest
from slackwater.events import Accepted, AttemptBroken, AttemptStarted, Delta, Finished
from slackwater.testing import ScriptedAnswer, ScriptedCoordinator, error_detail

PIECES = ["Tides ", "turn", ": é", "🌊", " twice", "."]


@pytest.fixture
async def coordinator() -> AsyncIterator[ScriptedCoordinator]:
    async with ScriptedCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
async def client(coordinator: ScriptedCoordinator) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(
        coordinator.address, api_key="sk-slackwater-1\n", ca_file=coordinator.ca_certificate, reattach_window_s=2.0
    ) as client:
        yield client


async def at_each_delta(answer: AsyncIterator[object], act: Callable[[], Awaitable[object]]) -> None:
    """Read an answer to its end, and do something after each delta."""
    async for event in answer:
        if isinstance(event, Delta):
            await act()


async def test_an_answer_is_read_event_by_event(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, seam=2))
    async with client.chat("Hi", model="m") as answer:
        events = [event async for event in answer]
    kinds = [type(event) for event in events]
    before, after = [Accepted, AttemptStarted, Delta, Delta], [AttemptBroken, AttemptStarted, *[Delta] * 4, Finished]
    assert kinds == [*before, *after]
    assert answer.text_so_far == script.text
    assert answer.reattachments == 0
    assert coordinator.cancelled == []
    assert coordinator.calls[0][2] == "Bearer sk-slackwater-1"


async def test_awaiting_an_answer_gives_the_whole_and_its_statement_holds(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, seam=2, breaks_after=[4]))
    answer = client.complete("Once", model="m", stop="END")
    completion = await answer
    assert completion.text == script.text
    assert completion.usage.completion_tokens == len(completion.token_ids) == len(script.token_ids)
    assert [broken.reason for broken in completion.broken_attempts] == ["stream_lost"]
    key = script.coordinator_key.public_key().public_bytes_raw()
    assert answer.verify(coordinator_public_keys=[key]).first_index == 2


# Mutations tried: attaching from index 0, from `next_index + 1`, and without `reattached()` (tail doubled).
@pytest.mark.parametrize("status", ["UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED"])
async def test_a_stream_that_breaks_after_every_event_loses_and_doubles_nothing(
    coordinator: ScriptedCoordinator, client: AsyncClient, status: str
) -> None:
    script = ScriptedAnswer(
        pieces=PIECES, tail="EN", seam=3, breaks_after=[1, 2, 3, 4, 5, 6, 5, 5], fault=grpc.StatusCode[status]
    )
    coordinator.answer(script)
    answer = client.chat("Hi", model="m")
    assert await answer.text() == script.text
    assert answer.token_ids == tuple(script.token_ids)
    attached = [request.from_index for _, request, _ in coordinator.calls if isinstance(request, AttachTaskRequest)]
    assert attached == [0, 0, 1, 3, 4, 6, 6, 6]
    assert answer.reattachments == len(attached)


async def test_a_stream_that_ends_in_silence_is_taken_up_again(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, breaks_after=[4], fault=grpc.StatusCode.OK))
    assert await client.chat("Hi", model="m").text() == script.text


async def test_a_coordinator_that_was_away_for_a_moment_is_found_again(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, delay_s=0.02))
    answer = client.chat("Hi", model="m")
    async for event in answer:
        if isinstance(event, Delta) and event.first_index == 1:
            await coordinator.stop()
            await coordinator.start()
    assert answer.text_so_far == script.text
    assert answer.reattachments >= 1


async def test_a_coordinator_that_restarted_is_a_typed_error_and_the_text_so_far_stays(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, breaks_after=[4]))
    answer = client.chat("Hi", model="m")
    with pytest.raises(errors.CoordinatorRestarted, match="2 ids had arrived"):
        await at_each_delta(answer, lambda: asyncio.to_thread(coordinator.forget_tasks))
    assert answer.text_so_far == "Tides turn"


async def test_the_coordinators_own_word_of_its_restart_is_the_same_error(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, breaks_after=[4]))
    coordinator.fail_next("AttachTask", error_detail("COORDINATOR_RESTARTED", "RETRY"))
    with pytest.raises(errors.CoordinatorRestarted):
        await client.chat("Hi", model="m")


async def test_when_the_coordinator_stays_away_the_answer_fails_within_the_window(
    coordinator: ScriptedCoordinator,
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, delay_s=0.02))
    async with AsyncClient(coordinator.address, ca_file=coordinator.ca_certificate, reattach_window_s=0.3) as client:
        answer = client.chat("Hi", model="m")
        with pytest.raises(errors.CoordinatorUnavailable):
            await at_each_delta(answer, coordinator.stop)
    assert answer.text_so_far


async def test_a_submission_that_was_never_acknowledged_is_not_sent_twice(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.fail_next("SubmitTask", grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(errors.CoordinatorUnavailable):
        await client.chat("Hi", model="m")
    assert [method for method, _, _ in coordinator.calls] == ["SubmitTask"]


async def test_a_failed_task_raises_its_error_and_keeps_its_text(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    failure = error_detail("MIGRATION_IMPOSSIBLE", "RETRY", "penalties", retry_after_ms=2000)
    coordinator.answer(ScriptedAnswer(pieces=["a", "b"], failure=failure))
    answer = client.chat("Hi", model="m")
    with pytest.raises(errors.MigrationImpossible) as caught:
        await answer
    assert caught.value.retry_after_s == 2.0
    assert answer.text_so_far == "ab"
    assert [event async for event in answer] == []
    with pytest.raises(errors.VerificationError):
        answer.verify()


async def test_a_refused_submission_names_the_parameter(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    coordinator.fail_next("SubmitTask", error_detail("CONTEXT_EXCEEDED", "CALLER", "too long", param="messages"))
    with pytest.raises(errors.ContextExceeded) as caught:
        await client.chat("Hi", model="m")
    assert (caught.value.param, caught.value.reason) == ("messages", "CONTEXT_EXCEEDED")


async def test_garbage_on_the_stream_is_an_error_not_a_hang(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, breaks_after=[4], fault=b"\xff\xff\xff"))
    answer = client.chat("Hi", model="m")
    with pytest.raises(errors.MalformedAnswer):
        await answer
    assert answer.text_so_far == "Tides turn"
    coordinator.fail_next("ListModels", b"\xff\xff\xff")
    with pytest.raises(errors.MalformedAnswer):
        await client.models()


async def test_cancel_reaches_the_coordinator_and_a_later_read_says_so(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, delay_s=0.01))
    answer = client.chat("Hi", model="m")
    with pytest.raises(errors.TaskCancelled):
        await at_each_delta(answer, answer.cancel)
    assert coordinator.cancelled == [answer.task_id]
    await answer.cancel()
    assert len(coordinator.cancelled) == 1


async def test_cancel_wakes_a_reader_that_waits(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES, delay_s=0.05))
    answer = client.chat("Hi", model="m")
    await anext(answer)
    async with asyncio.TaskGroup() as group:
        reader = group.create_task(_error_of(answer.text()))
        await asyncio.sleep(0)
        await answer.cancel()
    assert isinstance(reader.result(), errors.TaskCancelled)


async def _error_of(awaitable: object) -> Exception | None:
    try:
        await awaitable  # type: ignore[misc]
    except errors.SlackwaterError as error:
        return error
    return None


async def test_a_reader_that_timed_out_can_read_on(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    """gRPC cancels the call together with its reader; the answer must survive that."""
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, delay_s=0.05))
    answer = client.chat("Hi", model="m")
    await anext(answer)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(answer)
    assert await answer.text() == script.text


async def test_leaving_the_block_early_cancels_and_closing_only_leaves(
    coordinator: ScriptedCoordinator, client: AsyncClient
) -> None:
    coordinator.answer(ScriptedAnswer(pieces=PIECES))
    async with client.chat("Hi", model="m") as answer:
        await anext(answer)
    assert coordinator.cancelled == ["task-1"]
    coordinator.answer(ScriptedAnswer(pieces=PIECES))
    answer = client.chat("Hi", model="m")
    await anext(answer)
    await answer.aclose()
    assert [event async for event in answer] == []
    assert coordinator.cancelled == ["task-1"]


async def test_a_second_client_attaches_from_an_index(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, seam=3))
    await client.chat("Hi", model="m")
    late = client.attach("task-1", from_index=3)
    assert await late.text() == "".join(PIECES[3:])
    assert late.verify().token_ids == tuple(script.token_ids[3:])
    with pytest.raises(errors.TaskNotFound):
        await client.attach("task-9")
    with pytest.raises(errors.InvalidArgument):
        client.attach("")


async def test_the_fleet_is_run_through_the_client(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    owner = await client.create_owner("lab", trusted=True)
    assert await client.owners() == [owner]
    with pytest.raises(errors.AlreadyExists):
        await client.create_owner("lab")
    assert (await client.create_join_string("lab")).join_string.startswith("sw1.")
    cpu, gpu = await client.nodes()
    assert (cpu.gpus, cpu.host.gpu_note) == ((), "no NVIDIA driver")
    assert gpu.gpus[0].power_draw_w.value == pytest.approx(212.4)
    assert (gpu.gpus[0].temperature_c.status, gpu.gpus[0].temperature_c.value) == ("denied", None)
    assert gpu.gpus[0].clock_memory_mhz.status == "unspecified"
    assert (await client.drain("node-1")).status == "draining"
    assert (await client.resume("node-1")).status == "online"
    assert (await client.ban("node-1", reason="lies")).status == "banned"
    made = await client.create_api_key("shop")
    assert [key.key_id for key in await client.api_keys()] == [made.key.key_id]
    assert (await client.revoke_api_key(made.key.key_id)).revoked_at_ms > 0
    assert (await client.models())[0].name == "scripted"
    assert (await client.register_model(b"", tokenizer_directory="/models/m")).startswith("sha256:")
    with pytest.raises(errors.InvalidArgument):
        await client.register_model(b"\xff\xff", tokenizer_directory="/models/m")


async def test_a_watch_yields_every_node_and_ends_loudly(coordinator: ScriptedCoordinator, client: AsyncClient) -> None:
    watch = client.watch_nodes()
    assert [(await anext(watch)).node_id for _ in range(2)] == ["node-1", "node-2"]
    with pytest.raises(errors.CoordinatorUnavailable):
        await anext(watch)


async def test_a_certificate_of_another_ca_is_the_callers_to_fix(coordinator: ScriptedCoordinator) -> None:
    other = ScriptedCoordinator()
    async with AsyncClient(coordinator.address, ca_file=other.ca_certificate) as client:
        with pytest.raises(errors.CertificateUntrusted) as caught:
            await client.models()
    assert caught.value.param == "ca_file"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"address": "https://x:1"}, "address"),
        ({"address": ""}, "address"),
        ({"address": "x:1", "api_key": "two words"}, "api_key"),
        ({"address": "x:1", "api_key": "\n"}, "api_key"),
        ({"address": "x:1", "ca_file": b"garbage"}, "ca_file"),
        ({"address": "x:1", "ca_file": "/nonexistent/ca.pem"}, "ca_file"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_at_once(arguments: dict[str, str], param: str) -> None:
    with pytest.raises(errors.CallerError) as caught:
        AsyncClient(**arguments)  # type: ignore[arg-type]
    assert caught.value.param == param
    assert "two words" not in str(caught.value)


async def test_the_blocking_client_does_the_same(coordinator: ScriptedCoordinator, tmp_path: Path) -> None:
    script = coordinator.answer(ScriptedAnswer(pieces=PIECES, seam=2, breaks_after=[4, 3]))
    coordinator.answer(ScriptedAnswer(pieces=PIECES))
    coordinator.answer(ScriptedAnswer(pieces=PIECES))
    ca_file = tmp_path / "ca.pem"
    ca_file.write_bytes(coordinator.ca_certificate)

    def use() -> None:
        with Client(coordinator.address, api_key="k", ca_file=ca_file) as client:
            answer = client.chat("Hi", model="m")
            assert "".join(answer.texts()) == script.text
            assert answer.reattachments == 2
            assert answer.verify().attempt == 2
            assert client.complete([1, 2], model="m").text() == "".join(PIECES)
            with client.chat("Hi", model="m") as answer:
                assert isinstance(next(answer), Accepted)
            assert answer.task_id in coordinator.cancelled
            [record] = client.get_task("task-1").attempts
            assert (record.signed, record.energy_j, record.energy_method) == (True, 12.3, "integrated_power")
            with pytest.raises(errors.NodeNotFound):
                client.drain("node-9")
            with pytest.raises(errors.CoordinatorUnavailable):
                list(client.watch_nodes())

    await asyncio.to_thread(use)


def test_importing_the_package_does_not_import_grpc() -> None:
    code = "import sys, slackwater, slackwater.cli; print('grpc' in sys.modules, 'cryptography' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False False"
