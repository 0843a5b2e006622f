"""torchtitan's `apply_fsdp_to_decoder` (once `apply_fsdp`) and `parallelize_llama`, which calls it,
on its own Llama 3, under `install()`.

torchtitan switches off the division of gradients and divides the loss by the tokens of all ranks.
Compared with the same model unsharded, over the rows of all ranks: sums in another order, 1e-5.
(Torch's `fully_shard` cannot be the reference: a factor other than the mean needs NCCL.)
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from trainers_kit import VOCABULARY, full, same_numbers, samples, sharded_by, using, whole

from ranks import on_ranks

pytest.importorskip("torchtitan", reason="torchtitan is not installed (docs/integrations.md)")
pytest.importorskip("triton", reason="torchtitan's models import triton, which is not installed")

STEPS, ROWS, LENGTH, MAX_NORM = 3, 2, 12, 0.5


def decoder(*, tied: bool) -> Any:
    """Their Llama 3, tiny."""
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE, Embedding, Linear, RMSNorm
    from torchtitan.models.common.attention import ScaledDotProductAttention

    dim, heads = 16, 2
    config = llama3.Llama3Model.Config(
        dim=dim,
        vocab_size=VOCABULARY,
        enable_weight_tying=tied,
        tok_embeddings=Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=dim, param_init=llama3._EMBEDDING_INIT
        ),
        norm=RMSNorm.Config(normalized_shape=dim, param_init=llama3._NORM_INIT),
        lm_head=Linear.Config(
            in_features=dim, out_features=VOCABULARY, param_init=llama3._output_linear_init(dim)
        ),
        layers=llama3._build_llama3_layers(
            n_layers=2,
            dim=dim,
            n_heads=heads,
            hidden_dim=40,
            rope=ComplexRoPE.Config(dim=dim // heads, max_seq_len=64, theta=10_000),
            attn_backend="flex",
        ),
    )
    for layer in config.layers:  # flex attention does not train on CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    return model


def parallel(backend: str, world: int, tensor_parallel: int) -> tuple[Any, Any]:
    """A model as their trainer prepares it, and its dims."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.models.llama3 import Llama3Model, parallelize_llama
    from torchtitan.models.llama3.sharding import set_llama3_sharding_config

    build, shards = Llama3Model.Config.build, world // tensor_parallel

    def build_with_shardings(config: Any) -> Any:
        set_llama3_sharding_config(config, enable_sp=False)
        return build(config)

    parallelism = ParallelismConfig(
        spmd_backend=backend,
        data_parallel_shard_degree=shards,
        tensor_parallel_degree=tensor_parallel,
    )
    dims = ParallelDims.from_config(parallelism, world)
    with (
        patch.object(Llama3Model.Config, "build", build_with_shardings),
        patch.object(parallel_dims, "device_type", "cpu"),  # without an accelerator they say cuda
    ):
        model = parallelize_llama(
            decoder(tied=False),
            parallel_dims=dims,
            training=TrainingConfig(mixed_precision_param="float32"),
            parallelism=parallelism,
            compile_config=CompileConfig(enable=False),
            ac_config=None,
            dump_folder="",
        )
    return model, dims


def train(model: Any, rank: int | None, dims: Any = None) -> dict[str, Any]:
    from torchtitan.distributed.full_dtensor import parallelize_inputs
    from torchtitan.distributed.utils import clip_grad_norm_

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    tokens = torch.stack([row["input_ids"] for row in samples(STEPS * 4 * ROWS, LENGTH)])
    is_full = dims is not None and dims.spmd_backend == "full_dtensor"
    parts, same = (dims.dp_shard, dims.tp) if dims else (2, 1)
    losses, norms = [], []
    for batch in tokens.chunk(STEPS):
        rows = batch if rank is None else batch.chunk(parts)[rank // same]
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        if is_full:
            x, y, _ = parallelize_inputs(dims, x, y, {})
        logits = model(x).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, y.flatten(), reduction="sum")
        loss = loss / batch[:, 1:].numel()
        loss.backward()
        norms.append(full(clip_grad_norm_(model.parameters(), MAX_NORM)).item())
        total = full(loss).clone()
        if rank is not None and not is_full:
            dist.all_reduce(total)
        losses.append(total.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "norms": norms, "weights": whole(model)}


def same_as_plain(ours: dict[str, Any], *, tied: bool) -> None:
    assert min(ours["norms"]) > MAX_NORM, ours["norms"]
    for key, want in train(decoder(tied=tied), None).items():
        same_numbers(ours[key], want, tolerance=1e-5 if key != "weights" else 1e-4)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("policy", ["default", "always", "never"])
@on_ranks(2, timeout_s=300.0)
def test_train(tied: bool, policy: str, rank: int) -> None:
    with using("ours"):
        from torchtitan.distributed.fsdp import apply_fsdp_to_decoder

        model = decoder(tied=tied)
        apply_fsdp_to_decoder(
            model,
            init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)),
            param_dtype=torch.float32,
            reduce_dtype=torch.float32,
            pp_enabled=False,
            reshard_after_forward_policy=policy,
        )
        assert len(sharded_by(model, "ours")) >= 5
        ours = train(model, rank)
    same_as_plain(ours, tied=tied)


@pytest.mark.parametrize("backend", ["partial_dtensor", "full_dtensor"])
@on_ranks(2, timeout_s=300.0)
def test_parallelize_llama(backend: str, rank: int, world: int) -> None:
    with using("ours"):
        model, dims = parallel(backend, world, 1)
        assert len(sharded_by(model, "ours")) >= 5
        ours = train(model, rank, dims)
    same_as_plain(ours, tied=False)


@on_ranks(4, timeout_s=300.0)
def test_parallelize_llama_with_tensor_parallelism(rank: int, world: int) -> None:
    with using("ours"):
        model, dims = parallel("full_dtensor", world, 2)
        assert len(sharded_by(model, "ours")) >= 5
        ours = train(model, rank, dims)
    same_as_plain(ours, tied=False)
