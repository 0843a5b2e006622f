"""In from other formats and out again: DCP, Hugging Face, torch.save, DeepSpeed; the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_kit import (
    Awkward,
    make,
    newest,
    optimizer_of,
    same,
    shard,
    snapshot,
    train,
)
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import shardwise as sw
from ranks import on_ranks
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.importing import open_source
from shardwise.checkpoint.loading import load_optimizers
from shardwise.checkpoint.source import read_whole
from shardwise.cli import main
from shardwise.errors import CheckpointError

DEEPSPEED = Path(__file__).parent / "deepspeed_zero3"


def command(capsys: Any, *words: Any) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, words)])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


class Small(nn.Module):
    """The model of the DeepSpeed fixture."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("count", torch.zeros(3))
        self.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)


class Filled(Awkward):
    """Awkward with a way to fill what is not saved."""

    def reset_parameters(self) -> None:
        self.not_saved.fill_(1)


@on_ranks(2)
def test_what_torch_fsdp2_and_dcp_wrote(rank: int, world: int, tmp_path: Path) -> None:
    """Model and optimizer, by name, into our shards; then on through our own format."""
    mesh = init_device_mesh("cpu", (world,))
    theirs = make()
    for layer in theirs.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh, ignored_params={theirs.gain, theirs.low})  # it takes neither
    optimizer = optimizer_of(theirs, 0.03)
    train(theirs, optimizer)
    weights, moments = get_state_dict(theirs, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": 7}, checkpoint_id=tmp_path / "dcp")
    expected = snapshot(theirs, optimizer)
    if rank == 0:
        words = ["import", str(tmp_path / "dcp"), str(tmp_path / "in/step_00000000")]
        assert main(["checkpoint", *words]) == 0
    torch.distributed.barrier()
    model = shard(make(1), world, "shard_grad_op")
    ours = optimizer_of(model, 0.5)
    manager = sw.CheckpointManager(tmp_path / "in")
    loaded = manager.load(newest(tmp_path / "in"), model, ours)
    assert loaded.extra == {"step": 7}
    assert not loaded.rng_restored
    found = snapshot(model, ours)
    # torch's get_state_dict gives a parameter that never had a gradient state of zeros.
    known = {k: v for k, v in expected.items() if not k.startswith("optim.unused.")}
    same({k: v for k, v in found.items() if not k.startswith("optim.unused.")}, known)
    direct = shard(make(2), world, "full_shard")
    sw.load_pretrained(direct, tmp_path / "dcp", cast=False)
    same(snapshot(direct), {k: v for k, v in expected.items() if k.startswith("model.")})


@on_ranks(2)
def test_plain_dcp_goes_on_working_with_our_shards(rank: int, world: int, tmp_path: Path) -> None:
    model = shard(make(), world, "full_shard")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    other = shard(make(1), world, "shard_grad_op")
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    same(snapshot(other), snapshot(model))


@on_ranks(2)
def test_fsdp1_full_state_dicts(rank: int, world: int, tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)).sum()

    torch.manual_seed(0)
    theirs = FullyShardedDataParallel(Plain(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.AdamW(theirs.parameters())
    theirs(torch.ones(2, 5)).backward()
    optimizer.step()
    whole = StateDictOptions(full_state_dict=True)
    weights, moments = get_state_dict(theirs, optimizer, options=whole)
    if rank == 0:
        torch.save({"model": weights, "optim": moments}, tmp_path / "full.pt")
    torch.distributed.barrier()
    source = open_source(tmp_path / "full.pt")
    assert torch.equal(read_whole(source, "model.a.weight"), get_whole(theirs)["a.weight"])
    assert source.tensors["optim.b.bias.exp_avg"].shape == (3,)
    assert source.objects["optim.groups"][0]["options"]["lr"] == 1e-3
    mine = sw.fully_shard(Plain())
    sw.load_pretrained(mine, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt", weights_only=True, mmap=True)["model"]
    again = sw.fully_shard(Plain())
    sw.load_full_state_dict(again, full)
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor.full_tensor(), full[name])
        assert torch.equal(again.state_dict()[name].full_tensor(), full[name])


def get_whole(model: nn.Module) -> dict[str, Any]:
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    return get_model_state_dict(model, options=options)


@on_ranks(1, 2, 3)
def test_hugging_face_directories_stream_in_and_out(rank: int, world: int, tmp_path: Path) -> None:
    """Sharded, with the tie once; onto a model on the meta device; out as the same files."""
    expected = make().state_dict()
    first = {k: v for k, v in expected.items() if k != "head.weight"}
    names = sorted(first)
    if rank == 0:
        (tmp_path / "hf").mkdir()
        parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
        for file, held in parts.items():
            save_file({n: first[n] for n in held}, tmp_path / "hf" / file)
        weight_map = {n: file for file, held in parts.items() for n in held}
        index = {"metadata": {}, "weight_map": weight_map}
        (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    torch.distributed.barrier()
    with torch.device("meta"):
        model: Any = Filled()
        model.head.weight = model.embed.weight
    shard(model, world, "full_shard")
    sw.load_pretrained(model, tmp_path / "hf", cast=False)
    same(snapshot(model), {f"model.{k}": v for k, v in expected.items()})
    assert torch.equal(model.not_saved, torch.ones(2))
    train(model, optimizer_of(model), 1)
    sw.load_pretrained(model, tmp_path / "hf")
    sw.save_pretrained(model, tmp_path / "out")
    sw.save_pretrained(model, tmp_path / "parts", max_shard_bytes=500)
    sw.save_pretrained(model, tmp_path / "bf16", dtype=torch.bfloat16)
    if rank == 0:
        same(load_file(tmp_path / "out/model.safetensors"), first)
        weight_map = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
        for name, file in weight_map["weight_map"].items():
            assert torch.equal(load_file(tmp_path / "parts" / file)[name], first[name])
        low = load_file(tmp_path / "bf16/model.safetensors")
        assert low["embed.weight"].dtype == torch.bfloat16
        assert low["count"].dtype == torch.int64
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        sw.save_pretrained(model, tmp_path / "out")


def test_any_box_of_any_source_is_the_part_of_the_whole(tmp_path: Path) -> None:
    expected = {k: v.detach() for k, v in make().state_dict().items()}
    save_file({k: v.clone() for k, v in expected.items()}, tmp_path / "x.safetensors")
    torch.save(expected, tmp_path / "x.pt")
    dcp.save(expected, checkpoint_id=tmp_path / "dcp")
    for name in ("x.safetensors", "x.pt", "dcp"):
        source = open_source(tmp_path / name)
        for key, start, size in (
            ("embed.weight", (3, 1), (7, 4)),
            ("low", (0, 0), (9, 6)),
            ("unused", (6, 2), (1, 1)),
            ("gain", (), ()),
        ):
            box = Box(start, size)
            out = torch.full(size, 9.0, dtype=expected[key].dtype)
            source.read(f"model.{key}", box, out)
            part = expected[key][tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))]
            assert torch.equal(out, part), (name, key)
        source.close()


def test_deepspeed_zero3(tmp_path: Path, capsys: Any) -> None:
    """Files that DeepSpeed 0.19.8 wrote on 2 ranks; its own script made the expected weights."""
    expected = torch.load(DEEPSPEED / "expected_weights.pt", weights_only=True)
    code, out, _ = command(capsys, "import", DEEPSPEED, tmp_path / "step_00000002")
    assert (code, "18 tensors" in out) == (0, True)
    model = Small()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    sw.load_pretrained(model, tmp_path / "step_00000002")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, expected[name].float()), name
    source = open_source(tmp_path / "step_00000002")
    load_optimizers(source, model, optimizer)
    state = optimizer.state[model.a.weight]
    assert state["step"] == 2
    assert state["exp_avg"].shape == (7, 5)
    assert source.objects["extra"]["ds_version"] == "0.19.8"
    one = tmp_path / "one"
    shutil.copytree(DEEPSPEED / "global_step2", one)
    for file in one.glob("*rank_1*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="2 ranks wrote it, found the files of 1"):
        open_source(one)


def test_the_command_lists_verifies_compares_and_converts(tmp_path: Path, capsys: Any) -> None:
    run = tmp_path / "run"
    model = make()
    optimizer = optimizer_of(model)
    manager = sw.CheckpointManager(run / "checkpoints")
    manager.save(1, model, optimizer, extra={"run": {"dir": "a", "seed": 0}, "at": 1})
    train(model, optimizer)
    manager.save(2, model, optimizer, extra={"run": {"dir": "b", "seed": 0}, "at": 2})
    one, two = (run / "checkpoints" / f"step_0000000{i}" for i in (1, 2))
    code, out, _ = command(capsys, "ls", run)
    assert code == 0
    assert f"{two}  step 2  1 rank  " in out
    code, out, _ = command(capsys, "ls", two, "--json")
    listing = json.loads(out)
    assert listing["ties"] == {"model.head.weight": "model.embed.weight"}
    assert {"name": "model.low", "dtype": "bfloat16", "shape": [9, 6], "size_bytes": 108} in (
        listing["tensors"]
    )
    assert command(capsys, "verify", run)[0] == 0
    assert command(capsys, "diff", two, two)[0] == 0
    first = json.loads(command(capsys, "ls", run, "--json")[1])["complete"][-1]
    assert (first["model"], first["num_params"]) == ("Awkward", 255)
    assert {"time", "loss", "step", "ranks", "size_bytes"} <= first.keys()
    assert "Awkward of 255 parameters" in command(capsys, "ls", run)[1]
    code, out, _ = command(capsys, "diff", one, two)
    assert code == 1
    assert "~ model.gain  1 elements differ" in out
    assert "~ extra  run.dir: a and b (and 1 more)" in out
    assert f"+ optim.gain.exp_avg  (only in {two})" in out
    assert (
        json.loads(command(capsys, "diff", one, two, "--json", "--weights")[1])["only_right"] == []
    )

    assert command(capsys, "export", run, tmp_path / "bf", "--dtype", "bf16")[0] == 0
    assert command(capsys, "export", run, tmp_path / "hf", "--max-shard-size", "1KB")[0] == 0
    assert command(capsys, "diff", "--weights", two, tmp_path / "hf")[0] == 1  # lacks the tie
    for to in ("torch", "safetensors", "shardwise"):
        assert command(capsys, "convert", tmp_path / "hf", tmp_path / to, "--to", to)[0] == 0
        assert command(capsys, "diff", "--weights", tmp_path / "hf", tmp_path / to)[0] == 0
    fresh = make(3)
    sw.load_pretrained(fresh, tmp_path / "torch")
    same(snapshot(fresh), snapshot(model))

    file = two / "rank_00000.safetensors"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    code, out, _ = command(capsys, "verify", run)
    assert code == 1
    assert f"{one}: whole" in out
    assert f"{file}: damaged: bytes 0 to" in out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ls", "/nope"], "/nope: no such file or directory"),
        (["verify", "/nope"], "/nope: no such file or directory"),
        (["diff", "full", "/nope"], "holds no checkpoint that is known here"),
        (["import", "text", "out"], "text: refused, damaged or no torch.save file"),
        (["export", "x.safetensors", "full"], "full: exists and is not empty"),
        (["export", "x.safetensors", "out", "--max-shard-size", "5X"], "expected a size such as"),
        (["convert", "x.safetensors", "out", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["import", "numbers.pt", "out"], "parameter number 0: numbers cannot be matched"),
        (["lss"], "lss: unknown command; did you mean ls?"),
    ],
)
def test_mistakes_are_one_line(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("hello")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "numbers.pt"
    )
    code, out, err = command(capsys, *words)
    assert code == 2
    assert not out
    assert expected in err
    assert "Traceback" not in err
    assert not (tmp_path / "out").exists()
