from __future__ import annotations

import sys

from jkv.client.cli import main

if __name__ == "__main__":
    sys.exit(main())
