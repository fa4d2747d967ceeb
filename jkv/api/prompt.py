"""What serves a model, and how its requests become token ids."""

from __future__ import annotations

from dataclasses import dataclass

from jkv.api import jkv_pb2 as pb
from jkv.api.validate import PromptRequest, check_input
from jkv.cache.control import CacheControl
from jkv.cache.replica import Replica
from jkv.engine.request import Generator
from jkv.errors import InvalidRequestError
from jkv.text.chat import ChatTemplate, Message
from jkv.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A model being served. Without a tokenizer it takes and gives token ids only."""

    generator: Generator
    cache: CacheControl
    replica: Replica
    served_name: str
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None


def prompt_ids(request: PromptRequest, backend: Backend) -> tuple[int, ...]:
    """The input of a request as token ids. Takes seconds for megabytes of text: call it off the event loop.

    Raises:
        InvalidRequestError: no usable input, or one that the chat template refuses.
    """
    field = check_input(request, has_tokenizer=backend.tokenizer is not None)
    if not isinstance(request, pb.TokenizeRequest) and field == "token_ids":
        return tuple(request.token_ids.ids)
    assert backend.tokenizer is not None, "check_input refuses text without a tokenizer"
    if field == "prompt":
        return tuple(backend.tokenizer.encode(request.prompt, add_special_tokens=True))
    if backend.chat_template is None:
        raise InvalidRequestError("messages", "this model has no chat template; send prompt")
    messages = [Message(role=item.role, content=item.content) for item in request.messages.messages]
    return tuple(backend.tokenizer.encode(backend.chat_template.render(messages), add_special_tokens=False))
