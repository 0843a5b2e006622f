"""`shardwise plan`: what fits which devices, and which strategy to take."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardwise import fully_shard
from shardwise.cli import main
from shardwise.plan.hardware import DEVICES, memory_of, parse_gpus

GB = 10**9


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def of(found: dict[str, Any], strategy: str, recompute: str = "none") -> dict[str, Any]:
    wanted = (strategy, recompute, "none", "exact")
    keys = ("strategy", "recompute", "offload", "wire")
    (row,) = [r for r in found["rows"] if tuple(r[key] for key in keys) == wanted]
    return row


@pytest.mark.parametrize(
    ("dtype", "kept"), [("fp32", (56, 56, 112)), ("bf16", (28, 28, 56))], ids=["fp32", "bf16"]
)
def test_textbook_figures(capsys, dtype: str, kept: tuple[int, int, int]) -> None:
    """14 billion parameters; bf16 ones with fp32 master weights and moments are the same sum."""
    found = planned(capsys, "--params", "14e9", "--gpus", "1x80GB", "--dtype", dtype)
    row = of(found, "no_shard")
    kinds = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    assert [row[kind] for kind in kinds] == [size * GB for size in kept]
    many = of(
        planned(capsys, "--params", "14e9", "--gpus", "64xh100", "--dtype", dtype), "full_shard"
    )
    assert sum(many[kind] for kind in kinds) == pytest.approx(sum(kept) * GB / 64, rel=1e-6)
    if dtype == "fp32":
        assert sum(kept) == 28 + 28 + 168 == 224  # 3.5 GB for each of 64


def test_what_is_recommended(capsys) -> None:
    """The least traffic that fits: everything on each device while there is room, shards later."""
    names = [
        planned(capsys, "--params", params, "--gpus", gpus)["recommended"]
        for params, gpus in (("0.5e9", "2x24GB"), ("8e9", "8xh100"), ("70e9", "512xh100"))
    ]
    assert [row["strategy"] for row in names] == [
        "shard_optimizer",
        "shard_optimizer",
        "full_shard",
    ]
    found = planned(capsys, "--params", "70e9", "--gpus", "8x24GB")
    assert found["recommended"] is None and not any(row["fits"] for row in found["rows"])
    hybrid = of(planned(capsys, "--params", "70e9", "--gpus", "512xh100"), "hybrid_shard")
    assert hybrid["parameter_bytes"] == pytest.approx(4 * 70e9 / 8, rel=1e-6)


def test_of_a_job(capsys) -> None:
    sizes = ["--model.dim=512", "--model.layers=6", "--shard.unit=Block", "--train.micro_batch=2"]
    found = planned(capsys, *sizes, "--gpus", "2x4GB")
    assert len(found["rows"]) == 4 * 3 * 3  # strategies, recomputation, what is on the host
    for row in found["rows"]:
        assert row["peak_bytes"] == sum(row["at_peak"].values())
        assert all(row["peak_bytes"] >= row[f"{kind}_bytes"] for kind in ("activation", "buffer"))
        assert row["peak_moment"] in ("forward", "loss", "backward of the loss", "backward")
        assert (row["host_bytes"] > 0) == (row["offload"] != "none")
    beaten = [r for r in found["rows"] if r["is_beaten"]]
    assert 0 < len(beaten) < len(found["rows"])
    assert not found["recommended"].get("is_beaten")
    kept, again = of(found, "full_shard"), of(found, "full_shard", "full")
    assert again["activation_bytes"] < kept["activation_bytes"] / 2
    assert again["comm_bytes"] == kept["comm_bytes"]
    assert main(["explain", *sizes, "--shard.strategy=full_shard", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    parts = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
    assert sum(kept[part] for part in parts) == explained["kept_bytes"]
    assert kept["comm_bytes"] == explained["received_bytes"]
    whole = ["--train.global_batch=4", "--gpus=2x4GB"]
    many = ["--train.global_batch=32", "--gpus=2x4GB"]
    one, more = (of(planned(capsys, *sizes, *w), "shard_optimizer") for w in (whole, many))
    assert more["buffer_bytes"] > one["buffer_bytes"], "whole gradients until the last micro-batch"


def test_when_nothing_fits_the_smallest_change_is_named(capsys) -> None:
    sizes = ["--model.dim=512", "--model.layers=4"]
    assert main(["plan", "--gpus", "2x100MB", *sizes]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Nothing fits; no_shard with recomputation (full) and parameters in host memory" in said
    assert "What would fit: train.micro_batch = 1 and shard.param_dtype = 'bfloat16' and" in said


@on_ranks(2)
def test_moments_have_the_dtype_of_their_parameters(world: int) -> None:
    """What the plan counts is what torch allocates."""
    from shardwise.layout import MixedPrecisionPolicy
    from shardwise.plan.model import plan_model

    for dtype in (torch.float32, torch.bfloat16):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(dtype)
        plan = plan_model(
            model, [["0"], ["1"]], strategy="full_shard", policy=MixedPrecisionPolicy(), world=world
        )
        for part in (*model, model):
            fully_shard(part)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 64, dtype=dtype)).float().sum().backward()
        optimizer.step()
        moments = [
            value.to_local().nbytes
            for state in optimizer.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        assert sum(moments) == sum(unit.state_bytes for unit in plan.units)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--gpus", "0"], "--gpus: '0': expected a number of devices"),
        (["--gpus", "2x24"], "--gpus: '24': no size, and no device of 3090"),
        (["--gpus", "2xh999"], "no device of 3090"),
        (["--gpus"], "--gpus: needs a value"),
        (["--params", "many"], "--params: 'many': expected a number from 1"),
        (["--params", "1e9", "job.toml"], "job.toml: --params stands for the model"),
        (["--params", "10", "--units", "32"], "--units: 32 units of 10 parameters"),
        (["--params", "1e9", "--dtype", "int8"], "--dtype: there are float32 and bfloat16"),
        (["--units", "4"], "--units: goes with --params alone"),
        (["nowhere"], "nowhere: neither a configuration (.toml) nor a model's directory"),
        (["--nproc", "4"], "--nproc: say --gpus N"),
        (["--gpu", "4"], "did you mean --gpus"),
        (["--train.global_batch=3", "--gpus=2x1GB"], "train.global_batch"),
    ],
)
def test_mistakes(capsys, arguments: list[str], text: str) -> None:
    assert main(["plan", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.startswith("shardwise plan: ") and text in said and said.count("\n") == 1


def test_devices() -> None:
    assert parse_gpus("8") == (8, None) and parse_gpus("2x24GB") == (2, 24 * GB)
    assert parse_gpus("64xH100") == (64, 80 * GB) and parse_gpus("1x4090") == (1, 24 * GB)
    assert all(memory_of(name) >= 24 * GB for name in DEVICES)


def test_groupings_are_compared(capsys) -> None:
    """Larger units gather more at a time; all of them are of one model."""
    sizes = ["--model.dim", "256", "--model.layers", "8", "--gpus", "8xh100", "--json"]
    assert main(["plan", *sizes, "--groupings", "Attention, Block,64MiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = {(r["unit"], r["strategy"], r["recompute"], r["offload"]): r for r in found["rows"]}
    assert {unit for unit, *_ in rows} == {"Attention", "Block", "64MiB"}
    full = [rows[unit, "full_shard", "none", "none"] for unit in ("Block", "64MiB")]
    assert full[0]["gathered_bytes"] < full[1]["gathered_bytes"]
    assert len({row["parameter_bytes"] for row in full}) == 1
    assert main(["plan", *sizes[:-1], "--groupings", "auto,Block"]) == 0
    assert "shard.unit = " in capsys.readouterr().out
    for arguments, text in (
        (["--params", "1e9", "--groupings", "auto"], "goes with a job"),
        (["--groupings", "auto,,Block"], "names values of shard.unit"),
        (["--groupings", "auto", "--shard.unit", "Block"], "names values of shard.unit"),
        (["--groupings", "auto,Nope"], "no name 'Nope'|class or name 'Nope'"),
    ):
        assert main(["plan", "--gpus", "2x24GB", *arguments]) == 2
        assert re.search(text, capsys.readouterr().err)
