"""Our chat templates against transformers' `apply_chat_template`, on templates written in the styles of real models."""

from __future__ import annotations

from typing import Any

import pytest
from helpers import BOS, EOS, tiny_tokenizer

from w4conv.runtime.chat import ChatTemplate

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
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": 'Hello <b>&amp; "you"</b> 你好'}],
    [
        {"role": "user", "content": " one\n"},
        {"role": "assistant", "content": "  two  "},
        {"role": "user", "content": "three"},
    ],
    [{"role": "system", "content": "Rules."}, {"role": "user", "content": "Go"}],
    [{"role": "user", "content": "a"}, {"role": "skip", "content": "b"}, {"role": "user", "content": "c"}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "größer <&>", "parameters": {}}}]


@pytest.fixture(scope="module")
def oracle() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny_tokenizer(), bos_token=BOS, eos_token=EOS)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", [CHATML, WITH_TOOLS, STRICT], ids=["chatml", "tools", "strict"])
@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": True, "enable_thinking": False}, {"tools": TOOLS, "add_generation_prompt": True}],
    ids=["plain", "prompt", "tools"],
)
def test_same_text_or_same_refusal(
    oracle: Any, conversation: list[dict[str, Any]], template: str, options: dict[str, Any]
) -> None:
    ours = {"add_generation_prompt": False} | options
    try:
        expected = oracle.apply_chat_template(conversation, chat_template=template, tokenize=False, **options)
    except Exception as error:
        with pytest.raises(Exception, match=str(error)):
            ChatTemplate(template).render(conversation, special_tokens={"bos_token": BOS, "eos_token": EOS}, **ours)
        return
    got = ChatTemplate(template).render(conversation, special_tokens={"bos_token": BOS, "eos_token": EOS}, **ours)
    assert got == expected
