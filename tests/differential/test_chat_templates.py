"""Our chat templates against transformers' `apply_chat_template`, on templates of real models and in their styles."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from helpers import BOS, EOS, make_llama_dir, shared_data, tiny_tokenizer
from vocabularies import NPM, chat_templates, tokenizer_file

from w4conv.errors import W4Error
from w4conv.runtime.chat import ChatTemplate
from w4conv.sources import open_source

transformers = pytest.importorskip("transformers", reason="transformers is the oracle here")

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
WITH_TOOLS = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {% generation %}
        {{- message.content | trim }}{{ eos_token }}
        {% endgeneration %}
    {%- elif message.role == "skip" %}
        {%- continue %}
    {%- else %}
        {{- '[' ~ message.role ~ '] ' ~ message.content + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant] ' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
STRICT = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "\n{% for message in messages %}\n"
    "  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\n"
    "    {{ raise_exception('Roles must alternate') }}\n"
    "  {% endif %}\n"
    "  {% set ns = namespace(role=message['role']) %}\n"
    "{{ '<' + ns.role + '>' + message['content'] | trim + '</' + ns.role + '>\n' }}"
    "{% endfor %}\n"
)
FEATURES = """{% macro part(name, text) %}<{{ name }}>{{ text }}</{{ name }}>
{% endmacro %}
{%- set ns = namespace(n=0, self=1) %}
{%- for d in documents or [] %}{{ loop.index }} {{ d.title | upper }}: {{ d.text | e }}
{% endfor %}
{%- for message in messages if message.role != 'skip' %}
    {%- set ns.n = ns.n + 1 %}
    {%- set outer = 'seen' %}
    {%- if loop.index > 8 %}{% break %}{% endif %}
    {%- generation %}{% set outer = 'hidden' %}{{ part(message['role'], message['content'] | trim) }}{% endgeneration %}
    {{- outer }}|{{ dict(a=1).items() | list }}|{{ message.get('none', 'default') }}|{{ message.content is string }}
{% endfor %}
{{- ns.n }}{{ ' %s ' % 'x' }}{{ tools | tojson(indent=2) if tools }}{{ '<&>ü' | tojson }}{{ date_string or '' }}
{%- if add_generation_prompt %}{{ eos_token }}go{% endif %}"""
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'Hello <b>&amp; "you"</b> 你好'}],
    [
        {"role": "user", "content": " one\n"},
        {"role": "assistant", "content": "  two  "},
        {"role": "user", "content": "three  "},
    ],
    [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go"}],
    [{"role": "user", "content": "a"}, {"role": "skip", "content": "b"}, {"role": "user", "content": "c"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer <&>", "parameters": {}}}]


RICH: list[list[dict[str, Any]]] = [
    [
        {"role": "system", "content": "Rules."},
        {"role": "user", "content": "Weather in Paris?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning": "I have to look.",
            "tool_calls": [
                {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"city": "Paris ü"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "abcdefghi", "name": "f", "content": '{"t": 21}'},
        {"role": "assistant", "content": "21 degrees."},
        {"role": "user", "content": "Thanks"},
    ],
    [
        {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
        {"role": "user", "content": "C"},
    ],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"add_generation_prompt": True},
    {"add_generation_prompt": True, "enable_thinking": False},
    {"add_generation_prompt": True, "tools": TOOLS},
    {"add_generation_prompt": True, "documents": [{"title": "T", "text": "<d> & ü"}], "date_string": "1 Jan 2026"},
    {"continue_final_message": True},
]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token=BOS, eos_token=EOS)


compiled = functools.lru_cache(maxsize=1)(ChatTemplate)  # each has a process


def same(oracle: Any, template: str, conversation: list[dict[str, Any]], options: dict[str, Any]) -> bool:
    """The same text is written, or both refuse. Returns whether a text was."""
    arguments = {"add_generation_prompt": False} | options
    try:
        expected = oracle.apply_chat_template(conversation, chat_template=template, tokenize=False, **arguments)
    except Exception:
        with pytest.raises(W4Error):
            compiled(template).render(conversation, special_tokens=oracle.special_tokens_map, **arguments)
        return False
    got = compiled(template).render(conversation, special_tokens=oracle.special_tokens_map, **arguments)
    assert got == expected
    return True


@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, STRICT, FEATURES], ids=["chatml", "tools", "strict", "all"])
def test_same_text_or_same_refusal(oracle: Any, template: str) -> None:
    texts = [same(oracle, template, c, options) for c in CONVERSATIONS for options in OPTIONS]
    assert any(texts)


def test_messages_of_a_refusal(oracle: Any) -> None:
    conversation = CONVERSATIONS[2]
    with pytest.raises(Exception, match="System role not supported"):
        oracle.apply_chat_template(conversation, chat_template=STRICT, tokenize=False)
    with pytest.raises(W4Error, match="refuses these messages: System role not supported"):
        ChatTemplate(STRICT).render(conversation, special_tokens={})


def published() -> dict[str, str]:
    """Templates of real models, by name."""
    found = chat_templates()
    for name in NPM:
        found[f"npm {name}"] = json.loads(tokenizer_file(name, "tokenizer_config.json")).get("chat_template", "")
    for path in sorted((shared_data("configs") or Path("absent")).glob("*/tokenizer_config.json")):
        found[path.parent.name] = json.loads(path.read_text()).get("chat_template", "")
    return {name: template for name, template in found.items() if template}


@pytest.mark.services
def test_templates_of_real_models(oracle: Any) -> None:
    """Those that only run with another engine's extras are refused by both, and hence the same."""
    templates = published()
    assert len(templates) > 60
    written = {}
    for name, template in templates.items():
        for conversation in CONVERSATIONS[:3] + RICH:
            for options in OPTIONS:
                try:
                    written[name] = same(oracle, template, conversation, options) or written.get(name, False)
                except BaseException as error:
                    error.add_note(f"{name}, {options}, {conversation}")
                    raise
    assert sum(written.values()) >= len(templates) - 2, [name for name, wrote in written.items() if not wrote]


def test_which_template_is_used(tmp_path: Path) -> None:
    """The file before the config, a template for tools beside it, names in a list: as transformers chooses."""
    messages = [{"role": "user", "content": "a"}]
    named = [{"name": "default", "template": "list"}, {"name": "tool_use", "template": "list tools"}]
    for config, files in [
        ({"chat_template": "config"}, {}),
        ({"chat_template": named}, {}),
        ({"chat_template": "config"}, {"chat_template.jinja": "file"}),
        ({"chat_template": named}, {"chat_template.jinja": "file"}),
        ({}, {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "file tools"}),
        ({"chat_template": named}, {"chat_template.jinja": "file", "additional_chat_templates/rag.jinja": "rag"}),
    ]:
        directory = make_llama_dir(tmp_path / str(len(list(tmp_path.iterdir()))))
        (directory / "chat_template.jinja").unlink()
        words = {"bos_token": BOS, "eos_token": EOS, "tokenizer_class": "PreTrainedTokenizerFast"} | config
        (directory / "tokenizer_config.json").write_text(json.dumps(words))
        (directory / "additional_chat_templates").mkdir()
        for name, text in files.items():
            (directory / name).write_text(text)
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
        with open_source(directory) as source:
            for tools in (None, TOOLS):
                expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
                got = ChatTemplate.from_blobs(source.blobs, tools=tools is not None)
                assert got.render(messages, special_tokens={}) == expected
