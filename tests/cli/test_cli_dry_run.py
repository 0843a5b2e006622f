"""`shardwise plan --dry-run`: the engine plays rank 0 of many ranks in one process, and a plan of a
large model is made in little memory. Processes of their own: the fake group is a default group, and
memory is that of a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import dry_run as module
from shardwise.cli import main

SMALL = ("--model.dim=64", "--model.layers=4", "--model.vocab_size=640", "--data.seq_len=32",
         "--train.micro_batch=1")  # fmt: skip
_PLAN = """
import json, resource, sys
from shardwise.cli import main
code = main(["plan", *sys.argv[1:], "--json"])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print("\\n" + json.dumps({"code": code, "peak": peak}))
"""


def planned(*arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", _PLAN, *arguments],
        capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *_, found, _, process = done.stdout.splitlines()
    return json.loads(found), json.loads(process)


def check(ranks: int, *arguments: str) -> dict[str, Any]:
    found, process = planned("--dry-run", "--gpus", str(ranks), *SMALL, *arguments)
    assert process["code"] == 0 and found["is_equal"] and found["ranks"] == ranks
    kinds = {"parameters", "gradients", "optimizer", "gathered", "received"}
    assert set(found["bytes"]) == kinds
    for kind, size in found["bytes"].items():
        assert size["planned"] == size["counted"], kind
    return found["bytes"]


@pytest.mark.slow
def test_1024_ranks() -> None:
    sizes = check(1024, "--train.global_batch=1024", "--shard.strategy=full_shard")
    whole = 4 * 295_000  # bytes of all parameters, about
    assert 0.6 * whole < sizes["gathered"]["counted"] < 1.4 * whole
    # Rank 0 has a row of each matrix, where others have none.
    assert sizes["parameters"]["counted"] < whole / 64
    assert sizes["optimizer"]["counted"] == 2 * sizes["parameters"]["counted"]
    assert sizes["received"]["counted"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("--train.global_batch=128", "--shard.strategy=shard_optimizer"),
        ("--train.global_batch=64", "--shard.activation_checkpointing=full",
         "--shard.param_dtype=bfloat16"),
        ("--train.global_batch=64", "--mesh.replicate=8", "--shard.strategy=hybrid_shard"),
    ],
    ids=["deferred", "recomputed bf16", "hybrid"],
)  # fmt: skip
def test_64_ranks(arguments: tuple[str, ...]) -> None:
    check(64, *arguments)


def test_a_difference_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the kind is named."""

    def other(*_: Any) -> list[module.Compared]:
        return [module.Compared("parameters", 8, 8), module.Compared("gathered", 12, 16)]

    monkeypatch.setattr(module, "dry_run", other)
    arguments = ("plan", "--dry-run", "--gpus", "4", *SMALL, "--train.global_batch=4")
    assert main(arguments) == 1
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "DIFFERS" in line]
    assert len(lines) == 1 and "gathered" in lines[0] and "The plan differs" in said
    assert main([*arguments, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["is_equal"] is False


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--params", "1e9"), "needs a job"),
        (("--gpus", "4096", "--train.global_batch=32768"), "expected 2 to 1024 devices"),
        (("--gpus", "2", "--model.dim=65536", "--model.layers=64"), "a rank needs"),
        (("--gpus", "4", "--mesh.tensor=2"), "needs its own ranks"),
        (("--gpus", "2", "--data.source=mine:samples"), "data.source is a function"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--dry-run", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plan_of_70_billion_parameters_takes_little_memory(tmp_path: Path) -> None:
    """The shape of Llama 3 70B on 512 devices: nothing of its size is ever allocated."""
    pytest.importorskip("transformers")
    sizes = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8192,
        "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(sizes))
    found, process = planned(
        str(path), "--gpus", "512xh100", "--data.seq_len=4096", "--train.micro_batch=1",
        "--train.global_batch=512", "--shard.param_dtype=bfloat16",
    )  # fmt: skip
    assert process["peak"] < 4 * 2**30
    whole = next(row for row in found["rows"] if row["strategy"] == "no_shard")
    assert whole["parameter_bytes"] == pytest.approx(4 * 70.55e9, rel=0.01)
    assert found["recommended"]["strategy"] == "full_shard" or found["recommended"] is None
