"""Chat templates render as transformers renders them, and can do no harm."""

import json
import os
import signal

import psutil
import pytest

from enginery.core.errors import ArtifactError
from enginery.core.trust.resource_limits import ResourceLimits
from enginery.runtime.text import chat_template
from enginery.runtime.text.chat_template import ChatTemplate, PairTemplate

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

    for variables in ({}, {"add_generation_prompt": True}, {"tools": [{"name": "größer", "n": 1}]}):
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
        "{{ tools }}{{ documents is none }}"
    )
    messages = [{"role": "user", "content": "warm"}]
    rendered = ChatTemplate(text, tmp_path).render(messages)
    assert [rendered] == render_jinja_template([messages], chat_template=text)[0]


LARGE = [
    "{{ 'x'.ljust(2000000000)|length }}",
    "{{ 'x'.center(2000000000)|length }}",
    "{{ 'x'.zfill(2000000000)|length }}",
    "{{ 'x'.expandtabs(1)|center(2000000000)|length }}",
    "{{ '\\t'.expandtabs(2000000000)|length }}",
    "{{ '%2000000000d' % 1 }}",
    "{{ '%*d' % (2000000000, 1) }}",
    "{{ '%.2000000000f' % 1 }}",
    "{{ '%2000000000d'|format(1) }}",
    "{{ '{:2000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 2000000000) }}",
    "{{ ('a' * 60000).replace('a', 'b' * 60000)|length }}",
    "{{ ('a' * 60000)|replace('a', 'b' * 60000)|length }}",
    "{{ ('a' * 60000).join('b' * 60000)|length }}",
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(40) %}"
    "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
    "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set n = namespace(x='ab') %}"
    "{% for i in range(40) %}{% set n.x = m(n.x) %}{% endfor %}",
    "{% set a = [1] * 60000 %}{% set b = [a] * 60000 %}{{ b }}",
    "{% set a = [1] * 60000 %}{% set b = [a] * 60000 %}{{ b|tojson }}",
    "{{ [1]|batch(2000000000, 0)|list|length }}",
    "{{ ('a\\n' * 30000)|indent(2000000)|length }}",
    "{{ [1, 2]|tojson(indent=2000000000) }}",
    "{{ lipsum(n=2000000) }}",
    "{{ 'x'|wordwrap(1, wrapstring='y' * 60000)|length }}{{ 'x '|center(2000000000) }}",
    "{{ (10 ** 5)|string }}",
    "{{ 'a'.encode().ljust(2000000000)|length }}",
    "{% for i in range(60000) %}{{ 'a' * 60000 }}{% endfor %}",
]


@pytest.mark.more
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=str(number), marks=pytest.mark.slow if number % 3 else ())
        for number, text in enumerate(LARGE)
    ],
)
def test_no_template_takes_gigabytes(tmp_path, monkeypatch, text):
    monkeypatch.setattr(chat_template, "_LIMITS", ResourceLimits(seconds=2.0))
    template = ChatTemplate(text, tmp_path / "t.jinja")
    with pytest.raises(ArtifactError, match=r"^the chat template in .*t\.jinja") as caught:
        template.render([])
    assert "\n" not in caught.value.message
    process = chat_template._renderer(text)._process
    if process.is_alive:
        assert psutil.Process(process._process.pid).memory_info().rss < 400 * 2**20


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ dict(a=1).b.c }}", "has no attribute 'b'"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "RecursionError"),
        ("{{ 'x'|dictsort }}", "AttributeError"),
        ("{{ 'x' + 1 }}", "TypeError"),
        ("{{ {}['x']['y'] }}", "has no attribute 'x'"),
        ("{{ messages|first|upper }}{{ [1]|sum('a') }}", "fails on these messages"),
        ("{{ 'x'.encode('none') }}", "LookupError"),
        ("{{ strftime_now(1) }}", "TypeError"),
        ("{{ namespace(a=1).__class__.x }}", "fails on these messages"),
        ("{{ '\\ud800'.encode() }}", "UnicodeEncodeError"),
        (
            "{% for i in range(260) %}{{ 'x' * 65536 }}{% endfor %}",
            "the prompt has 17039360 characters, expected at most 16777216",
        ),
    ],
)
def test_whatever_a_template_raises_is_one_clear_error(tmp_path, text, reason):
    with pytest.raises(ArtifactError, match="fails on these messages: ") as caught:
        ChatTemplate(text, tmp_path / "t.jinja").render([])
    assert reason in caught.value.message


@pytest.mark.parametrize(
    "text",
    [
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 5000 + ")" * 5000 + " }}",
        "{{ " + "-" * 20_000 + "1 }}",
        "{% if %}",
        "{{ 'a'|none }}",
        "{% set x = 1 %}" * 3 + "{% break %}",
    ],
    ids=["nested", "parentheses", "signs", "if", "filter", "break"],
)
def test_template_that_cannot_be_compiled_is_one_clear_error(tmp_path, text):
    template = ChatTemplate(text, tmp_path / "t.jinja")
    for use in (template.check, lambda: template.render([])):
        with pytest.raises(ArtifactError, match=r"^the chat template in .*t\.jinja"):
            use()


def test_template_that_does_not_end_is_ended_and_the_next_one_renders(tmp_path, monkeypatch):
    monkeypatch.setattr(chat_template, "_LIMITS", ResourceLimits(seconds=0.5))
    text = (
        "{% if messages %}{% for a in range(60000) %}{% for b in range(60000) %}{% endfor %}"
        "{% endfor %}{% endif %}done"
    )
    template = ChatTemplate(text, tmp_path / "t.jinja")
    assert template.render([]) == "done"
    with pytest.raises(ArtifactError, match=r"t\.jinja: .* took longer than 0\.5 seconds"):
        template.render([{"role": "user"}])
    monkeypatch.undo()
    assert template.render([]) == "done"


def test_process_that_was_killed_is_started_again(tmp_path):
    template = ChatTemplate("{{ messages|length }}", tmp_path / "t.jinja")
    assert template.render([{}]) == "1"
    process = chat_template._renderer(template.text)._process._process
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert template.render([{}, {}]) == "2"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork of POSIX")
def test_forked_process_renders_with_a_process_of_its_own(tmp_path):
    template = ChatTemplate("{{ messages|length }}", tmp_path / "t.jinja")
    assert template.render([{}]) == "1"
    child = os.fork()
    if not child:
        os._exit(template.render([{}, {}]) != "2")
    assert os.waitpid(child, 0)[1] == 0
    assert template.render([{}, {}, {}]) == "3"


def test_conversations_are_rendered_together_and_in_order(tmp_path):
    template = ChatTemplate("{{ messages[0].content }}{{ end }}", tmp_path / "t.jinja")
    conversations = [[{"role": "user", "content": str(number)}] for number in range(150)]
    assert template.render_all(conversations, end="!") == [f"{n}!" for n in range(150)]
    assert template.render_all([]) == []


@pytest.mark.parametrize("text", ["{{ 'x'.ljust(2000000000) }}", "{% if %}", "{{ {}.a.b }}"])
def test_template_of_a_reranker_is_checked_when_it_is_opened(tmp_path, text):
    modality = {"message": {"method": "forward", "method_output_name": "logits"}}
    settings = {"modality_config": modality}
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text(text)
    with pytest.raises(ArtifactError, match="the chat template in "):
        PairTemplate.open(tmp_path)
