"""Two small servers with a prefix cache of three tiers, for the benchmark's clients to talk to."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc

from jkv.api import jkv_pb2, jkv_pb2_grpc

PAGE_SIZE = 16
VOCAB_SIZE = 500
MAX_MODEL_LEN = 1000


PAGES_CAPACITY = 40
PAGE_BYTES = 1000

Page = tuple[int, ...]  # itself and all before it


@dataclass
class FakeModel:
    """Emits token 7 every `step_s`, remembers full pages in every tier, and refuses prompts of `refused_len`.

    `may_end` says whether clients let an answer end early; `flushes` whether tiers can be emptied.
    """

    step_s: float = 0.0
    refused_len: int = -1
    caching: bool = True
    may_end: bool = False
    flushes: bool = True
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    tiers: dict[str, set[Page]] = field(default_factory=lambda: {tier: set() for tier in ("l1", "l2", "l3")})
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, prompt: Sequence[int]) -> dict[str, int]:
        """Admit a prompt and return how many of its tokens each tier had."""
        with self.lock:
            cached = self._cached(prompt) if self.caching else {}
            self.prompts.append(tuple(prompt))
            self._keep(prompt)
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return cached

    def _cached(self, prompt: Sequence[int]) -> dict[str, int]:
        cached: dict[str, int] = {}
        for page in _pages(prompt):
            tier = next((tier for tier, held in self.tiers.items() if page in held), None)
            if tier is None:
                break
            cached[tier] = cached.get(tier, 0) + PAGE_SIZE - (len(page) == len(prompt))
        return cached

    def _keep(self, tokens: Sequence[int]) -> None:
        for held in self.tiers.values():
            held.update(_pages(tokens))

    def tokens(self, count: int) -> Iterator[int]:
        for _ in range(count):
            time.sleep(self.step_s)
            yield 7

    def end(self, prompt: Sequence[int], count: int) -> None:
        """The request is over; of its `count` tokens the last one was never computed with."""
        with self.lock:
            self._keep([*prompt, *[7] * (count - 1)])
            self.running -= 1


def _pages(tokens: Sequence[int]) -> list[Page]:
    return [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


class _Servicer(jkv_pb2_grpc.GenerationServicer):
    def __init__(self, model: FakeModel) -> None:
        self._model = model

    def ListModels(self, request: jkv_pb2.ListModelsRequest, context: grpc.ServicerContext) -> Any:
        card = jkv_pb2.ModelCard(
            name="fake", max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, page_size=PAGE_SIZE
        )
        return jkv_pb2.ListModelsResponse(models=[card])

    def Generate(self, request: jkv_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        prompt, sampling = request.token_ids.ids, request.sampling
        if len(prompt) == self._model.refused_len:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")
        exact = sampling.ignore_eos is not self._model.may_end
        if not (exact and sampling.HasField("temperature") and sampling.temperature == 0):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the benchmark must ask for greedy, exact lengths"
            )
        cached = self._model.begin(prompt)
        try:
            for token in self._model.tokens(sampling.max_tokens):
                yield jkv_pb2.GenerateChunk(token_ids=[token])
        finally:
            self._model.end(prompt, sampling.max_tokens)
        usage = jkv_pb2.Usage(
            prompt_tokens=len(prompt),
            completion_tokens=sampling.max_tokens,
            cached_tokens=sum(cached.values()),
            cached_by_tier=jkv_pb2.CachedByTier(**cached),
        )
        yield jkv_pb2.GenerateChunk(finish_reason="length", usage=usage)

    def Tokenize(self, request: jkv_pb2.TokenizeRequest, context: grpc.ServicerContext) -> Any:
        text = "".join(f"{message.role[0]}{message.content}" for message in request.messages.messages)
        return jkv_pb2.TokenizeResponse(ids=(text + "a").encode("latin-1"))  # the answer's turn

    def Detokenize(self, request: jkv_pb2.DetokenizeRequest, context: grpc.ServicerContext) -> Any:
        return jkv_pb2.DetokenizeResponse(text=bytes(request.ids).decode("latin-1"))


class _CacheServicer(jkv_pb2_grpc.CacheServicer):
    def __init__(self, model: FakeModel) -> None:
        self._tiers, self._model = model.tiers, model

    def Stats(self, request: jkv_pb2.CacheStatsRequest, context: grpc.ServicerContext) -> Any:
        tiers = [
            jkv_pb2.TierStats(
                tier=tier,
                pages=len(held),
                bytes=len(held) * PAGE_BYTES,
                pages_capacity=PAGES_CAPACITY,
                read_bytes_per_s=5e9,
            )
            for tier, held in self._tiers.items()
        ]
        return jkv_pb2.CacheStatsResponse(tiers=tiers)

    def Flush(self, request: jkv_pb2.FlushRequest, context: grpc.ServicerContext) -> Any:
        for tier in request.tiers if self._model.flushes else ():
            self._tiers[tier].clear()
        return jkv_pb2.FlushResponse()

    def Drain(self, request: jkv_pb2.DrainRequest, context: grpc.ServicerContext) -> Any:
        return jkv_pb2.DrainResponse()

    def Demote(self, request: jkv_pb2.DemoteRequest, context: grpc.ServicerContext) -> Any:
        above, below = self._tiers[request.tier], self._tiers[{"l1": "l2", "l2": "l3"}[request.tier]]
        below.update(above)
        above.clear()
        return jkv_pb2.DemoteResponse()

    def Prefetch(self, request: jkv_pb2.PrefetchRequest, context: grpc.ServicerContext) -> Any:
        pages = [p for p in _pages(request.prefix.token_ids.ids) if any(p in t for t in self._tiers.values())]
        self._tiers[request.tier].update(pages)
        return jkv_pb2.PrefetchResponse(tokens=len(pages) * PAGE_SIZE)


@contextmanager
def grpc_server(model: FakeModel) -> Iterator[str]:
    """The target URL of a running server."""
    server = grpc.server(ThreadPoolExecutor(16))
    jkv_pb2_grpc.add_GenerationServicer_to_server(_Servicer(model), server)
    jkv_pb2_grpc.add_CacheServicer_to_server(_CacheServicer(model), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class _Handler(BaseHTTPRequestHandler):
    model: FakeModel

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"data": [{"id": "fake", "max_model_len": MAX_MODEL_LEN}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt, count = body["prompt"], body["max_tokens"]
        if self.path != "/v1/completions" or not body["stream"] or len(prompt) == self.model.refused_len:
            self.send_error(429, "the queue is full")
            return
        self._start("text/event-stream")
        cached = self.model.begin(prompt)
        try:
            for index, _ in enumerate(self.model.tokens(count)):
                # As servers do: no text yet in mid-character, and the reason on the last token's event.
                finish = "length" if index == count - 1 else None
                choice = {
                    "index": 0,
                    "text": "" if index % 3 == 1 and not finish else "x",
                    "finish_reason": finish,
                }
                self._event(json.dumps({"choices": [choice], "usage": None}))
        finally:
            self.model.end(prompt, count)
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": sum(cached.values())} if self.model.caching else None,
        }
        if body["stream_options"]["include_usage"]:
            self._event(json.dumps({"choices": [], "usage": usage}))
        self._event("[DONE]")

    def _start(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.end_headers()

    def _send(self, content_type: str, text: str) -> None:
        self._start(content_type)
        self.wfile.write(text.encode())

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the test's output clean."""


class _HttpServer(ThreadingHTTPServer):
    # With the default of 5, simultaneous connections wait a second for their SYN to be sent again.
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Stay silent where a client hung up, as it does at its timeout."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def http_server(model: FakeModel) -> Iterator[str]:
    """The target URL of a running server."""
    handler = type("Handler", (_Handler,), {"model": model})
    server = _HttpServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
