"""`python -m shardwise.train CONFIG ...`: one rank, under torchrun or our own launcher."""

from __future__ import annotations

import os
import sys

from shardwise.train.command import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written and the process group is gone. Tearing down the threads of Gloo and of
    # the store with the interpreter has aborted a finished rank once on a busy machine ("terminate
    # called without an active exception"), which fails a job that has succeeded.
    os._exit(code)
