"""Chat messages to one prompt text, with the model's own template."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from jkv.errors import InvalidRequestError, UnsupportedModelError
from jkv.text.validate import check_unicode

ROLES = ("system", "user", "assistant", "tool")
_DEVELOPER = "developer"
_MAX_RANGE_STEPS = 1_000_000
# What an expression in a template can raise, besides jinja2's own errors.
_EXPRESSION_ERRORS = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


class ChatTemplate:
    """A jinja2 template in transformers' dialect, sandboxed. Thread-safe.

    A render's ranges are bounded: 100,000 steps each (jinja2's sandbox) and 1,000,000 together.
    """

    def __init__(self, template: str, bos_token: str | None, eos_token: str | None) -> None:
        """Compile the template.

        Raises:
            UnsupportedModelError: it is not valid jinja2, or uses what transformers does not offer.
        """
        try:
            self._template = _environment().from_string(template)
        except TemplateError as error:
            raise UnsupportedModelError(f"the model's chat template cannot be compiled: {error}") from error
        tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._tokens = {name: token for name, token in tokens.items() if token is not None}
        # Only a template that tells developers apart takes them; others would print an unknown role.
        self._roles = (*ROLES, _DEVELOPER) if _DEVELOPER in template else ROLES

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The prompt text; encode it with `add_special_tokens=False`.

        `extra` are further template variables, such as `tools`.

        Raises:
            InvalidRequestError: no messages, an unknown role, text that is not valid Unicode, or the template
                refuses the messages; the field is `messages`.
        """
        self._check(messages)
        variables = {
            "tools": None,
            "documents": None,
            **self._tokens,
            **extra,
            "messages": [asdict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "range": _Ranges(),
        }
        try:
            return self._template.render(variables)
        except (TemplateError, *_EXPRESSION_ERRORS) as error:
            raise InvalidRequestError(
                "messages", f"the model's chat template does not take them: {error}"
            ) from error

    def _check(self, messages: Sequence[Message]) -> None:
        if not messages:
            raise InvalidRequestError("messages", "must have at least one message")
        for position, message in enumerate(messages):
            if message.role not in self._roles:
                raise InvalidRequestError(
                    "messages",
                    f"message {position} has role {message.role!r}; allowed are {', '.join(self._roles)}",
                )
            check_unicode("messages", message.content)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant said, for training; here its body stands as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Ranges:
    """`range` for one render: nested loops draw from one account."""

    def __init__(self) -> None:
        self._left = _MAX_RANGE_STEPS

    def __call__(self, *bounds: int) -> range:
        steps = safe_range(*bounds)
        self._left -= len(steps)
        if self._left < 0:
            raise OverflowError(f"its ranges have more than {_MAX_RANGE_STEPS} steps")
        return steps


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter escapes HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
