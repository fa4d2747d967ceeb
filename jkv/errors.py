"""The errors that cross a room's border. Each says what was given, what is allowed, and how to go on."""

from __future__ import annotations


class JkvError(Exception):
    """Base of every error that jkv raises on purpose."""


class ConfigError(JkvError):
    """A flag or config field that cannot be used; the message names it, its value and what is allowed."""


class UnsupportedModelError(JkvError):
    """A checkpoint whose architecture, field or tensor jkv does not implement; named in the message."""


class InvalidRequestError(JkvError):
    """A request that can never succeed as it is (gRPC INVALID_ARGUMENT, HTTP 400).

    `field` is the name of the offending request field, as the API spells it, and `reason` the message.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field, self.reason = field, message


class UnknownModelError(InvalidRequestError):
    """A model name that this server does not serve (gRPC NOT_FOUND, HTTP 404)."""


class OverloadedError(JkvError):
    """The queue is full (gRPC RESOURCE_EXHAUSTED, HTTP 429); try again after `retry_after_s` seconds."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ShuttingDownError(JkvError):
    """The server drains and takes no new requests (gRPC UNAVAILABLE, HTTP 503)."""


class NoEngineError(JkvError):
    """A router has no engine that could answer (gRPC UNAVAILABLE, HTTP 503)."""


class FailedPreconditionError(JkvError):
    """What is asked cannot be done in the present state (gRPC FAILED_PRECONDITION, HTTP 409)."""


class PermissionDeniedError(JkvError):
    """The caller may not ask this (gRPC PERMISSION_DENIED, HTTP 403)."""


class EngineFailedError(JkvError):
    """The engine failed in a way it cannot recover from; the process should end and be started again."""
