"""Chat templates render as transformers renders them, and can do no harm."""

import json

import pytest

from enginery.core.errors import ArtifactError
from enginery.runtime.text.chat_template import ChatTemplate

CHATML = """\
{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant"] %}
        {{- raise_exception("unknown role: " + message.role) }}
    {%- endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- "<|im_start|>" + message.role + "\\n" + message.content | trim + "<|im_end|>" + "\\n" }}
{%- endfor %}
{%- for i in range(3) %}{{ "-" * i }}{% endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant\\n" + eos_token }}{% endif %}"""
MESSAGES = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": 'Grüße "quoted" <b>'},
    {"role": "assistant", "content": "Hi"},
] * 3


@pytest.fixture
def template(tmp_path):
    """`template(text)`: that of a directory with this chat_template.jinja."""

    def make(text):
        (tmp_path / "chat_template.jinja").write_text(text)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        return ChatTemplate.open(tmp_path)

    return make


def test_the_prompt_is_that_of_transformers(template):
    from transformers.utils.chat_template_utils import render_jinja_template

    for variables in (
        {},
        {"add_generation_prompt": True},
        {"tools": [{"name": "größer", "n": 1}]},
    ):
        wanted, _ = render_jinja_template(
            [MESSAGES], chat_template=CHATML, eos_token="</s>", **variables
        )
        assert [template(CHATML).render(MESSAGES, **variables)] == wanted


def test_a_template_that_rejects_messages_says_why(template):
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja fails.*unknown role: judge"):
        template(CHATML).render([{"role": "judge", "content": ""}])


@pytest.mark.parametrize(
    "text",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{{ 'a' * 10 ** 9 }}",
        "{{ 'a' * 1000000000 }}",
        "{{ 99999 * 99999 * 'a' }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ 1 / 0 }}",
        "{% include 'tokenizer_config.json' %}",
    ],
)
def test_templates_reach_nothing_and_build_nothing_large(template, text):
    with pytest.raises(ArtifactError, match="chat template"):
        template(text).render([{"role": "user", "content": "x"}])


def test_the_file_comes_before_the_settings_and_a_list_has_a_default(tmp_path):
    assert ChatTemplate.open(tmp_path) is None
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps({"chat_template": "from settings"}))
    assert ChatTemplate.open(tmp_path).render([]) == "from settings"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    settings.write_text(json.dumps({"chat_template": named}))
    assert ChatTemplate.open(tmp_path).render([]) == "d"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert ChatTemplate.open(tmp_path).render([]) == "from the file"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="is not UTF-8"):
        ChatTemplate.open(tmp_path)


def test_what_transformers_gives_templates_is_there(tmp_path):
    from transformers.utils.chat_template_utils import render_jinja_template

    text = (
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ messages[0].content }}{{ x }}"
        "{% endgeneration %}{{ x }}{{ strftime_now('%Y') }}"
        "{{ {'b': 1, 'a': '<é>'} | tojson(sort_keys=true, separators=(',', ':')) }}"
        "{{ ['é'] | tojson(ensure_ascii=true, indent=1) }}"
    )
    messages = [{"role": "user", "content": "warm"}]
    rendered = ChatTemplate(text, tmp_path).render(messages)
    assert [rendered] == render_jinja_template([messages], chat_template=text)[0]
