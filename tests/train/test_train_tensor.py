"""`mesh.tensor`: jobs whose matrices are split over neighbouring ranks, beside one rank.

Sums over a split dim have another order than those of one rank, in every layer: losses and norms
within 1e-6 relative over these few steps in float32. Models of transformers are stepped by SGD:
Adam would divide what is almost nothing by itself, and would not see a gradient of twice the size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import hf_kit
import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from torch.distributed.tensor import DTensor

from ranks import on_ranks, run_ranks
from shardwise.checkpoint.ranks import Ranks
from shardwise.cli import main
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.checks import examine
from shardwise.errors import ConfigError
from shardwise.train import tensor_axis
from shardwise.train.config_file import load_config
from shardwise.train.model import build_model

STEPS, CLOSE = 4, 1e-6


def rows_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(row) for row in (run / "metrics.jsonl").read_text().splitlines()]


def job(rank: int, world: int, run: Path, keys: dict[str, Any], stop_after: int = 0) -> None:
    run_job(run, **{"train__steps": STEPS, **keys}, stop_after=stop_after or None)


def same(found: list[dict[str, float]], wanted: list[dict[str, float]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        for name in ("loss", "grad_norm", "val_loss"):
            assert (name in ours) == (name in theirs)
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=CLOSE), (name, ours["step"])


DECODERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two ranks, no data axis": (2, {}, {}),
    "two by two": (4, {}, {}),
    "tied, uneven, grouped heads": (
        4, {"model__tie_embeddings": True, "model__heads": 4, "model__kv_heads": 2,
            "model__hidden": 45, "model__vocab_size": 259}, {},
    ),
    "recomputed": (4, {"shard__activation_checkpointing": "full"}, {}),
    "replicas": (4, {}, {"shard__strategy": "hybrid_shard", "mesh__replicate": 2}),
    "whole on data ranks": (4, {}, {"shard__strategy": "no_shard"}),
    "over process groups": (4, {}, {"shard__transport": "c10d"}),
}  # fmt: skip


@pytest.mark.parametrize("name", DECODERS)
def test_the_decoder(name: str, tmp_path: Path) -> None:
    """Embedding, layers, norms and loss are all split."""
    world, keys, on_several = DECODERS[name]
    run_ranks(1, job, tmp_path / "one", keys)
    run_ranks(world, job, tmp_path / "split", {**keys, **on_several, "mesh__tensor": 2})
    same(rows_of(tmp_path / "split"), rows_of(tmp_path / "one"))
    assert not [f for f in examine(Case(tmp_path / "split")) if f.name == "same-samples"]


def hf_job(rank: int, world: int, folder: Path, name: str, keys: dict[str, Any]) -> None:
    model = hf_kit.make_directory(name, folder / "model")
    hf_kit.run_hf_job(folder / f"run{world}", model, **keys)


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "gemma3", "olmo2", "phi"])
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    """By their own plans; what is exported is whole, and theirs again."""
    keys = {"optim__kind": "sgd", "optim__lr": 0.1, "train__steps": 4}
    run_ranks(1, hf_job, tmp_path, name, keys)
    run_ranks(4, hf_job, tmp_path, name, {**keys, "mesh__tensor": 2})
    same(rows_of(tmp_path / "run4"), rows_of(tmp_path / "run1"))
    ours, theirs = (hf_kit.loaded(tmp_path / run / "model") for run in ("run4", "run1"))
    torch.testing.assert_close(
        hf_kit.logits_of(ours), hf_kit.logits_of(theirs), rtol=1e-4, atol=1e-5
    )


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "2 x 2": (4, {"mesh__tensor": 2}),
    "1 x 4": (4, {"mesh__tensor": 4}),
    "2 x 1": (2, {}),
    "1 x 1": (1, {}),
    "1 x 2": (2, {"mesh__tensor": 2}),
}
HEADS = {"model__heads": 4}


def test_checkpoints_go_to_any_mesh(tmp_path: Path) -> None:
    """One run that changes its mesh with every step, beside one that does not."""
    run_ranks(1, job, tmp_path / "one", {**HEADS, "train__steps": 6})
    for step, mesh in enumerate(["2 x 2", "1 x 4", "2 x 1", "1 x 2", "1 x 1", "2 x 2"], 1):
        world, keys = MESHES[mesh]
        keys = {**HEADS, **keys, "train__steps": 6}
        run_ranks(world, job, tmp_path / "many", keys, 1 if step < 6 else 0)
        assert rows_of(tmp_path / "many")[-1]["step"] == step
    same(rows_of(tmp_path / "many"), rows_of(tmp_path / "one"))


@on_ranks(4)
def test_what_is_not_split_stays_equal(rank: int, world: int, tmp_path: Path) -> None:
    """Norms of a model of transformers are plain to the tensor axis: the same bits on its ranks."""
    from shardwise.train.job import build_job
    from shardwise.train.loop import stepping
    from shardwise.train.run_dir import RunDir

    model = hf_kit.make_directory("qwen3", tmp_path / "model")
    keys = {**hf_kit.JOB, "model.path": str(model), "mesh.tensor": 2, "run.dir": str(tmp_path)}
    keys |= {"run.device": "cpu", "data.source": str(hf_kit.make_tokens(tmp_path))}

    class Never:
        by = ""

    loaded = load_config(
        None, [(k, str(v).lower() if isinstance(v, bool) else str(v)) for k, v in keys.items()]
    )
    made, _ = build_job(loaded, Ranks(), torch.device("cpu"), Never(), RunDir(loaded.config))  # type: ignore[arg-type]
    with stepping(made) as step:
        for _ in range(2):
            step()
    seen = 0
    for name, param in made.model.named_parameters():
        assert isinstance(param, DTensor)
        if "tensor" in (param.device_mesh.mesh_dim_names or ()):
            continue
        seen += 1
        every = [torch.empty_like(param.full_tensor()) for _ in range(world)]
        dist.all_gather(every, param.full_tensor())
        assert all(torch.equal(every[0], one) for one in every), name
    assert seen
    made.console.stop()
    made.checkpoints.close()


REFUSED = {
    "lora.rank": ("lora.rank=4", "model.kind=hf", "model.path=x"),
    "run.reproducible": ("run.reproducible=any_world",),
    "optim.kind": ("optim.kind=muon",),
    "shard.reduce_wire": ("shard.reduce_wire=bf16", "shard.transport=c10d"),
    "offload.optimizer": ("offload.optimizer=cpu",),
    "optim.in_backward": ("optim.in_backward=true", "train.grad_clip=0"),
    "shard.compile": ("shard.compile=true",),
    "model.heads": ("model.heads=3", "model.dim=48"),
    "data.seq_len": ("data.seq_len=33",),
    "model.kind": ("model.kind=mine:build", "data.source=mine:samples"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_is_refused_by_its_key(key: str) -> None:
    pairs = [tuple(entry.split("=")) for entry in REFUSED[key]]
    with pytest.raises(ConfigError, match=f"{key}.*(mesh.tensor = 2|tensor ranks evenly)"):
        load_config(None, [*pairs, ("mesh.tensor", "2")])  # type: ignore[list-item]


def test_ranks_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--nproc", "3", "--mesh.tensor", "2"]) == 2
    assert "2 tensor ranks do not divide the 3 ranks" in capsys.readouterr().err
    assert main(["explain", "--nproc", "4", "--mesh.tensor", "2"]) == 0
    assert "1 replica x 2 shards" in (text := capsys.readouterr().out)
    assert "tensor axis: 2 neighbouring ranks split" in " ".join(text.split())


def built(name: str, folder: Path, plan: dict[str, str] | None = None) -> Any:
    """As a job builds it; with `plan` in the place of the model's own."""
    path = hf_kit.make_directory(name, folder / name)
    pairs = {
        "model.kind": "hf",
        "model.path": str(path),
        "data.source": "x.npy",
        "data.seq_len": "24",
    }
    config = load_config(None, [*pairs.items(), ("mesh.tensor", "2")]).config
    with pytest.MonkeyPatch.context() as patch:
        if plan is not None:
            kind = type(hf_kit.config_of(name))
            patch.setattr(kind, "base_model_tp_plan", plan)
        return build_model(config, None)


BAD_PLANS = {
    "names no module": {"layers.*.self_attn.q_projection": "colwise"},
    r"q_proj is named twice.*'layers.\*.self_attn.q_proj'|named twice": {
        "layers.*.self_attn.q_proj": "colwise", "layers.*.self_attn.*_proj": "colwise",
    },
    "which torch has no style for": {"layers.*.mlp.up_proj": "packed_colwise"},
    "only Linear can be split": {"layers.*.input_layernorm": "colwise"},
    "has no tensor parallel plan": {},
}  # fmt: skip


@pytest.mark.parametrize("said", BAD_PLANS)
def test_plans_that_do_not_fit(said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        built("llama", tmp_path, BAD_PLANS[said])


def test_models_without_a_plan(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="GPT2LMHeadModel of transformers has no tensor parallel"):
        built("gpt2", tmp_path)
    with pytest.raises(ConfigError, match="MixtralForCausalLM"):
        built("mixtral", tmp_path)


def test_a_rank_has_its_part_in_plans(tmp_path: Path) -> None:
    """Half of every split matrix, and the same forward."""
    config = load_config(None, [("mesh.tensor", "2")]).config
    whole = build_model(config, None)
    part = tensor_axis.part_of_rank(whole, config)
    sizes = dict(whole.named_parameters())
    for name, param in part.named_parameters():
        assert param.numel() * (1 if "norm" in name else 2) == sizes[name].numel(), name
    assert part(torch.zeros(2, config.data.seq_len + 1, dtype=torch.long, device="meta")).is_meta
