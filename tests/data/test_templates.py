"""Chat templates that would not end, or fill the memory, are refused; others are rendered as transformers does."""

from types import SimpleNamespace

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from unmask.data.chat import Chat, read_template, rendered
from unmask.data.records import Bad
from unmask.data.templates import bounded
from unmask.errors import UserError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "a%b"},
    {"role": "assistant", "content": "<think>x</think>y", "tool_calls": [{"name": "f", "arguments": {"n": [1, 2]}}]},
]
LOOP = "{% for i in range(60) %}"
HOSTILE = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(999999999) %}{% endfor %}",
    "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro f(n) %}{{ f(n - 1) + f(n - 1) if n else '' }}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 10**12 }}",
    "{{ 'a' * 999999999999 }}",
    "{{ 9**999999999 }}",
    "{{ ([0] * 99999) * 99999 }}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = ns.s.replace('a', 'aaaa') %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = ns.s | replace('a', 'aaaa') %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = '{0}{0}'.format(ns.s) %}{% endfor %}",
    "{% set ns = namespace(s='ab') %}" + LOOP + "{% set ns.s = '%s%s' % (ns.s, ns.s) %}{% endfor %}",
    "{% set ns = namespace(s=[0]) %}" + LOOP + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s }}",
    "{% set ns = namespace(s=[0]) %}" + LOOP + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ ns.s | tojson }}",
    "{% set ns = namespace(s=[0]) %}" + LOOP + "{% set ns.s = [ns.s, ns.s] %}{% endfor %}{{ 'a' ~ ns.s }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (9999999999, 1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 9999999999) }}",
    "{{ '%9999999999d' | format(1) }}",
    "{{ 'a' | center(9999999999) }}",
    "{{ 'a'.center(9999999999) }}",
    "{{ 'a'.zfill(9999999999) }}",
    "{{ '\t'.expandtabs(2000000000) }}",
    "{{ 'a\na' | indent(9999999999) }}",
    "{{ {'a': 1} | tojson(indent=9999999999) }}",
    "{{ [1] | batch(9999999999, 0) | list }}",
    "{% filter center(9999999999) %}a{% endfilter %}",
    "{{ ['a'] | map('center', 9999999999) | list }}",
    "{{ lipsum(999999999) }}",
    "{% for i in range(99999) %}" + "x" * 100_000 + "{% endfor %}",
    "{% set a=[1] %}{% set b=[1] %}" + "{% set a=[a,a] %}{% set b=[b,b] %}" * 40 + "{{ a == b }}",
    "{% set a=[1] %}{% set b=[1] %}" + "{% set a=[a,a] %}{% set b=[b,b] %}" * 40 + "{% if a < b %}{% endif %}",
    "{% set x=[1]*1000 %}{{ ([x]*19000) | sum(start=[]) | length }}",
    "{% set l=[1]*900000 %}" + "{% if 2 in l %}{% endif %}" * 200,
    "{% set l='a b'.split(' ')*400000 %}" + "{{ (l | sort)[0] }}" * 5,
    "{% set l=[1]*900000 %}" + "{{ l.index(2) if l.count(1) else l.index(1) }}" * 200,
    "{{ '{:٩٩٩٩٩٩٩٩٩٩}'.format('a') }}",
    "{{ ([1]*1000) | tojson(separators=['A'*5000000, '']) }}",
    "{{ ('A'*5000000).join(([1]*1000) | map('string')) }}",
    "{{ 'a'.encode().ljust(5000000000) }}",
    "{{ (1).to_bytes(5000000000, 'big') }}",
]


@pytest.mark.parametrize("template", HOSTILE, ids=range(len(HOSTILE)))
def test_a_template_without_end_is_refused(template):
    tokenizer = SimpleNamespace(
        chat_template=template,
        apply_chat_template=lambda messages, tokenize: render_jinja_template([messages], chat_template=template)[0][0],
    )
    with pytest.raises(UserError) as error:
        rendered(tokenizer, MESSAGES, "here")
    assert str(error.value).startswith("here: ") and "\n" not in str(error.value)


def test_conversations_that_are_learnt_from_are_rendered_within_the_same_bounds():
    for template in (HOSTILE[0], HOSTILE[0] + "{% generation %}{% endgeneration %}", "{{ 'a' * 10**12 }}"):
        with pytest.raises(Bad, match="the chat template refuses it: the template"):
            Chat(template, template, {}, "all").render(MESSAGES, None, "here")


def test_a_template_file_is_compiled_without_computing(tmp_path):
    (tmp_path / "template").write_text("{% if messages %}{{ 9**999999999 }}{{ 'a' | center(9999999999) }}{% endif %}")
    read_template(str(tmp_path / "template"))


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages[1:] %}{{ loop.index ~ '/' ~ loop.length }}{{ m.role + ':' + m['content'] | trim }}"
        "{% if not loop.last %}{{ '-' * 3 }}{% endif %}{% else %}none{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages[::-1] if m.role != 'user' %}{% set ns.n = ns.n + 2 %}"
        "{{ m.content.split('</think>')[-1].lstrip('x') }}{% endfor %}{{ ns.n % 3 }}{{ '%03d' % ns.n }}{{ 2**3 }}",
        "{% macro say(m) %}[{{ m.role | upper | center(12) }}]{% endmacro %}{% for m in messages %}{{ say(m) }}"
        "{{ m.tool_calls | default([]) | tojson(indent=2) }}{% endfor %}{{ none }}{{ [1, none, 'a'] }}{{ {'a': 1} }}",
        "{% for k, v in messages[0].items() %}{{ k }}={{ v | replace('e', 'E') }} {% endfor %}{{ missing }}"
        "{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('tool_calls') | list | length }}"
        "{{ '{} {:>4}'.format(1, 'a') }}{{ messages | sum(attribute='n', start=0) if false }}",
        "{% for m in messages recursive %}{{ m.role }}{% if m.tool_calls %}{{ loop([{'role': 'x'}]) }}{% endif %}"
        "{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}{% filter upper %}a{% endfilter %}",
    ],
)
def test_others_are_rendered_as_transformers_does(template):
    plain = render_jinja_template([MESSAGES], chat_template=template)
    with bounded(template):
        assert render_jinja_template([MESSAGES], chat_template=template) == plain


def test_generation_blocks_are_found_as_transformers_finds_them():
    template = "{% for m in messages %}{{ m.role }}{% generation %}{{ m.content ~ '.' }}{% endgeneration %}{% endfor %}"
    plain = render_jinja_template([MESSAGES], chat_template=template, return_assistant_tokens_mask=True)
    with bounded(template):
        assert render_jinja_template([MESSAGES], chat_template=template, return_assistant_tokens_mask=True) == plain
    assert len(plain[1][0]) == 3
