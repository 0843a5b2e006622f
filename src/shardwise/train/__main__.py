"""`python -m shardwise.train CONFIG ...`: one rank, under torchrun or our own launcher."""

from __future__ import annotations

import sys

from shardwise.train.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
