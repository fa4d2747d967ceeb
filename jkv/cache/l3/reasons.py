"""Why a page could not be read or written."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """The value is the name that statistics count it by."""

    MISSING = "missing"  # no such object (any more)
    IO = "io"  # the store answered with an error
    SIZE = "size"  # truncated, or longer than it was written
    CORRUPT = "corrupt"  # a checksum does not match
    MISMATCH = "mismatch"  # sound, but not the page that was asked for
    VERSION = "version"  # not a page of this format
    NO_SPACE = "no_space"  # the file system or the quota is full
    READ_ONLY = "read_only"  # the store may not be written, or no longer by this owner
    BUDGET = "budget"  # the daily write budget is spent
    TIMEOUT = "timeout"  # the store has not answered, and is not waited for
    LOST = "lost"  # the page itself, before it could be written
    LATE = "late"  # it had not come when it would have been of use
    CANCELLED = "cancelled"
    CLOSED = "closed"
