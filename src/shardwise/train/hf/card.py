"""The model card of a run: where the model comes from and the run's own figures, nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import shardwise
from shardwise.checkpoint.source import CheckpointSource
from shardwise.checkpoint.state import EXTRA
from shardwise.train.metrics import read_metrics

CARD_FILE = "README.md"


def card_of(source: CheckpointSource) -> str:
    """Of a checkpoint of the training job, with the rows of metrics.jsonl up to its step."""
    checkpoint = source.checkpoint
    config = source.objects.get(EXTRA, {}).get("config", {})
    rows = read_metrics(checkpoint.path.parent.parent / "metrics.jsonl")
    rows = [row for row in rows if row["step"] <= checkpoint.step]
    base = Path(str(config.get("model", {}).get("path", ""))).name or "new weights"
    rank = config.get("lora", {}).get("rank", 0)
    facts = {
        "steps": f"{checkpoint.step:,}",
        "ranks": f"{checkpoint.world_size}",
        **_batches(config),
        **_losses(rows),
        "optimizer": _phrase(config.get("optim", {})),
        "adapters": f"LoRA of rank {rank}" if rank else "none: all weights were trained",
        "made with": f"shardwise {shardwise.__version__}, {datetime.now(UTC):%Y-%m-%d}",
    }
    lines = ["---", f"library_name: {'peft' if rank else 'transformers'}"]
    lines += ["pipeline_tag: text-generation", "tags:", "- shardwise", "---", ""]
    lines += [f"# {base}, trained"]
    data = config.get("data", {}).get("source", "")
    lines += ["", f"Made from `{base}` on `{_names(data)}` by `shardwise train`.", ""]
    lines += ["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items())]
    return "\n".join([*lines, ""])


def _batches(config: Mapping[str, Any]) -> dict[str, str]:
    train, data = config.get("train", {}), config.get("data", {})
    if "global_batch" not in train or "seq_len" not in data:
        return {}
    return {"batch": f"{train['global_batch']} samples of up to {data['seq_len']:,} tokens"}


def _losses(rows: list[dict[str, Any]]) -> dict[str, str]:
    """First and last of what was logged."""
    found: dict[str, str] = {}
    for key, name in (("loss", "training loss"), ("val_loss", "held-out loss")):
        values = [row[key] for row in rows if key in row]
        if values:
            found[name] = f"{values[0]:.4f} at first, {values[-1]:.4f} at the end"
    return found


def _phrase(optim: Mapping[str, Any]) -> str:
    shown = [f"{k} {json.dumps(v)}" for k, v in optim.items() if k != "kind"]
    return f"{optim.get('kind', '?')}: {', '.join(shown)}"


def _names(data: Any) -> str:
    paths = data if isinstance(data, list) else [data]
    return ", ".join(Path(str(p)).name for p in paths)
