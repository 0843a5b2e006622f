"""shardwise: a fully sharded data parallel engine for PyTorch, with tools to plan and check runs."""

__version__ = "0.1.0"
