"""A store's own name, kept in it: who reads the same one sees the same store, whatever its path is called."""

from __future__ import annotations

import contextlib
import secrets
import time

from jkv.cache.l3.objects import KvObjects, ObjectError
from jkv.cache.l3.reasons import Reason

NAME = "store-token"
_LENGTH = 32
_TRIES = 20
_PAUSE_S = 0.05


def store_token(objects: KvObjects) -> str:
    """The store's token, 32 hex digits; the first who asks makes it.

    Raises:
        ObjectError: the store cannot be read or written.
    """
    for _ in range(_TRIES):
        kept, generation = objects.read_generation(NAME)
        if kept is not None and len(kept) == _LENGTH:
            return kept.decode("ascii", "replace")
        token = secrets.token_hex(_LENGTH // 2).encode()
        if objects.root is not None:  # TensorStore's conditional writes want locks that a crash leaves behind
            with contextlib.suppress(FileExistsError), open(objects.root / NAME, "xb") as file:
                file.write(token)
        else:
            objects.replace(NAME, token, generation)
        if kept is not None:
            time.sleep(_PAUSE_S)  # another engine is just writing it
    raise ObjectError(Reason.CORRUPT, f"{NAME} is no token; delete it")
