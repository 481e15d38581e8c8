import json
from pathlib import Path
from typing import Any

import pytest

from inference.chat_template import RENDERED_CHARACTERS_MAX, ChatTemplate, TemplateError

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "text.json").read_text())
MESSAGES = [{"role": "user", "content": "a secret"}, {"role": "assistant", "content": "kept"}]


@pytest.mark.parametrize("case", GOLDEN["templates"], ids=lambda case: case["title"])
def test_a_template_renders_as_transformers_renders_it(case: dict[str, Any]) -> None:
    """Mutation seen to fail: lstrip_blocks off; Jinja's own tojson; a join that drops its last part."""
    template = ChatTemplate(case["source"], GOLDEN["template_special_tokens"])
    assert template.render(GOLDEN["template_messages"]) == case["text"]


def test_a_template_s_own_refusal_is_passed_on() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match=r"^roles must alternate$"):
        template.render(MESSAGES)


def test_there_is_no_clock_for_templates() -> None:
    guarded = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}2024{% endif %}"
    assert ChatTemplate(guarded, {}).render(MESSAGES) == "2024"
    with pytest.raises(TemplateError, match="strftime_now"):
        ChatTemplate("{{ strftime_now('%Y') }}", {}).render(MESSAGES)


# Just past the limits, so that a bound that is missing shows as a failure and not as a full memory.
@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages[0].update(role='system') }}", "update"),
        ("{{ raise_exception.__globals__['json'] }}", "__globals__"),
        ("{% include 'other' %}", "render"),
        ("{{ 2 ** 9 }}", "power"),
        ("{{ ('a' * 10000000) | length }}", "characters"),
        ("{{ (10000000 * 'a') | length }}", "characters"),
        ("{% set n = namespace(t='ab') %}{% for i in range(24) %}{% set n.t = n.t ~ n.t %}{% endfor %}", "characters"),
        ("{% set n = namespace(t='ab') %}{% for i in range(24) %}{% set n.t = n.t + n.t %}{% endfor %}", "characters"),
        ("{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}", "characters"),
        ("{% set r = range(1000) | list %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}", "steps"),
        ("{% for i in range(100001) %}{% endfor %}", "OverflowError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}", "RecursionError"),
    ],
)
def test_a_template_that_does_more_than_render_is_stopped(source: str, complaint: str) -> None:
    """Mutation seen to fail: each bound taken away in turn (step, join, call_binop, the sum of blocks)."""
    with pytest.raises(TemplateError, match=complaint):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_long_prompt_within_the_limit_is_rendered() -> None:
    content = "x" * (RENDERED_CHARACTERS_MAX // 2)
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", {})
    assert len(template.render([{"role": "user", "content": content}] * 2)) == RENDERED_CHARACTERS_MAX
    with pytest.raises(TemplateError, match="characters"):
        template.render([{"role": "user", "content": content}] * 3)


@pytest.mark.parametrize("source", ["{{ messages[0].content + 1 }}", "{{ messages[0].content | int(base=99) }}"])
def test_an_error_in_a_template_does_not_quote_the_messages(source: str) -> None:
    try:
        text = ChatTemplate(source, {}).render(MESSAGES)
    except TemplateError as error:
        text = str(error)
    assert "secret" not in text


def test_a_template_that_is_no_template_is_refused_at_load() -> None:
    with pytest.raises(TemplateError, match="not valid"):
        ChatTemplate("{% for %}", {})


def test_a_rendering_leaves_no_trace_for_the_next() -> None:
    template = ChatTemplate(
        "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", {}
    )
    assert [template.render(MESSAGES) for _ in range(3)] == ["2", "2", "2"]
