"""How a task goes on after any ids, for any task."""

from hypothesis import given
from hypothesis import strategies as st

from inference.failover import Begin, Complete, MigrationImpossible, plan, resumable
from inference.task import (
    FinishReason,
    ManifestDigest,
    PrivacyClass,
    Sampling,
    ServiceClass,
    TaskId,
    TaskKind,
    TaskSpec,
    TenantId,
    token_array,
)

STOP_IDS = (2, 3)
ids = st.integers(4, 60)
prompts = st.lists(ids, min_size=1, max_size=8)
samplings = st.sampled_from(
    [
        Sampling(temperature=0.0),
        Sampling(seed=7),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=-0.5),
        Sampling(repetition_penalty=1.1),
    ]
)


@st.composite
def specs(draw: st.DrawFn) -> TaskSpec:
    # Mostly what can be interrupted in the middle.
    kind = draw(st.sampled_from([*TaskKind, *[TaskKind.GENERATE] * 5]))
    return TaskSpec(
        task_id=TaskId("task"),
        tenant_id=TenantId("tenant"),
        kind=kind,
        model="model",
        manifest_digest=ManifestDigest("sha256:0"),
        prompt_ids=token_array(draw(prompts)),
        sampling=draw(samplings),
        max_tokens=draw(st.integers(1, 10)) if kind is TaskKind.GENERATE else 0,
        stop_token_ids=STOP_IDS,
        vocabulary_size=64,
        service_class=draw(st.sampled_from(ServiceClass)),
        privacy_class=PrivacyClass.PUBLIC,
        streaming=draw(st.booleans()),
    )


@st.composite
def interrupted(draw: st.DrawFn) -> tuple[TaskSpec, list[int]]:
    """A task, and ids that it may have received: within its limit, a stop id only at the end."""
    spec = draw(specs())
    count = draw(st.integers(0, spec.max_tokens))
    received = draw(st.lists(ids, min_size=count, max_size=count))
    last = draw(st.sampled_from([None, None, None, *STOP_IDS]))
    if received and last is not None:
        received[-1] = last
    return spec, received


@given(interrupted())
def test_what_was_received_is_kept_and_only_the_rest_is_asked_for(case: tuple[TaskSpec, list[int]]) -> None:
    """Mutations seen to fail here: max_tokens not lowered; first_index 0 after ids were kept."""
    spec, received = case
    step = plan(spec, received)
    if isinstance(step, Begin):
        kept = received[: step.first_index]
        assert list(step.prompt_ids) == [*spec.prompt_ids, *kept]
        assert step.max_tokens + len(kept) == spec.max_tokens
        assert step.first_index == len(kept)
        if spec.kind is TaskKind.GENERATE:
            assert step.max_tokens > 0
            assert not received or received[-1] not in STOP_IDS
        # All or nothing: to keep a part would change what somebody has read.
        assert kept in ([], received)


@given(interrupted())
def test_what_somebody_has_read_is_continued_or_refused_but_never_begun_again(
    case: tuple[TaskSpec, list[int]],
) -> None:
    """Mutation seen to fail here: restart penalised answers whether they stream or not."""
    spec, received = case
    step = plan(spec, received)
    if not received:
        assert step == Begin(spec.prompt_ids, spec.max_tokens, 0)
    elif spec.streaming:
        assert not isinstance(step, Begin) or step.first_index == len(received)


@given(interrupted())
def test_a_draw_that_depends_on_what_is_output_is_not_resumed(case: tuple[TaskSpec, list[int]]) -> None:
    """Mutation seen to fail here: `penalised` looks at presence_penalty alone."""
    spec, received = case
    sampling = spec.sampling
    neutral = (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.0, 0.0, 1.0)
    assert resumable(spec) == neutral
    step = plan(spec, received)
    if isinstance(step, Begin) and step.first_index > 0:
        assert neutral
    if isinstance(step, MigrationImpossible):
        assert not neutral
        assert spec.streaming
        assert step.reason


@given(interrupted())
def test_an_answer_whose_last_id_has_come_is_complete_with_the_reason_that_its_node_would_give(
    case: tuple[TaskSpec, list[int]],
) -> None:
    """Mutation seen to fail here: the limit looked at before the stop id."""
    spec, received = case
    step = plan(spec, received)
    if spec.kind is TaskKind.GENERATE and received and received[-1] in STOP_IDS:
        assert step == Complete(FinishReason.STOP)
    elif spec.kind is TaskKind.GENERATE and len(received) == spec.max_tokens:
        assert step == Complete(FinishReason.LENGTH)
    else:
        assert not isinstance(step, Complete)


@given(interrupted())
def test_planning_leaves_task_and_ids_as_they_were_and_says_the_same_again(case: tuple[TaskSpec, list[int]]) -> None:
    """Mutation seen to fail here: extend the prompt in place."""
    spec, received = case
    prompt, ids_before = list(spec.prompt_ids), list(received)
    first = plan(spec, received)
    assert plan(spec, received) == first
    assert (list(spec.prompt_ids), received) == (prompt, ids_before)


@given(interrupted(), st.data())
def test_two_interruptions_end_where_one_does(case: tuple[TaskSpec, list[int]], data: st.DataObject) -> None:
    """Resuming a resumption is resuming the task: nothing is counted twice."""
    spec, received = case
    first = received[: data.draw(st.integers(0, len(received)))]
    half, whole = plan(spec, first), plan(spec, received)
    if isinstance(half, Begin) and isinstance(whole, Begin) and whole.first_index == len(received):
        rest = received[half.first_index :]
        assert whole.prompt_ids == half.prompt_ids + token_array(rest)
        assert whole.max_tokens == half.max_tokens - len(rest)
