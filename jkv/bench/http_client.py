"""The client for any OpenAI-compatible server: `/models` and streaming `/completions`.

Needs the bench extra.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx2

from jkv.bench.clients import (
    CONNECT_TIMEOUT_S,
    Chunk,
    RequestFailedError,
    TargetError,
    TargetInfo,
    Usage,
    choose_model,
)
from jkv.bench.load import Prompt

_ERROR_CHARS = 300


class HttpClient:
    """As many connections to `base_url` (it ends in `/v1` or alike) as there are requests in flight."""

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        # A queued request may wait long for its first byte: only the caller limits that.
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )

    async def describe(self, model: str | None) -> TargetInfo:
        try:
            response = await self._http.get(f"{self.base_url}/models", timeout=CONNECT_TIMEOUT_S)
            response.raise_for_status()
            cards = {card["id"]: card for card in response.json()["data"]}
        except httpx2.HTTPError as error:
            raise TargetError(f"--target {self.base_url}: {_reason(error)}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(
                f"--target {self.base_url}: /models does not answer as OpenAI's API does"
            ) from error
        card = cards[choose_model(model, list(cards))]
        return TargetInfo(model=card["id"], max_model_len=card.get("max_model_len"))

    async def stream(
        self, model: str, prompt: Prompt, output_len: int, *, ignore_eos: bool = True
    ) -> AsyncGenerator[Chunk]:
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_len,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.sse(f"{self.base_url}/completions", method="POST", json=body) as events:
                if events.response.is_error:
                    detail = (await events.response.aread()).decode(errors="replace")[:_ERROR_CHARS]
                    raise RequestFailedError(f"HTTP {events.response.status_code}: {detail}")
                async for event in events:
                    if event.data == "[DONE]":
                        return
                    yield chunk_of(json.loads(event.data))
        except httpx2.HTTPError as error:
            raise RequestFailedError(_reason(error)) from error
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise RequestFailedError(f"not an event of OpenAI's API: {error!r}") from error

    async def close(self) -> None:
        await self._http.aclose()


def chunk_of(event: Mapping[str, Any]) -> Chunk:
    """One event of a completion.

    Raises:
        RequestFailedError: the event is an error.
    """
    if "error" in event:
        raise RequestFailedError(json.dumps(event["error"])[:_ERROR_CHARS])
    choices = event["choices"]
    finish = (choices[0].get("finish_reason") or "") if choices else ""
    # A token may show no text yet (half a character); only a closing event without text is not a token.
    tokens = 1 if choices and (choices[0]["text"] or not finish) else 0
    return Chunk(tokens=tokens, finish_reason=finish, usage=_usage(event.get("usage")))


def _usage(usage: Mapping[str, Any] | None) -> Usage | None:
    if usage is None:
        return None
    details = usage.get("prompt_tokens_details") or {}
    return Usage(
        prompt_tokens=usage["prompt_tokens"],
        completion_tokens=usage["completion_tokens"],
        cached_tokens=details.get("cached_tokens"),
    )


def _reason(error: httpx2.HTTPError) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
