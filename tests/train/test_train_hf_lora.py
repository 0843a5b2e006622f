"""Adapters: what `peft` itself would train, what is sent and saved of it, and where it goes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("peft", reason="the extra 'hf' is not installed")
import peft
from hf_kit import JOB, loaded, logits_of, make_directory, new_model, run_hf_job
from jobs import read_rows

from ranks import on_ranks, run_ranks
from shardwise.bench.traffic import count_collectives
from shardwise.checkpoint.boxes import Box
from shardwise.checkpoint.importing import open_source
from shardwise.cli.checkpoint import main as checkpoint_command
from shardwise.errors import ConfigError
from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.hf.lora import fill_adapters
from shardwise.train.model import build_model
from shardwise.train.optimizer import build_optimizer
from shardwise.train.order import SampleOrder

LORA = {"lora__rank": 4, "lora__targets": "q_proj,layers.1.*down_proj"}
NAMES = [*(f"model.layers.{i}.self_attn.q_proj" for i in (0, 1)), "model.layers.1.mlp.down_proj"]


def adapters_of(source: Any) -> set[str]:
    names = {k.removeprefix("model.") for k in source.tensors if k.startswith("model.")}
    return {n.removesuffix(".weight").rpartition(".lora_")[0] for n in names}


@on_ranks(2, timeout_s=240)
def test_a_run_is_that_of_peft_alone(rank: int, tmp_path: Path) -> None:
    """Steps and weights are those of a plain model with the same adapters; a checkpoint holds
    these alone; stopped and resumed is equal."""
    path = make_directory("llama_tied", tmp_path / "model")
    run_hf_job(tmp_path / "whole", path, **LORA)
    run_hf_job(tmp_path / "parts", path, stop_after=1, **LORA)
    run_hf_job(tmp_path / "parts", path, **LORA)
    losses = [row["loss"] for row in read_rows(tmp_path / "whole")]
    assert [row["loss"] for row in read_rows(tmp_path / "parts")] == losses
    if rank == 0:
        saved = open_source(tmp_path / "whole")
        assert adapters_of(saved) == set(NAMES)
        assert saved.objects["about"]["num_params"] > 10_000  # the model's, not the checkpoint's
        model, expected = plain_steps(tmp_path)
        # float32: sums over micro-batches and ranks are rounded in another order than here.
        assert losses == pytest.approx(expected, rel=1e-5)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found = torch.empty_like(parameter)
                key = "model." + name
                saved.read(key, Box.whole(tuple(parameter.shape)), found)
                # AdamW's first steps have the size of lr whatever the gradient.
                torch.testing.assert_close(found, parameter, rtol=2e-3, atol=2e-4)
    dist.barrier()


def plain_steps(folder: Path) -> tuple[Any, list[float]]:
    """The same with peft and PyTorch alone."""
    config = load_config(folder / "whole" / "config.toml").config
    model = loaded(folder / "model")
    chosen = peft.LoraConfig(r=4, lora_alpha=16.0, target_modules=NAMES)
    peft.inject_adapter_in_model(chosen, model)
    fill_adapters(model, config.run.seed)
    data = open_data(config, None)
    order = SampleOrder(len(data.train), config.run.seed)
    optimizer = build_optimizer(model, config.optim)
    model.train()
    losses = []
    for step in range(2):
        ids = data.train.batch(order.indices(4 * step, 4))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return model, losses


def adapted(folder: Path) -> Any:
    """As `peft` loads what the run has left."""
    return peft.PeftModel.from_pretrained(loaded(folder / "model"), folder / "run" / "model")


def a_run(rank: int, world: int, folder: Path, how: dict[str, Any]) -> None:
    run_hf_job(folder / "run", folder / "model", **{**LORA, **how})


@pytest.mark.parametrize("name", ["llama_tied", "gpt2", "mixtral"])
def test_what_is_written_is_what_was_trained(name: str, tmp_path: Path) -> None:
    """peft's directory, the same exported by the command, and the merged model: equal logits."""
    make_directory(name, tmp_path / "model")
    run_ranks(2, a_run, tmp_path, {"lora__targets": "all-linear"}, timeout_s=240)
    written = tmp_path / "run" / "model"
    found = {p.name for p in written.iterdir()}
    assert found == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    expected = logits_of(adapted(tmp_path))
    assert not torch.allclose(expected, logits_of(loaded(tmp_path / "model")), atol=1e-3)
    run, out = str(tmp_path / "run"), tmp_path / "exported"
    assert checkpoint_command(["export", run, str(out)]) == 0
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (out / file).read_bytes() == (written / file).read_bytes()
    for number, path in enumerate((run, str(out))):
        merged = tmp_path / f"merged_{number}"
        assert checkpoint_command(["merge", path, str(merged)]) == 0
        # W x + s B (A x) and (W + s B A) x are rounded in another order.
        torch.testing.assert_close(logits_of(loaded(merged)), expected, rtol=1e-4, atol=1e-5)
    card = (written / "README.md").read_text()
    assert "LoRA of rank 4" in card
    assert "library_name: peft" in card


def test_a_base_in_bfloat16_stays_as_it_is(tmp_path: Path) -> None:
    new_model("llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    run_ranks(2, a_run, tmp_path, {"shard__param_dtype": "bf16"}, timeout_s=240)
    config = load_config(tmp_path / "run" / "config.toml").config
    model = build_model(config, None)
    for name, parameter in model.named_parameters():
        trains = ".lora_" in name
        assert parameter.requires_grad == trains
        assert parameter.dtype == (torch.float32 if trains else torch.bfloat16), name
    assert checkpoint_command(["merge", str(tmp_path / "run"), str(tmp_path / "merged")]) == 0
    assert loaded(tmp_path / "merged", "auto").dtype == torch.bfloat16


def counted(rank: int, world: int, folder: Path, how: dict[str, Any]) -> int:
    """Bytes that one step reduces on this rank."""
    once = {"train__steps": 1, "train__global_batch": 2, "train__micro_batch": 1}
    how = {**once, "shard__transport": "c10d", "checkpoint__export": False, **how}
    traffic = count_collectives(
        lambda: run_hf_job(folder / f"run_{len(how)}", folder / "model", **how)
    )
    return traffic.reduce_bytes


def test_bytes_reduced_are_those_of_the_adapters(tmp_path: Path) -> None:
    make_directory("llama", tmp_path / "model")
    with_adapters = run_ranks(2, counted, tmp_path, LORA, timeout_s=240)
    whole = run_ranks(2, counted, tmp_path, {}, timeout_s=240)
    model = loaded(tmp_path / "model")
    shapes = [tuple(model.get_submodule(name).weight.shape) for name in NAMES]
    adapters = sum(4 * (rows + columns) for rows, columns in shapes) * 4  # bytes
    everything = sum(p.numel() for p in model.parameters()) * 4
    # Half of it is another rank's; beside it goes one count per parameter.
    assert adapters / 2 <= with_adapters[0] <= adapters / 2 + 256
    assert everything / 2 <= whole[0] <= everything / 2 + 1024


def refused(**values: Any) -> str:
    overrides = [(k.replace("__", "."), str(v)) for k, v in {**JOB, **values}.items()]
    with pytest.raises(ConfigError) as caught:
        build_model(load_config(None, overrides).config, None)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_adapted(tmp_path: Path) -> None:
    path = str(make_directory("llama", tmp_path / "model"))
    text = refused(model__path=path, lora__rank=4, lora__targets="q_prj,v_proj")
    assert "no matrix of LlamaForCausalLM is called 'q_prj'; did you mean q_proj?" in text
    assert "lora.alpha: has no effect: lora.rank is 0" in refused(model__path=path, lora__alpha=3)
    assert "name a directory" in refused(model__path=f"{path}/config.json", lora__rank=2)
    assert "need model.kind = 'hf'" in refused(model__kind="decoder", lora__rank=2)
    assert "not below 1" in refused(model__path=path, lora__rank=2, lora__dropout=1)
    said = json.loads((tmp_path / "model" / "config.json").read_text())
    said["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "model" / "config.json").write_text(json.dumps(said))
    text = refused(model__path=path, lora__rank=2)
    assert "is quantized (bitsandbytes); write it as bfloat16 first" in text


def test_merging_needs_adapters_and_their_base(tmp_path: Path, capsys: Any) -> None:
    make_directory("llama", tmp_path / "other")
    make_directory("gpt2", tmp_path / "gpt2")
    words = ["merge", str(tmp_path / "other"), str(tmp_path / "out")]
    assert checkpoint_command(words) == 2
    assert "holds no adapters" in capsys.readouterr().err
    chosen = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.get_peft_model(loaded(tmp_path / "other"), chosen)
    model.save_pretrained(tmp_path / "adapters")
    words = ["merge", str(tmp_path / "adapters"), str(tmp_path / "out")]
    assert checkpoint_command([*words, "--base", str(tmp_path / "gpt2")]) == 2
    assert "is it the base?" in capsys.readouterr().err
    assert checkpoint_command([*words, "--base", str(tmp_path / "nothing")]) == 2
    assert "no such directory" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert checkpoint_command(words) == 0
