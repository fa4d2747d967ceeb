from __future__ import annotations

import datetime

import pytest

from jkv.errors import InvalidRequestError, UnsupportedModelError
from jkv.text.chat import ChatTemplate, Message

CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
USER = [Message(role="user", content="hi")]


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, "<s>", "</s>")


def test_the_generation_prompt_can_be_left_out() -> None:
    assert template(CHATML).render(USER) == "<|user|>hi<|assistant|>"
    assert template(CHATML).render(USER, add_generation_prompt=False) == "<|user|>hi"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ bos_token }}|{{ eos_token }}", "<s>|</s>"),
        ("{{ messages[0].content | tojson }}", "\"<a & 'b'> é\""),
        ("{{ {'b': 1, 'a': '你'} | tojson(indent=1, sort_keys=true) }}", '{\n "a": "你",\n "b": 1\n}'),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }}", "[1,2]"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{{ tools is none }} {{ documents is none }} {{ other is defined }}", "True True False"),
        ("{{ 'tool_calls' in messages[0] }}", "False"),
        ("{% generation %}said{% endgeneration %}", "said"),
    ],
)
def test_the_dialect_of_transformers(text: str, expected: str) -> None:
    assert template(text).render([Message(role="user", content="<a & 'b'> é")]) == expected


def test_strftime_now() -> None:
    year = template("{{ strftime_now('%Y') }}").render(USER)
    assert abs(int(year) - datetime.datetime.now().year) <= 1


def test_tokens_that_the_model_lacks_are_undefined() -> None:
    assert ChatTemplate("{{ bos_token is defined }}{{ eos_token }}", None, "</s>").render(USER) == "False</s>"


def test_extra_variables_reach_the_template() -> None:
    text = template("{{ tools[0].name }} {{ enable_thinking }}")
    assert text.render(USER, tools=[{"name": "f"}], enable_thinking=False) == "f False"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ nothing.field }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(100001) %}{% endfor %}", "Range too big"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}", "1000000 steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ strftime_now(3) }}", "must be str"),
    ],
)
def test_what_a_template_raises_is_the_messages_fault(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason) as caught:
        template(text).render(USER)
    assert caught.value.field == "messages"


def test_a_template_may_use_many_ranges() -> None:
    text = template("{% for m in messages %}{% for i in range(loop.index) %}{% endfor %}{% endfor %}ok")
    assert text.render(USER * 1000) == "ok"


@pytest.mark.parametrize("text", [CHATML, "{{ raise_exception('unknown role') }}"])
@pytest.mark.parametrize("role", ["function", "developer", "User", ""])
def test_unknown_roles_are_refused_by_name(text: str, role: str) -> None:
    messages = [*USER, Message(role=role, content="x")]
    allowed = f"message 1 has role '{role}'; allowed are system, user, assistant, tool"
    with pytest.raises(InvalidRequestError, match=allowed) as caught:
        template(text).render(messages)
    assert caught.value.field == "messages"


def test_a_template_that_knows_developers_takes_them() -> None:
    text = CHATML + "{# system or developer #}"
    assert template(text).render([Message(role="developer", content="x")]) == "<|developer|>x<|assistant|>"
    with pytest.raises(InvalidRequestError, match="assistant, tool, developer"):
        template(text).render([Message(role="root", content="x")])


def test_no_messages_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at least one message"):
        template(CHATML).render([])


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"messages: character 1 is the lone surrogate U\+D83D"):
        template(CHATML).render([Message(role="user", content="a\ud83d")])


@pytest.mark.parametrize("text", ["{% for %}", "{{ x | no_such_filter }}", "{% unknown %}"])
def test_templates_that_do_not_compile_are_refused(text: str) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be compiled"):
        template(text)
