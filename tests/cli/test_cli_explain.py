"""`shardwise explain`: a table of units, their cost, and the reasons."""

from __future__ import annotations

import json

import pytest

from shardwise.cli import main
from shardwise.cli.explain import _span


def test_table(capsys) -> None:
    sizes = ["--model.dim", "512", "--model.layers", "2", "--train.micro_batch", "8"]
    assert main(["explain", *sizes, "--nproc", "4"]) == 0
    shown = capsys.readouterr().out
    for text in ("blocks.0-1 x 2", "(root)", "4 ranks", "unit auto", "A rank keeps"):
        assert text in shown


@pytest.mark.parametrize("width", ["80", "120", ""])
def test_equal_blocks_are_one_row_and_no_cell_is_cut(width, monkeypatch, capsys) -> None:
    monkeypatch.setenv("COLUMNS", width)
    unit = ["--shard.unit", "Block,Attention", "--model.layers", "32"]
    override = ["--shard.overrides", "blocks.7=zero2"]
    assert main(["explain", *unit, *override]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= int(width or 160) for line in lines)
    assert "…" not in "".join(lines)
    rows = [line.strip("│┃ ").split("  ")[0].split(" │")[0].split(" ┃")[0] for line in lines]
    wanted = [
        "unit",
        "blocks.0-6 x 7",
        "blocks.0-31.attention x 32",
        "blocks.7",
        "blocks.8-31 x 24",
    ]
    found = [row for row in rows if row in [*wanted, "(root)"]]
    assert found == [*wanted, "(root)"] * (2 if width == "80" else 1)


def test_blocks_that_share_a_unit_and_names_that_do_not_follow(capsys) -> None:
    assert main(["explain"]) == 0
    shown = capsys.readouterr().out
    assert "blocks.0-3 x 2" in shown  # two blocks in each unit
    assert _span(["a.0", "a.2"]) is None and _span(["a.0", "b.1"]) is None
    assert _span(["m.0.n.1", "m.0.n.2"]) == "m.0.n.1-2" and _span(["m.0.n"]) is None


def test_wires_with_their_error_and_their_bytes(capsys) -> None:
    wire = [
        "--shard.gather_wire",
        "int8",
        "--shard.reduce_wire",
        "bf16",
        "--shard.wire_block",
        "64",
    ]
    assert main(["explain", *wire]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "gather int8, reduce bf16" in shown and "transport auto: c10d" in shown
    assert "weights in use each at most 1/254 (0.4%) of the largest of its 64" in shown
    assert "gradients each at most 2^-8 (0.4%) of itself" in shown
    assert main(["explain"]) == 0
    assert "wire" not in capsys.readouterr().out
    received = {}
    for name in ("exact", "bf16", "int8"):
        both = ["--shard.gather_wire", name, "--shard.reduce_wire", name]
        assert main(["explain", *both, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        received[name] = found["received_bytes"]
        expected = "exact" if name == "exact" else f"gather {name}, reduce {name}"
        assert {unit["wire"] for unit in found["units"]} == {expected}
    assert received["bf16"] == pytest.approx(received["exact"] / 2, rel=0.01)
    assert received["int8"] == pytest.approx(received["exact"] * (1 + 4 / 128) / 4, rel=0.01)


def test_json(capsys) -> None:
    arguments = ["explain", "--model.dim", "512", "--model.layers", "2", "--json"]
    override = ["--shard.overrides", '["blocks.1=shard_grad_op:c10d"]']
    assert main([*arguments, *override]) == 0
    found = json.loads(capsys.readouterr().out)
    units = {unit["unit"]: unit for unit in found["units"]}
    assert (units["blocks.1"]["strategy"], units["blocks.1"]["transport"]) == (
        "shard_grad_op",
        "c10d",
    )
    assert units["blocks.0"]["strategy"] == "full_shard"
    assert units["blocks.0"]["collectives"] == units["blocks.1"]["collectives"] + 1
    assert found["kept_bytes"] == sum(unit["kept_bytes"] for unit in found["units"])


def test_what_is_kept_goes_by_the_optimizer(capsys) -> None:
    """Bytes a parameter: 4 of its own, 4 of the gradient, and the state."""
    for optim, each in (
        ({}, 16),
        ({"kind": "sgd"}, 8),
        ({"kind": "sgd", "momentum": "0.9"}, 12),
        ({"kind": "sgd", "momentum": "0.9", "state_dtype": "bf16"}, 10),
        ({"kind": "adam", "amsgrad": "true"}, 20),
    ):
        arguments = [word for key, value in optim.items() for word in (f"--optim.{key}", value)]
        assert main(["explain", *arguments, "--nproc", "1", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        numel = sum(unit["parameters"] for unit in found["units"])
        assert found["kept_bytes"] == pytest.approx(each * numel, rel=1e-3), optim  # alignment


def test_mistakes(capsys) -> None:
    for arguments, text in (
        (["--shard.overrides", '["nothing=full_shard"]'], "no unit has the name 'nothing'"),
        (["--shard.overrides", '["blocks.0"]'], "expected PATTERN=STRATEGY"),
        (["--shard.unit", "Blocks"], "nothing in Decoder has the class or name"),
        (["--shard.gather_limit", "much"], "'much' is no size"),
        (["--mesh.replicate", "3"], "3 replicas cannot share 2 ranks"),
        (["--optim.in_backward", "true"], "set train.grad_clip = 0"),
    ):
        assert main(["explain", *arguments]) == 2
        error = capsys.readouterr().err
        assert text in error and error.count("\n") == 1
