"""Chat templates: rules, limits, errors. The comparison with transformers is in tests/differential."""

from __future__ import annotations

import json
import re
import time

import pytest

from w4conv.errors import InputError, UsageError
from w4conv.runtime import chat
from w4conv.runtime.chat import ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi <b>&</b>"}]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def render(source: str, **variables: object) -> str:
    return ChatTemplate(source).render(MESSAGES, special_tokens=TOKENS, **variables)  # type: ignore[arg-type]  # variables


def test_blocks_are_trimmed_and_text_is_not_escaped() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n  {{ m.content }}{{ eos_token }}\n  {% endfor %}\nend"
    assert render(source) == "<s>\n  Hi <b>&</b></s>\nend"


def test_loop_controls_generation_tag_and_json() -> None:
    assert render("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "01"
    assert render("{% generation %}{{ messages[0].role }}{% endgeneration %}!") == "user!"
    assert render("{{ {'k': ['é', '<']} | tojson }}") == '{"k": ["é", "<"]}'
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'


def test_strftime_now_and_user_variables() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")
    assert render("{{ enable_thinking }}{{ add_generation_prompt }}", enable_thinking=False) == "FalseTrue"


def test_precedence_of_the_sources() -> None:
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}
    blobs = {"tokenizer_config.json": json.dumps(config).encode()}

    def text(b: dict[str, bytes], *, tools: bool = False) -> str:
        return ChatTemplate.from_blobs(b, tools=tools).render(MESSAGES, special_tokens={})

    assert text(blobs) == "D"
    assert text(blobs, tools=True) == "T"
    assert text(blobs | {"chat_template.jinja": b"J"}) == "J"
    assert text({"tokenizer_config.json": b'{"chat_template": "S"}'}, tools=True) == "S"
    with pytest.raises(InputError, match="no chat template"):
        ChatTemplate.from_blobs({"tokenizer_config.json": b"{}"})
    with pytest.raises(InputError, match="UTF-8"):
        ChatTemplate.from_blobs({"chat_template.jinja": b"\xff"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "refuses these messages: roles must alternate"),
        ("{% for %}", "cannot be compiled"),
        ("{{ messages[0].content + 1 }}", "failed (TypeError)"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "failed (SecurityError)"),
        ("{{ messages.append(1) }}", "failed (SecurityError)"),
        ("{% include '/etc/passwd' %}", "failed (TypeError)"),
    ],
)
def test_templates_that_fail_or_reach_out(source: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        render(source)


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "at least one message"),
        (MESSAGES, {"continue_final_message": True}, "turn add_generation_prompt off"),
        ([{"role": "user"}], {"continue_final_message": True, "add_generation_prompt": False}, "has no text"),
    ],
)
def test_nothing_to_render_or_to_continue(
    messages: list[dict[str, str]], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ChatTemplate("{{ messages[0].content }}").render(messages, special_tokens={}, **options)


def test_a_message_that_the_template_drops_cannot_be_continued() -> None:
    with pytest.raises(InputError, match="leaves out the last message"):
        render("{{ messages[0].role }}{# content #}", add_generation_prompt=False, continue_final_message=True)


def test_messages_are_not_changed() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}], "none": None}]
    before = json.dumps(messages)
    template = ChatTemplate("{{ messages[0].content[0].text }}")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert template.render(messages, special_tokens={}, **options) == "a"
    assert json.dumps(messages) == before


def test_too_large_a_template_is_refused() -> None:
    with pytest.raises(InputError, match="limit"):
        ChatTemplate("x" * (chat.MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(InputError, match="the messages take"):
        ChatTemplate("").render([{"role": "user", "content": "x" * chat.MAX_MESSAGES_NBYTES}], special_tokens={})


@pytest.mark.parametrize("value", [b"bytes", {1: 2}, {"a": {3}}, [object()], 1j, (lambda: None)])
def test_what_json_cannot_say_is_not_passed_on(value: object) -> None:
    with pytest.raises(UsageError, match="JSON"):
        render("{{ x }}", x=value)


def test_named_templates() -> None:
    listed = [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]
    blobs = {"tokenizer_config.json": json.dumps({"chat_template": listed}).encode()}

    def text(name: str | None = None, **options: bool) -> str:
        return ChatTemplate.from_blobs(blobs, name=name, **options).render(MESSAGES, special_tokens={})

    assert (text("rag"), text("tool_use"), text(tools=True)) == ("R", "T", "T")
    with pytest.raises(InputError, match=r"none is its default: 'rag', 'tool_use'\. Name one"):
        text()
    with pytest.raises(InputError, match="none is named 'rags': 'rag', 'tool_use'"):
        text("rags")


@pytest.mark.parametrize(
    "template", [5, True, {}, {"default": "x"}, [5], [{"name": "a"}], [{"name": 1, "template": "x"}], [["a", "b"]],
    [{"name": "a", "template": "1"}, {"name": "a", "template": "2"}], [{"template": "x"}]]
)  # fmt: skip
def test_what_is_no_template(template: object) -> None:
    blobs = {"tokenizer_config.json": json.dumps({"chat_template": template}).encode()}
    with pytest.raises(InputError, match=r"tokenizer_config\.json: chat_template is neither"):
        ChatTemplate.from_blobs(blobs)
