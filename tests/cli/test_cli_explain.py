"""`shardwise explain`: a table of units, their cost, and the reasons."""

from __future__ import annotations

import json

from shardwise.cli import main


def test_table(capsys) -> None:
    sizes = ["--model.dim", "512", "--model.layers", "2", "--train.micro_batch", "8"]
    assert main(["explain", *sizes, "--nproc", "4"]) == 0
    shown = capsys.readouterr().out
    for text in ("blocks.0", "blocks.1", "(root)", "4 rank(s)", "unit auto", "A rank keeps"):
        assert text in shown


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
