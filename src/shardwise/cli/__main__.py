"""`python -m shardwise.cli`: the `shardwise` command where its script is not on the path."""

from __future__ import annotations

import sys

from shardwise.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
