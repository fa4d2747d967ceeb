"""Between a page in host memory, as the device's side has it, and the bytes that disks and peers know."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np


class PageCodec(Protocol):
    """Both may be called from any thread."""

    def page_to_bytes(self, page: Any, /) -> np.ndarray:
        """Its bytes, flat uint8; waits for the copy from the device."""
        ...

    def page_from_bytes(self, data: np.ndarray, /) -> Any:
        """A page in host memory, from its bytes."""
        ...
