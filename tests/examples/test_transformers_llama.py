"""Hugging Face: a tiny Llama, sharded layer by layer, and Accelerate's functions for FSDP2.

`Accelerator.prepare` chooses DDP on a machine without accelerator, so the functions of its FSDP2
path are called one by one here, as `prepare` would, with torch's names replaced by `install()`.

The plain model's loss is one mean over all rows, ours the mean of two ranks' means: within 1e-5
relative.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import shardwise as sw
from ranks import on_ranks

pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

STEPS = 3


def llama(seed: int = 0, *, tied: bool = True) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config)


def shard(model: Any) -> Any:
    for layer in model.model.layers:
        sw.fully_shard(layer)
    return sw.fully_shard(model)


def rows(step: int, rank: int) -> torch.Tensor:
    return torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(10 * step + rank))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def train(model: Any, optimizer: Any, rank: int | None, steps: range) -> list[float]:
    """Losses; without a rank, the plain model on the data of both."""
    losses = []
    for step in steps:
        tokens = torch.cat([rows(step, 0), rows(step, 1)]) if rank is None else rows(step, rank)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        mean = loss.detach().clone()
        if rank is not None:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        losses.append(mean.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()}


def assert_like_plain(model: Any, optimizer: Any, rank: int, *, tied: bool = True) -> None:
    plain = llama(tied=tied)
    plain_optimizer = adamw(plain.parameters())
    expected = train(plain, plain_optimizer, None, range(STEPS))
    assert train(model, optimizer, rank, range(STEPS)) == pytest.approx(expected, rel=1e-5)
    for name, value in whole(model.state_dict()).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@on_ranks(2, timeout_s=120)
def test_llama_trains_like_the_plain_model(rank: int) -> None:
    model = shard(llama())
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_like_plain(model, adamw(model.parameters()), rank)
    assert model.lm_head.weight is model.model.embed_tokens.weight


@on_ranks(2, timeout_s=120)
def test_llama_is_saved_and_loaded(rank: int, tmp_path: Path) -> None:
    """By DCP into a model with other weights, and by `save_pretrained` into a plain one."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from transformers import LlamaForCausalLM

    model = shard(llama())
    optimizer = adamw(model.parameters())
    train(model, optimizer, rank, range(2))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")

    other = shard(llama(seed=1))
    other_optimizer = adamw(other.parameters())
    weights, moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=moments)
    steps = range(2, 4)
    assert train(other, other_optimizer, rank, steps) == train(model, optimizer, rank, steps)

    state = whole(model.state_dict())
    if rank == 0:
        llama(seed=2).save_pretrained(tmp_path / "hf", state_dict=dict(state))
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / "hf")
        for name, value in loaded.state_dict().items():
            assert torch.equal(value, state[name]), name
    dist.barrier()


# -- Accelerate's FSDP2 path ---------------------------------------------------------------------
def accelerator(rank: int, **options: Any) -> Any:
    """What the functions read of an `Accelerator` that runs FSDP2."""
    from accelerate import FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        **options,
    )
    return SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        mixed_precision="no",
        is_main_process=rank == 0,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("efficient", [False, True], ids=["loaded", "broadcast"])
@on_ranks(2, timeout_s=120)
def test_accelerate_prepares_and_trains(tied: bool, efficient: bool, rank: int) -> None:
    """fsdp2_prepare_model, with fsdp2_load_full_state_dict where only rank 0 has the weights, and
    fsdp2_switch_optimizer_parameters.
    """
    from accelerate.utils import fsdp_utils

    sw.install()
    try:
        fake = accelerator(rank, cpu_ram_efficient_loading=efficient)
        model = llama(seed=rank if efficient else 0, tied=tied)
        optimizer = adamw(model.parameters())
        before = {n: p.data_ptr() for n, p in model.named_parameters()}
        model = fsdp_utils.fsdp2_prepare_model(fake, model)
        assert all(isinstance(m, sw.FSDPModule) for m in (model, *model.model.layers))
        switch_optimizer(optimizer, before, model)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert_like_plain(model, optimizer, rank, tied=tied)
    finally:
        sw.uninstall()


def switch_optimizer(optimizer: Any, before: dict[str, int], model: Any) -> None:
    """As `Accelerator` does: the data pointers of the old parameters are the keys."""
    from accelerate.utils import fsdp_utils

    pointers = [p.data_ptr() for group in optimizer.param_groups for p in group["params"]]
    by_pointer = {pointer: name for name, pointer in before.items()}
    after = dict(model.named_parameters())
    names = [by_pointer[p] for p in pointers]
    for group in optimizer.param_groups:
        group["params"] = [SimpleNamespace(data_ptr=before[n]) for n in names]
    mapping = {before[n]: after[n] for n in names}
    fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, mapping)


@on_ranks(2, timeout_s=120)
def test_accelerate_checkpoints_activations(rank: int) -> None:
    """fsdp2_apply_ac, before sharding as `prepare` does."""
    from accelerate.utils import fsdp_utils

    sw.install()
    try:
        fake = accelerator(rank, activation_checkpointing=True, cpu_ram_efficient_loading=False)
        fake.state.fsdp_plugin.set_auto_wrap_policy(llama())
        model = fsdp_utils.fsdp2_apply_ac(fake, llama())
        model = fsdp_utils.fsdp2_prepare_model(fake, model)
        expected = train(plain := llama(), adamw(plain.parameters()), None, range(STEPS))
        found = train(model, adamw(model.parameters()), rank, range(STEPS))
        assert found == pytest.approx(expected, rel=1e-5)
        names = fsdp_utils.fsdp2_canonicalize_names(dict(model.named_parameters()))
        assert set(names) == {n for n, _ in llama().named_parameters()}
    finally:
        sw.uninstall()
