"""`shardwise explain`: a table of units, their cost, and the reasons."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from shardwise.cli import main
from shardwise.cli.explain import _span
from shardwise.cli.picture import spans
from shardwise.events import Event
from shardwise.train.config import SECTIONS
from shardwise.units import text_of_bytes


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


def test_the_schedule_of_a_step(capsys) -> None:
    """The events are compared with recorded ones in tests/plan/test_plan_walk.py."""
    sizes = ["--model.layers", "2", "--shard.unit", "Block", "--run.device", "cpu"]
    assert main(["explain", *sizes, "--schedule", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    text = " | ".join(f"{e['code']} {e['unit'].replace('blocks.', 'L')}" for e in found["events"])
    assert text.startswith("F (root) | AG (root) | F L0 | AG L0 | FR L0 | F L1 | AG L1 | FR L1")
    assert "B L1 | AG L1 | RS L1 | FR L1 | B L0" in text
    assert main(["explain", *sizes, "--schedule"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split() for line in shown[1:3]] == [["F", "(root)"], ["AG", "(root)"]]
    assert f"in the {found['peak']['moment']} of {found['peak']['unit']}" in shown[-1]


def test_a_step_as_a_picture(tmp_path, capsys) -> None:
    sizes = ["--model.layers", "2", "--shard.unit", "Block", "--run.device", "cpu", "--schedule"]
    path = tmp_path / "pictures" / "step.svg"
    assert main(["explain", *sizes, "--picture", str(path)]) == 0
    drawn = path.read_text()
    assert drawn.startswith("<?xml") and drawn.count("<path") > 50
    capsys.readouterr()
    for arguments, text in (
        (["--picture", "step.svg"], "needs --schedule too"),
        (["--schedule", "--picture"], "--picture: needs a value"),
        (["--schedule", "--picture", "step.txt"], "step.txt is no .svg"),
        (["--schedule", "--picture", "/proc/x/step.svg"], "cannot be written: No such file"),
    ):
        assert main(["explain", *arguments]) == 2
        assert text in capsys.readouterr().err


def test_spans_of_a_picture() -> None:
    log = [("AG", "a"), ("F", "a"), ("AG", "b"), ("FR", "a"), ("AG", "a"), ("FR", "b")]
    events = [Event(code, unit) for code, unit in log]
    assert spans(events, "AG", "FR") == [("a", 0, 3), ("b", 2, 5), ("a", 4, 6)]
    assert spans(events, "RS", "G") == []


def said_of(capsys, *arguments: str) -> str:
    assert main(["explain", *arguments]) == 0
    return capsys.readouterr().out


def test_why_a_key_has_its_value(tmp_path, capsys) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[train]\nsteps = 3\n\n[shard]\nparam_dtype = "bfloat16"\n')
    keys = ["train.steps", "shard.param_dtype", "shard.strategy", "lora.alpha", "optim.lr"]
    said = said_of(capsys, str(job), "--optim.lr", "0.1", *(f"--why={key}" for key in keys))
    about = dict(zip(keys, _parts(said, keys), strict=True))
    assert f"train.steps = 3   ({job}:2)" in about["train.steps"]
    assert "beside 120, the default, a rank keeps, gathers and receives" in about["train.steps"]
    assert 'beside "float32", the default: gathered' in about["shard.param_dtype"]
    assert "strategy full_shard: auto: by mesh.replicate" in about["shard.strategy"]
    assert about["shard.strategy"].endswith("the default\n")
    assert "no effect: lora.rank is 0" in about["lora.alpha"]
    assert "optim.lr = 0.1   (--optim.lr)" in about["optim.lr"]


def _parts(said: str, keys: list[str]) -> list[str]:
    starts = [said.index(f"{key} = ") for key in keys]
    return [said[a:b] for a, b in zip(starts, [*starts[1:], len(said)], strict=True)]


def test_what_a_key_changes_is_what_the_plans_say(capsys) -> None:
    """The same numbers as two calls without --why."""
    ways = {}
    for strategy in ("auto", "no_shard"):
        ways[strategy] = json.loads(said_of(capsys, "--json", "--shard.strategy", strategy))
    said = said_of(capsys, "--shard.strategy", "no_shard", "--why", "shard.strategy")
    assert ways["auto"]["kept_bytes"] < ways["no_shard"]["kept_bytes"]
    kept = [text_of_bytes(ways[w]["kept_bytes"]) for w in ("no_shard", "auto")]
    assert f"kept {kept[0]} instead of {kept[1]}" in said
    assert "strategy no_shard instead of full_shard" in said


def test_a_default_that_does_not_go(capsys) -> None:
    nvme = ["--offload.optimizer", "nvme", "--offload.directory", "x"]
    said = said_of(capsys, *nvme, "--why", "offload.directory")
    assert 'with "", the default, the rest does not go: offload.directory' in said


def test_the_effective_configuration(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    job = tmp_path / "job.toml"
    job.write_text("[train]\nmicro_batch = 4\n")
    rows = json.loads(said_of(capsys, str(job), "--config", "--json", "--optim.kind", "sgd"))
    found = {row["key"]: row for row in rows}
    assert found["train.micro_batch"] == {
        "key": "train.micro_batch",
        "value": 4,
        "source": f"{job}:2",
        "no_effect": "",
    }
    assert found["optim.kind"]["source"] == "--optim.kind"
    assert found["optim.betas"]["no_effect"] == "optim.kind is 'sgd', which has none"
    assert found["train.steps"]["source"] == "default"
    known = {f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in fields(cls)}
    assert known - set(found) == set(), "every key is there"
    shown = said_of(capsys, str(job), "--config")
    assert "no effect, because" in shown and f"{job}:2" in shown


def test_every_key_says_why(capsys) -> None:
    """Its value and where that comes from; one without effect says what makes it so."""
    known = [f"{s}.{f.name}" for s, cls in SECTIONS.items() for f in fields(cls)]
    said = json.loads(said_of(capsys, *(w for key in known for w in ("--why", key)), "--json"))
    assert list(said) == known
    without = {
        row["key"] for row in json.loads(said_of(capsys, "--config", "--json")) if row["no_effect"]
    }
    assert without
    for key, lines in said.items():
        assert lines[0].startswith(f"{key} = ") and "default" in lines[0], key
        assert ("no effect" in " ".join(lines)) == (key in without), key


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--why", "shard.strategi"], "--why shard.strategi: no such key; did you mean shard.st"),
        (["--why"], "--why: needs a value"),
        (["--wy", "x"], "--wy"),
    ],
)
def test_mistakes_of_keys(arguments: list[str], text: str, capsys) -> None:
    assert main(["explain", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([], "kept in float32, gathered in float32, reduced in float32"),
        (["--shard.param_dtype", "bfloat16"], "kept in float32, gathered in bfloat16"),
        ([], "optimizer adamw: its state is each rank's, for its shards"),
        (["--shard.strategy", "no_shard"], "its state is every rank's, for the whole model"),
        (["--optim.kind", "muon"], "optimizer muon: its state is a matrix' owner's"),
        (["--offload.optimizer", "cpu"], "for its shards, in host memory"),
        (["--offload.parameters", "cpu"], "in host memory with the shards"),
        (
            ["--offload.optimizer", "nvme", "--offload.directory", "/disk"],
            "for its shards, in files below /disk",
        ),
    ],
)
def test_in_which_dtypes_and_whose(keys: list[str], said: str, capsys) -> None:
    assert said in " ".join(said_of(capsys, *keys).split())
