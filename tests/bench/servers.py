"""Two small servers with a prefix cache of their own, for the benchmark's clients to talk to."""

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


@dataclass
class FakeModel:
    """Emits token 7 every `step_s`, remembers full pages of prompts, and refuses prompts of `refused_len`."""

    step_s: float = 0.0
    refused_len: int = -1
    caching: bool = True
    prompts: list[tuple[int, ...]] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, prompt: Sequence[int]) -> int:
        """Admit a prompt and return how many of its tokens were cached."""
        with self.lock:
            pages = [tuple(prompt[:end]) for end in range(PAGE_SIZE, len(prompt) + 1, PAGE_SIZE)]
            known = {seen[: len(page)] for seen in self.prompts for page in pages}
            matched = sum(page in known for page in pages) if self.caching else 0
            self.prompts.append(tuple(prompt))
            self.running += 1
            self.most_running = max(self.most_running, self.running)
            return min(matched * PAGE_SIZE, len(prompt) - 1)

    def tokens(self, count: int) -> Iterator[int]:
        for _ in range(count):
            time.sleep(self.step_s)
            yield 7

    def end(self) -> None:
        with self.lock:
            self.running -= 1


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
        if not (sampling.ignore_eos and sampling.HasField("temperature") and sampling.temperature == 0):
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, "the benchmark must ask for greedy, exact lengths"
            )
        cached = self._model.begin(prompt)
        try:
            for token in self._model.tokens(sampling.max_tokens):
                yield jkv_pb2.GenerateChunk(token_ids=[token])
        finally:
            self._model.end()
        usage = jkv_pb2.Usage(
            prompt_tokens=len(prompt), completion_tokens=sampling.max_tokens, cached_tokens=cached
        )
        yield jkv_pb2.GenerateChunk(finish_reason="length", usage=usage)


@contextmanager
def grpc_server(model: FakeModel) -> Iterator[str]:
    """The target URL of a running server."""
    server = grpc.server(ThreadPoolExecutor(16))
    jkv_pb2_grpc.add_GenerationServicer_to_server(_Servicer(model), server)
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
            self.model.end()
        usage = {
            "prompt_tokens": len(prompt),
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": cached} if self.model.caching else None,
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
