"""Configuration: what is read, what is refused, and that each refusal is one line that says
where."""

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from shardwise.errors import ConfigError
from shardwise.train.config import (
    Config,
    CustomModelConfig,
    MeshConfig,
    ShardConfig,
    TrainConfig,
    mesh_shape,
    parse_override,
    resolved_strategy,
)
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import config_as_dict, config_as_toml, load_config


def refused(overrides=(), path=None):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_are_valid_on_two_ranks():
    config = load_config(None).config
    assert config == Config()
    assert world_problems(config, 2) == []


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("train.steps", "10", 10),
        ("optim.lr", "1", 1.0),
        ("optim.lr", "3e-4", 3e-4),
        ("optim.betas", "0.8,0.9", (0.8, 0.9)),
        ("optim.betas", "[0.8, 0.9]", (0.8, 0.9)),
        ("model.tie_embeddings", "true", True),
        ("model.tie-embeddings", "True", True),
        ("data.source", "a b.txt", "a b.txt"),
        ("data.source", "a.txt,b.txt", ("a.txt", "b.txt")),
        ("shard.unit", "1000", 1000),
        ("shard.unit", "Block,Embedding", ("Block", "Embedding")),
        ("mesh.shard", "-1", -1),
        ("run.dir", "7", "7"),
    ],
)
def test_override(key, text, value):
    config = load_config(None, [(key, text)]).config
    section, name = key.replace("-", "_").split(".")
    found = getattr(getattr(config, section), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("train.stepz", "1", "--train.stepz: unknown key; did you mean train.steps?"),
        ("steps", "1", "did you mean train.steps?"),
        ("trainn.steps", "1", "did you mean train.steps?"),
        ("zzz.qqq", "1", "the sections are run, model"),
        ("train.steps", "ten", '--train.steps: expected a whole number, found "ten"'),
        ("train.steps", "1.5", "expected a whole number, found 1.5"),
        ("train.steps", "0", "--train.steps: 0 is below 1"),
        ("optim.lr", "nan", "is not a number"),
        ("optim.betas", "0.9", "expected a list of 2 numbers"),
        ("optim.betas", "0.9,1.5", "are not all in [0, 1)"),
        (
            "shard.param_dtype",
            "fp8",
            "expected 'float32' or 'bfloat16' (short: fp32, bf16), found \"fp8\"",
        ),
        ("shard.strategy", "hybrid_shard", "needs mesh.replicate above 1"),
        ("shard.transport", "smoke", "unknown transport 'smoke'"),
        ("shard.transport", "fake", "unknown transport 'fake'"),  # moves nothing: no job trains
        ("shard.overrides", "*=full_shard:fake", "unknown transport 'fake'"),
        ("mesh.shard", "0", "neither -1"),
        ("model.kind", "gpt", "neither 'decoder', 'hf' nor 'package.module:function'"),
        ("model.heads", "3", "do not cut model.dim = 128"),
        ("model.kv_heads", "3", "does not divide model.heads = 4"),
        ("data.held_out", "1", "is not between 0 and 1"),
        ("log.profile_steps", "3,121", "121 is above train.steps = 120: it would never be traced"),
        ("data.token_dtype", "uint8", "has no effect: data.source names no .bin file"),
        ("shard.gather_wire", "int4", "expected 'exact' or 'bf16' or 'int8', found \"int4\""),
        ("shard.wire_block", "32", "has no effect: shard.reduce_wire is 'exact'"),
        ("shard.error_feedback", "true", "has no effect: shard.reduce_wire is 'exact'"),
        ("shard.host_ranks", "-1", "-1 is below 0"),
    ],
)
def test_refused_override(key, text, expected):
    assert expected in refused([(key, text)])


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["reduce_wire=int8", "transport=shared_memory"], "needs shard.transport = c10d (or auto)"),
        (["gather_wire=int8", "strategy=no_shard"], "gather_wire: no_shard gathers nothing"),
        (["gather_wire=int8", "overrides=head=no_shard"], "gather_wire: no_shard gathers nothing"),
        (["gather_wire=bf16", "overrides=head=:shared_memory"], "takes no wire formats; c10d does"),
        (["host_ranks=2", "strategy=no_shard"], "has no shard axis across hosts"),
        (["reduce_wire=int8", "wire_block=40"], "40 is no multiple of 16; use 128"),
        (["reduce_wire=bf16", "run.reproducible=any_world"], "any_world needs exact ones"),
        (["host_ranks=2", "run.reproducible=any_world"], "has an order of sums of its own"),
        (
            ["reduce_wire=int8", "error_feedback=true", "run.reproducible=same_world"],
            "error_feedback: is in no checkpoint",
        ),
    ],
)
def test_what_wires_do_not_go_with(overrides, expected):
    pairs = [entry.split("=", 1) for entry in overrides]
    found = refused([(k if "." in k else f"shard.{k}", value) for k, value in pairs])
    assert expected in found and "\n" not in found


def test_hosts_that_do_not_fit_the_ranks():
    loaded = load_config(None, [("shard.host_ranks", "4"), ("shard.reduce_wire", "int8")])
    found = {n: [key for key, _ in world_problems(loaded.on(n).config, n)] for n in (4, 6, 8)}
    assert found == {4: [], 6: ["shard.host_ranks"], 8: []}


def test_ineffective_keys_are_refused_only_where_they_were_set():
    overrides = [("optim.schedule", "constant")]
    assert "final_lr_ratio" not in config_as_dict(load_config(None, overrides).config)["optim"]
    assert "has no effect: optim.schedule is 'constant'" in refused(
        [*overrides, ("optim.final_lr_ratio", "0.5")]
    )


@pytest.mark.parametrize(
    ("file", "option", "noted"),
    [
        ("[optim]\nfinal_lr_ratio = 0.2\n", ("optim.schedule", "constant"), "optim.final_lr_ratio"),
        ("[train]\neval_samples = 3\n", ("train.eval_every", "0"), "train.eval_samples"),
        ("[data]\nseq_len = 64\n", ("data.source", "mine:data"), "data.seq_len"),
        (
            "[data]\nsource = 'a.bin'\ntoken_dtype = 'uint8'\n",
            ("data.source", "stdlib"),
            "data.token_dtype",
        ),
        ("[model]\nkind = 'mine:build'\nwidth = 3\n", ("model.kind", "decoder"), "model.width"),
    ],
)
def test_an_option_may_leave_a_key_of_the_file_without_effect(tmp_path, file, option, noted):
    path = tmp_path / "job.toml"
    path.write_text(file)
    loaded = load_config(path, [option])
    line = file.count("\n")
    assert [note.split(" is ")[0].split(" names ")[0] for note in loaded.notes] == [
        f"{path}:{line}: {noted}: has no effect: {option[0]}"
    ]
    section, _, key = noted.partition(".")
    assert key not in config_as_dict(loaded.config)[section]


def test_an_option_over_the_effective_configuration(tmp_path):
    path = tmp_path / "config.toml"
    path.write_text(config_as_toml(Config()))
    options = [("optim.schedule", "constant"), ("train.eval_every", "0"), ("data.source", "m:f")]
    assert len(load_config(path, options).notes) == 5  # format, seq_len and held_out
    assert load_config(path, [("optim.lr", "1")]).notes == ()


@pytest.mark.parametrize(
    ("key", "text", "meant"),
    [
        ("shard.strategy", "zero1", "shard_optimizer"),
        ("shard.strategy", "ZeRO-2", "shard_grad_op"),
        ("shard.strategy", "zero3", "full_shard"),
        ("shard.strategy", "fsdp", "full_shard"),
        ("shard.strategy", "full-shard", "full_shard"),
        ("shard.strategy", "DDP", "no_shard"),
        ("shard.param_dtype", "bf16", "bfloat16"),
        ("shard.reduce_dtype", "fp32", "float32"),
    ],
)
def test_aliases(tmp_path, key, text, meant):
    section, _, name = key.partition(".")
    path = tmp_path / "job.toml"
    path.write_text(f"[{section}]\n{name} = {text!r}\n")
    for loaded in (load_config(path), load_config(None, [(key, text)])):
        assert config_as_dict(loaded.config)[section][name] == meant


def test_aliases_of_strategies_with_replicas_and_in_overrides():
    replicas = ("mesh.replicate", "2")
    for alias, name in (("hsdp", "hybrid_shard"), ("hfsdp", "hybrid_full_optimizer")):
        assert (
            load_config(None, [replicas, ("shard.strategy", alias)]).config.shard.strategy == name
        )
    assert parse_override("blocks.0=zero2:c10d")[1]["strategy"] == "shard_grad_op"
    assert load_config(None, [("shard.overrides", "head=:c10d")]).config.shard.overrides
    assert "float16 needs a loss scaler" in refused([("shard.param_dtype", "fp16")])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[train]\nsteps = 5\nstepz = 6\n", "job.toml:3: train.stepz: unknown key"),
        ('[data]\nsource = """\nstepz = 1\n"""\n[train]\nstepz = 1\n', "job.toml:6: train.stepz"),
        ("# note\n\ntrain.steps = 'x'\n", "job.toml:3: train.steps: expected a whole number"),
        (
            "train = {steps = true}\n",
            "job.toml:1: train.steps: expected a whole number, found true",
        ),
        ("[optim]\nbetas = [\n  0.9,\n  'x',\n]\n", "job.toml:2: optim.betas: expected a list"),
        (
            "[run]\nseed = 1\n\n[trainn]\nsteps = 1\n",
            "job.toml:4: [trainn]: no such section; did you mean train?",
        ),
        ("steps = 5\n", "job.toml:1: steps: in no section; did you mean train.steps?"),
        ("[train]\nsteps = = 5\n", "job.toml: not valid TOML"),
    ],
)
def test_refused_file_names_the_line(tmp_path, text, expected):
    path = tmp_path / "job.toml"
    path.write_text(text)
    assert expected in refused(path=path)


def test_missing_and_unreadable_files(tmp_path):
    assert "no such file" in refused(path=tmp_path / "none.toml")
    assert "cannot be read" in refused(path=tmp_path)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    assert "cannot be read as a TOML file" in refused(path=binary)


def test_file_then_override(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text("[train]\nsteps = 5\nglobal_batch = 64\n")
    loaded = load_config(path, [("train.steps", "6")])
    assert (loaded.config.train.steps, loaded.config.train.global_batch) == (6, 64)
    assert str(loaded.error("train.steps", "is odd")) == "--train.steps: is odd"
    expected = f"{path}:3: train.global_batch: is odd"
    assert str(loaded.error("train.global_batch", "is odd")) == expected
    assert str(loaded.error("run.seed", "is odd")) == "run.seed: is odd"


def test_keys_of_a_custom_model_go_to_its_factory(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('[model]\nkind = "mine.models:build"\nsizes = [1, 2]\nact = {name = "x"}\n')
    loaded = load_config(path, [("model.width", "32"), ("model.name", "wide")])
    assert loaded.config.model == CustomModelConfig(
        "mine.models:build",
        {"sizes": [1, 2], "act": {"name": "x"}, "width": 32, "name": "wide"},
    )
    path.write_text(config_as_toml(loaded.config))
    assert load_config(path).config == loaded.config


text = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=20)


@given(directory=text, lr=st.floats(1e-12, 1e3), seed=st.integers(0, 2**63 - 1))
def test_effective_config_reads_back_equal(tmp_path_factory, directory, lr, seed):
    base = Config()
    config = dataclasses.replace(
        base,
        run=dataclasses.replace(base.run, dir=directory, seed=seed),
        optim=dataclasses.replace(base.optim, lr=lr),
    )
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_text(config_as_toml(config), encoding="utf-8", newline="")
    assert load_config(path).config == config


@pytest.mark.parametrize(
    ("mesh", "world", "shape", "problem"),
    [
        (MeshConfig(), 6, (1, 6), None),
        (MeshConfig(replicate=2), 6, (2, 3), None),
        (MeshConfig(replicate=2, shard=3), 6, (2, 3), None),
        (MeshConfig(replicate=4), 6, None, "4 replicas cannot share 6 ranks evenly"),
        (MeshConfig(shard=4), 6, None, "1 replica x 4 shards are 4 ranks, not the 6"),
    ],
)
def test_mesh(mesh, world, shape, problem):
    config = Config(mesh=mesh, train=TrainConfig(global_batch=12, micro_batch=1))
    if problem is None:
        assert world_problems(config, world) == []
        assert mesh_shape(config, world) == shape
    else:
        [(_, text)] = world_problems(config, world)
        assert problem in text


def test_batch_must_divide():
    config = Config(train=TrainConfig(global_batch=12, micro_batch=4))
    [(key, text)] = world_problems(config, 2)
    assert key == "train.global_batch"
    assert "12 is not a multiple of 2 ranks x micro_batch 4 = 8; use 16" in text


def test_auto_strategy_follows_the_mesh():
    assert resolved_strategy(Config()) == "full_shard"
    assert resolved_strategy(Config(mesh=MeshConfig(replicate=2))) == "hybrid_shard"
    assert resolved_strategy(Config(shard=ShardConfig(strategy="no_shard"))) == "no_shard"


@pytest.mark.parametrize(
    ("options", "num_ranks", "expected"),
    [
        ({}, 1, (32, 16)),
        ({}, 2, (32, 16)),
        ({}, 3, (33, 11)),
        ({}, 4, (32, 8)),
        ({}, 5, (30, 6)),
        ({}, 8, (32, 4)),
        ({}, 100, (100, 1)),
        ({"train.global_batch": "96"}, 3, (96, 16)),
        ({"train.global_batch": "51"}, 3, (51, 1)),
        ({"train.micro_batch": "4"}, 3, (36, 4)),
        ({"train.micro_batch": "4", "train.global_batch": "8"}, 2, (8, 4)),
    ],
)
def test_batches_that_are_left_out_fit_the_ranks(
    options: dict[str, str], num_ranks: int, expected: tuple[int, int]
) -> None:
    loaded = load_config(None, list(options.items())).on(num_ranks)
    train = loaded.config.train
    assert (train.global_batch, train.micro_batch) == expected
    assert world_problems(loaded.config, num_ranks) == []
    changed = train.global_batch != 32 and "train.global_batch" not in options
    assert len(loaded.notes) == changed
    assert not changed or f"{train.global_batch} instead of 32" in loaded.notes[0]


def test_batches_that_were_chosen_are_refused_by_name() -> None:
    [(key, text)] = world_problems(
        load_config(None, [("train.global_batch", "32")]).on(3).config, 3
    )
    assert (key, text) == ("train.global_batch", "32 is not a multiple of 3 ranks; use 33")
    any_world = load_config(None, [("run.reproducible", "any_world")])
    assert any_world.on(3) is any_world  # sizes make the numbers


def test_a_key_in_the_wrong_section_is_found() -> None:
    with pytest.raises(ConfigError, match=r"train.seq_len: unknown key; did you mean data.seq_len"):
        load_config(None, [("train.seq_len", "64")])
