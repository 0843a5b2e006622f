"""Configurations of others, each with every key accounted for, and what is written loads.

`configs/README.md` names the page of documentation that each follows. Golden tables are in
`golden/`; SHARDWISE_GOLDEN=1 writes them anew.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shardwise.cli import main
from shardwise.errors import ConfigError
from shardwise.importing.files import read_document
from shardwise.importing.formats import _KEYS, import_file
from shardwise.importing.result import as_json, as_toml
from shardwise.train.config_file import load_config

HERE = Path(__file__).parent
CONFIGS = sorted(p for p in (HERE / "configs").iterdir() if p.suffix in (".json", ".yaml"))
GOLDEN = ("ds_warmup_decay.json", "accelerate_fsdp2.yaml", "trainer_fsdp.json")
MISSPELT = {"ds_all_sections.json": 1, "trainer_ddp.json": 1}  # unknown keys, on purpose


def leaves(table: dict[str, Any]) -> Iterator[Any]:
    """Counted here in a way of its own."""
    for value in table.values():
        if isinstance(value, dict) and value:
            yield from leaves(value)
        else:
            yield value


def named_files(path: Path) -> list[Path]:
    """A configuration, and those that it names."""
    text = path.read_text()
    return [path, *(p for p in CONFIGS if p != path and f" {p.name}\n" in text)]


def test_there_are_enough() -> None:
    assert len(CONFIGS) >= 20
    listed = (HERE / "configs" / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in CONFIGS)


@pytest.mark.parametrize("ranks", [None, 16])
@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_every_key_is_accounted_for(path: Path, ranks: int | None, tmp_path: Path) -> None:
    found = import_file(path)
    if found.ranks is None:  # the file does not say
        found = import_file(path, ranks)
    wanted = [leaf for file in named_files(path) for leaf in leaves(read_document(file))]
    assert len(found.rows) == len(wanted)
    assert [row.value for row in found.rows] == wanted
    assert len({row.key for row in found.rows}) == len(found.rows)
    for row in found.rows:
        assert row.note or row.outcome == "translated", row
        assert bool(row.ours) == (row.outcome == "translated"), row
    unknown = [row.key for row in found.rows if row.outcome == "unknown"]
    assert len(unknown) == MISSPELT.get(path.name, 0), unknown
    target = tmp_path / "job.toml"
    target.write_text(as_toml(found))
    loaded = load_config(target)
    assert set(loaded.origins) == set(found.settings)
    json.dumps(as_json(found), allow_nan=False)


@pytest.mark.parametrize("name", GOLDEN)
def test_golden(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(HERE / "configs")
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["import-config", name]) == 0
    shown = capsys.readouterr().out
    golden = HERE / "golden" / f"{name}.txt"
    if os.environ.get("SHARDWISE_GOLDEN"):
        golden.write_text(shown)
    assert shown == golden.read_text()


def test_a_narrow_console_shows_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    path = HERE / "configs" / "ds_mics.json"
    assert main(["import-config", str(path)]) == 0
    shown = capsys.readouterr().out
    for row in import_file(path).rows:
        assert f"{row.key} = " in shown
    assert "mesh.replicate = 4, mesh.shard = 4" in " ".join(shown.split())


def settings_of(tmp_path: Path, content: dict[str, Any], ranks: int | None = None, **more: Any):
    path = tmp_path / "file.json"
    path.write_text(json.dumps(content))
    found = import_file(path, ranks, **more)
    return {key: setting.value for key, setting in found.settings.items()}, found


# -- meaning: what maps to what -------------------------------------------------------------------
@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({"stage": 0}, {"shard.strategy": "no_shard"}),
        ({}, {"shard.strategy": "no_shard"}),
        ({"stage": 1}, {"shard.strategy": "shard_optimizer"}),
        ({"stage": 2}, {"shard.strategy": "shard_grad_op"}),
        ({"stage": 3}, {"shard.strategy": "full_shard"}),
        ({"stage": "3"}, {"shard.strategy": "full_shard"}),
        (
            {"stage": 3, "mics_shard_size": 4},
            {"shard.strategy": "hybrid_shard", "mesh.replicate": 2, "mesh.shard": 4},
        ),
        (
            {"stage": 3, "zero_hpz_partition_size": 2},
            {"shard.strategy": "hybrid_full_optimizer", "mesh.replicate": 4, "mesh.shard": 2},
        ),
        ({"stage": 3, "zero_hpz_partition_size": 8}, {"shard.strategy": "full_shard"}),
        ({"stage": 3, "mics_shard_size": 3}, {"shard.strategy": "full_shard"}),  # of 8 ranks
    ],
)
def test_stages(zero: dict[str, Any], expected: dict[str, Any], tmp_path: Path) -> None:
    found, _ = settings_of(tmp_path, {"zero_optimization": zero, "gradient_clipping": 1}, 8)
    assert {k: v for k, v in found.items() if k.startswith(("shard.", "mesh."))} == expected


@pytest.mark.parametrize(
    ("precision", "param", "reduce"),
    [
        ({}, None, None),
        ({"bf16": {"enabled": True}}, "bfloat16", "bfloat16"),
        ({"bfloat16": {"enabled": True}}, "bfloat16", "bfloat16"),
        ({"bf16": {"enabled": False}}, None, None),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, "bfloat16", "float32"),
        (
            {
                "bf16": {"enabled": True},
                "communication_data_type": "bf16",
                "data_types": {"grad_accum_dtype": "fp32"},
            },
            "bfloat16",
            "float32",
        ),
        ({"fp16": {"enabled": True}}, None, None),
    ],
)
def test_dtypes(precision: Any, param: str, reduce: str, tmp_path: Path) -> None:
    found, imported = settings_of(tmp_path, {"zero_optimization": {"stage": 2}, **precision})
    assert found.get("shard.param_dtype") == param
    assert found.get("shard.reduce_dtype") == reduce
    assert not imported.warnings[1:]  # no optimizer in the file


@pytest.mark.parametrize(
    ("batches", "ranks", "expected"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}, None, (64, 4, None)),
        ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, 8, (64, 4, 8)),
        ({"train_batch_size": 64}, 8, (64, 8, 8)),
        ({"train_micro_batch_size_per_gpu": 4}, 8, (32, 4, 8)),
        (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2},
            8,
            (64, 4, 8),
        ),
        (
            {
                "train_batch_size": 64,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            None,
            (64, 4, 8),
        ),
    ],
)
def test_batches(batches: Any, ranks: int | None, expected: tuple, tmp_path: Path) -> None:
    found, imported = settings_of(tmp_path, {"zero_optimization": {"stage": 2}, **batches}, ranks)
    global_batch, micro_batch = found["train.global_batch"], found["train.micro_batch"]
    assert (global_batch, micro_batch, imported.ranks) == expected


def test_optimizer_and_schedule(tmp_path: Path) -> None:
    adam = {"type": "Adam", "params": {"lr": 1e-3, "weight_decay": 0.1}}
    found, _ = settings_of(tmp_path, {"train_batch_size": 8, "optimizer": adam})
    assert found["optim.kind"] == "adamw"  # adam_w_mode is DeepSpeed's default
    assert found["optim.betas"] == [0.9, 0.999]
    assert found["optim.no_decay"] == []
    assert found["optim.schedule"] == "constant"
    assert found["train.grad_clip"] == 0.0
    plain = {"type": "Adam", "params": {"adam_w_mode": False}}
    assert settings_of(tmp_path, {"train_batch_size": 8, "optimizer": plain})[0]["optim.kind"] == (
        "adam"
    )
    schedule = {"type": "WarmupLR", "params": {"warmup_max_lr": 5e-4, "warmup_type": "linear"}}
    found, imported = settings_of(
        tmp_path, {"train_batch_size": 8, "optimizer": adam, "scheduler": schedule}
    )
    assert found["optim.lr"] == 5e-4
    assert found["optim.warmup_steps"] == 1000
    assert any("optimizer.params.lr" in w and "warmup_max_lr" in w for w in imported.warnings)


@pytest.mark.parametrize(
    ("fsdp", "hosts", "expected"),
    [
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, 1, ("full_shard", None)),
        ({"fsdp_sharding_strategy": 1}, 1, ("full_shard", None)),
        ({"fsdp_sharding_strategy": "2"}, 1, ("shard_grad_op", None)),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, 1, ("no_shard", None)),
        ({"fsdp_sharding_strategy": 4}, 2, ("hybrid_shard", 2)),
        ({"fsdp_sharding_strategy": "_HYBRID_SHARD_ZERO2"}, 4, ("hybrid_shard", 4)),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, 1, ("full_shard", None)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, 1, ("shard_grad_op", None)),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": "true"}, 1, ("full_shard", None)),
        ({"version": 2, "reshard_after_forward": True}, 1, ("full_shard", None)),
        ({"fsdp_version": 2}, 1, ("full_shard", None)),
    ],
)
def test_strategies_of_fsdp(fsdp: Any, hosts: int, expected: tuple, tmp_path: Path) -> None:
    content = {
        "distributed_type": "FSDP",
        "fsdp_config": fsdp,
        "num_machines": hosts,
        "num_processes": 8,
    }
    found, _ = settings_of(tmp_path, content)
    assert (found["shard.strategy"], found.get("mesh.replicate")) == expected


def test_tensor_axes(tmp_path: Path) -> None:
    """Of both, and what a job refuses beside it."""
    axes = {"parallelism_config_tp_size": 2, "parallelism_config_dp_shard_size": 4}
    content = {"distributed_type": "FSDP", "parallelism_config": axes, "num_processes": 8}
    settings, _ = settings_of(tmp_path, content)
    assert settings["mesh.tensor"] == 2 and settings["mesh.shard"] == 4
    settings, _ = settings_of(
        tmp_path, {"tensor_parallel": {"autotp_size": 4}, "zero_optimization": {"stage": 1}}
    )
    assert settings["mesh.tensor"] == 4
    settings, found = settings_of(tmp_path, {"tensor_parallel": {"autotp_size": 1}})
    assert "mesh.tensor" not in settings and not [r for r in found.rows if r.outcome == "unknown"]


def test_units(tmp_path: Path) -> None:
    def unit(**fsdp: Any) -> Any:
        content = {"distributed_type": "FSDP", "fsdp_config": fsdp, "num_processes": 2}
        return settings_of(tmp_path, content)[0].get("shard.unit")

    names = "fsdp_transformer_layer_cls_to_wrap"
    wrap = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    assert unit(**wrap) is None
    assert unit(**wrap, **{names: "A, B"}) == ["A", "B"]
    assert unit(**wrap, **{names: ["A"]}) == ["A"]
    size = {"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP", "fsdp_min_num_params": 1000}
    assert unit(**size) == 4000
    assert unit(fsdp_auto_wrap_policy="NO_WRAP") == []


# -- beside the other programs themselves ---------------------------------------------------------
def test_every_argument_of_the_trainer_is_known(tmp_path: Path) -> None:
    """All of them, as the installed transformers writes them."""
    from transformers import TrainingArguments

    arguments = TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True)
    path = tmp_path / "arguments.json"
    path.write_text(arguments.to_json_string())
    found = import_file(path)
    assert len(found.rows) > 90
    assert [row for row in found.rows if row.outcome == "unknown"] == []
    refused = {row.key for row in found.rows if row.outcome == "unsupported"}
    assert refused == {"num_train_epochs", "gradient_accumulation_steps"}  # the defaults


def test_every_key_of_accelerate_is_known(tmp_path: Path) -> None:
    """All fields of its file, and all options of FSDP that its launcher takes."""
    from dataclasses import fields

    from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
    from accelerate.commands.launch import launch_command_parser

    keys = {field.name for cls in (ClusterConfig, SageMakerConfig) for field in fields(cls)}
    assert keys <= _KEYS["accelerate"]
    options = {action.dest for action in launch_command_parser()._actions}
    fsdp = {name for name in options if name.startswith("fsdp_")}
    assert len(fsdp) > 12
    assert fsdp <= _KEYS["fsdp"]


@pytest.mark.parametrize(
    ("name", "own"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("warmup_stable_decay", {"num_decay_steps": 30, "decay_type": "linear"}),
    ],
)
def test_rates_are_those_of_the_trainer_one_step_later(name: str, own: Any, tmp_path: Path) -> None:
    import torch
    from transformers import get_scheduler

    from shardwise.train.schedule import learning_rate

    steps, warmup, rate = 100, 10, 1e-3
    content = {
        "output_dir": "out",
        "max_steps": steps,
        "warmup_steps": warmup,
        "learning_rate": rate,
        "lr_scheduler_type": name,
        "lr_scheduler_kwargs": own,
    }
    _, found = settings_of(tmp_path, content)
    (tmp_path / "job.toml").write_text(as_toml(found))
    config = load_config(tmp_path / "job.toml").config
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    theirs = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=own or None)
    for step in range(1, steps + 1):
        optimizer.step()
        theirs.step()
        assert learning_rate(config, step) == pytest.approx(theirs.get_last_lr()[0], abs=1e-12)


def test_rates_are_those_of_deepspeed_one_step_later(tmp_path: Path) -> None:
    """WarmupDecayLR by its formula: up a line, down a line."""
    from shardwise.train.schedule import learning_rate

    steps, warmup, rate = 80, 20, 2e-4
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": rate}},
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "total_num_steps": steps,
                "warmup_num_steps": warmup,
                "warmup_max_lr": rate,
                "warmup_type": "linear",
            },
        },
    }
    _, found = settings_of(tmp_path, content)
    (tmp_path / "job.toml").write_text(as_toml(found))
    config = load_config(tmp_path / "job.toml").config
    for step in range(1, steps + 1):
        up, down = step / warmup, (steps - step) / (steps - warmup)
        assert learning_rate(config, step) == pytest.approx(rate * min(up, down), abs=1e-12)


# -- contradictions -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("content", "ranks", "words"),
    [
        (
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}, "train_batch_size": 8},
            None,
            "fp16.enabled and bf16.enabled",
        ),
        (
            {
                "train_batch_size": 30,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            None,
            "train_batch_size = 30 is no multiple of train_micro_batch_size_per_gpu = 4 x",
        ),
        (
            {
                "train_batch_size": 32,
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": 2,
            },
            8,
            "4 x gradient_accumulation_steps = 2 x 8 ranks = 64; correct one of them",
        ),
        ({"zero_optimization": {"stage": 5}}, None, "5 is no stage"),
        ({"train_batch_size": -8}, None, "train_batch_size: -8 is not above 0"),
        ({"train_batch_size": 10}, 4, "train_batch_size: 10 is not a multiple of 4 ranks"),
    ],
)
def test_contradictions(content: Any, ranks: int | None, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(tmp_path, content, ranks)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_warnings_name_both_keys(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_param": {"device": "cpu"}}
    _, found = settings_of(tmp_path, {"zero_optimization": zero})
    assert any(
        "offload_param.device" in w and "zero_optimization.stage" in w for w in found.warnings
    )
    clip = {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 2}}, "gradient_clipping": 1}
    _, found = settings_of(tmp_path, {"zero_optimization": {"stage": 2}, **clip})
    assert any("gradient_clipping" in w and "max_grad_norm" in w for w in found.warnings)


def test_what_train_refuses_is_unsupported_with_its_reason(tmp_path: Path) -> None:
    content = {"zero_optimization": {"stage": 2}, "gradient_clipping": -1, "steps_per_print": 0}
    found, imported = settings_of(tmp_path, content)
    rows = {row.key: row for row in imported.rows}
    assert rows["gradient_clipping"].outcome == "unsupported"
    assert "is below 0" in rows["gradient_clipping"].note
    assert rows["steps_per_print"].outcome == "unsupported"
    assert "log.every" not in found


# -- files that are none --------------------------------------------------------------------------
BAD = {
    "broken.json": (b'{"a": 1,', "not valid JSON"),
    "comment.json": (b'{"train_batch_size": 1 // one\n}', "comments are no part of JSON"),
    "twice.json": (b'{"fp16": {"enabled": true, "enabled": false}}', '"enabled" stands twice'),
    "twice.yaml": (b"num_processes: 1\nnum_processes: 2\n", 'line 2: the key "num_processes"'),
    "list.json": (b"[1, 2]", "holds a list; expected a table"),
    "list.yaml": (b"- 1\n- 2\n", "holds a list; expected a table"),
    "text.yaml": (b"hello", "holds text; expected a table"),
    "number.json": (b"3", "holds a single value"),
    "binary.json": (bytes(range(256)), "is not text in UTF-8"),
    "zeros.yaml": (b"\0" * 64, "not valid YAML"),
    "empty.json": (b"", "is empty"),
    "blank.yaml": (b" \n\n", "is empty"),
    "nothing.json": (b"{}", "it holds no keys"),
    "huge.json": (b'{"a": "' + b"x" * 2**20 + b'"}', "is no configuration"),
    "deep.json": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "deep"),
    "deep.yaml": (b"[" * 5000 + b"]" * 5000, "deep"),
    "digits.json": (b'{"train_batch_size": ' + b"9" * 5000 + b"}", "thousands of digits"),
    "laughs.yaml": (b"a: &a [x, x]\nb: [*a, *a]\n", "anchors and aliases"),
    "object.yaml": (b"distributed_type: !!python/object/apply:os.getcwd []\n", "not valid YAML"),
    "two.yaml": (b"a: 1\n---\nb: 2\n", "not valid YAML"),
    "tabs.yaml": (b"a:\n\t- b\n", "not valid YAML"),
    "date.yaml": (b"distributed_type: 2024-13-45\n", "not valid YAML"),
    "unknown.json": (b'{"colour": "red"}', 'none of its keys ("colour") is known'),
    "either.json": (b'{"gradient_accumulation_steps": 2}', "may be of deepspeed or trainer"),
    "lines.json": (b'{"a\\nb\\u001b[31m": 1}', "is known"),
    "sagemaker.yaml": (b"compute_environment: AMAZON_SAGEMAKER\n", "AMAZON_SAGEMAKER"),
    "missing.yaml": (
        b"distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: none.json\n",
        "none.json: no such file",
    ),
    "legacy.json": (b'{"output_dir": "x", "fsdp": "full_shart"}', '"full_shart" is none of'),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    content, words = BAD[name]
    path, target = tmp_path / name, tmp_path / "job.toml"
    path.write_bytes(content)
    assert main(["import-config", str(path), "--write", str(target)]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert shown.err[:-1].isprintable()
    assert not shown.out
    assert not target.exists()


def test_odd_values_of_yaml(tmp_path: Path) -> None:
    """Dates, bytes, sets and keys that are no text have a row like all others."""
    text = """distributed_type: FSDP
num_processes: 2020-01-01
mixed_precision: !!binary aGk=
fsdp_config: !!set {a, b}
1: one
on: off
? null
: nothing
"""
    (tmp_path / "a.yaml").write_text(text)
    found = import_file(tmp_path / "a.yaml")
    assert [row.key for row in found.rows][-3:] == ["1", "on", "null"]
    assert len(found.rows) == 7
    json.dumps(as_json(found), allow_nan=False)


def test_no_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for place, words in ((tmp_path / "none.json", "no such file"), (tmp_path, "no regular file")):
        assert main(["import-config", str(place)]) == 2
        assert words in capsys.readouterr().err


def test_without_pyyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    (tmp_path / "a.yaml").write_text("distributed_type: FSDP\n")
    with pytest.raises(ConfigError, match="pip install pyyaml"):
        import_file(tmp_path / "a.yaml")


# -- the command ----------------------------------------------------------------------------------
def test_write(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "job.toml"
    command = ["import-config", str(HERE / "configs" / "ds_mics.json"), "--write", str(target)]
    assert main(command) == 0
    assert load_config(target).config.mesh.replicate == 4
    assert f"written: {target}" in capsys.readouterr().out
    target.write_text("mine")
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main([*command, "--force"]) == 0
    assert tomllib.loads(target.read_text())["mesh"] == {"replicate": 4, "shard": 4}
    assert os.listdir(tmp_path) == ["job.toml"]
    capsys.readouterr()
    assert main([*command[:-1], str(tmp_path / "no" / "job.toml")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_json(capsys: pytest.CaptureFixture) -> None:
    path = HERE / "configs" / "ds_zeropp.json"
    assert main(["import-config", str(path), "--json", "--ranks", "16"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["shard.strategy"] == "hybrid_full_optimizer"
    assert found["settings"]["shard.gather_wire"] == "int8"
    assert found["settings"]["shard.reduce_wire"] == "int8"
    assert sum(found["counts"].values()) == len(found["rows"])
    assert tomllib.loads(found["toml"])["train"]["global_batch"] == 64
    rows = {row["key"]: row for row in found["rows"]}
    assert (
        'shard.strategy = "hybrid_full_optimizer"'
        in rows["zero_optimization.zero_hpz_partition_size"]["becomes"]
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "the following arguments are required: FILE"),
        (["a.json", "--rank", "2"], "unknown option; did you mean --ranks?"),
        (["a.json", "--ranks", "0"], "expected a whole number from 1"),
        (["a.json", "--from", "megatron"], "invalid choice"),
        (["a.json", "--force"], "goes with --write"),
    ],
)
def test_mistakes(words: list[str], expected: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["import-config", *words]) == 2
    shown = capsys.readouterr().err
    assert expected in shown
    assert shown.count("\n") == 1


# -- anything at all ------------------------------------------------------------------------------
KNOWN = sorted(
    {key for keys in _KEYS.values() for key in keys}
    | {part for path in CONFIGS for part in path.read_text().replace('"', " ").split()}
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["auto", "true", "cpu", "bf16", "FSDP", "DEEPSPEED", "Adam", "WarmupLR"]),
    lambda below: (
        st.lists(below, max_size=3)
        | st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=8), below, max_size=4)
    ),
    max_leaves=12,
)
tables = st.dictionaries(st.sampled_from(KNOWN) | st.text(max_size=8), values, max_size=6)


@given(tables, st.sampled_from([None, *_KEYS]), st.sampled_from([None, 1, 6]))
@example({"train_batch_size": 10**400}, None, None)
@example({"zero_optimization": True}, None, 2)
@example({"optimizer": {"type": "a\nb = 1", "params": {"lr": "\x1b[2J"}}}, None, None)
@example({"output_dir": "a\n[run]\n\x7f", "fsdp": True, "x\ny": 1}, "trainer", None)
@example({"distributed_type": "a\nb", "gpu_ids": "0\n1"}, "accelerate", None)
@example({"a.b": 1, "a": {"b": 2}, "fp16": {"enabled": "auto"}}, "deepspeed", None)
@example({"fsdp_config": None, "distributed_type": "FSDP"}, "accelerate", None)
@example({"output_dir": 3, "fsdp": ["full_shard", 4], "fsdp_config": []}, "trainer", None)
def test_any_table(content: dict[str, Any], kind: str | None, ranks: int | None) -> None:
    """A row for each leaf and a configuration that loads, or one line that says what is wrong."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.json"
        path.write_text(json.dumps(content))
        check_any(path, kind, ranks)


def check_any(path: Path, kind: str | None, ranks: int | None) -> None:
    try:
        found = import_file(path, ranks, kind)
    except ConfigError as error:
        assert str(error).startswith(str(path))
        return
    content = json.loads(path.read_text())
    assert len(found.rows) == len(list(leaves(content)))
    text = as_toml(found)
    assert text.replace("\n", "").isprintable()
    target = path.with_suffix(".toml")
    target.write_text(text)
    assert set(load_config(target).origins) == set(found.settings)
    json.dumps(as_json(found), allow_nan=False)


@given(st.sampled_from(CONFIGS), st.data())
def test_any_change_of_a_real_one(path: Path, data: st.DataObject) -> None:
    """One leaf of a real configuration as something else."""
    import tempfile

    content = read_document(path)
    table, keys = content, list(content)
    key = data.draw(st.sampled_from(keys))
    while isinstance(table[key], dict) and table[key]:
        table = table[key]
        key = data.draw(st.sampled_from(list(table)))
    table[key] = data.draw(values)
    kind = {"a": "accelerate", "d": "deepspeed", "t": "trainer", "f": "fsdp"}[path.name[0]]
    with tempfile.TemporaryDirectory() as folder:
        changed = Path(folder) / "file.json"
        changed.write_text(json.dumps(content))
        (Path(folder) / "ds_of_accelerate.json").write_text("{}")
        check_any(changed, kind, data.draw(st.sampled_from([None, 16])))
