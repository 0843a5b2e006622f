"""The `shardwise` command: one thin function per sub-command, imported only when it is called."""

from __future__ import annotations

from shardwise.cli.main import main

__all__ = ["main"]
