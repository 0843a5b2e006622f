"""Lightning's `ModelParallelStrategy` under `install()`: `configure_model` calls `fully_shard`.

Compared with the same program over torch's `fully_shard` (see trainers_kit.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from trainers_kit import (
    ENGINES,
    TOLERANCE,
    llama,
    mean_over_ranks,
    same_numbers,
    samples,
    sharded_by,
    using,
    whole,
)

from ranks import on_ranks

pytest.importorskip("lightning", reason="the extra 'integrations' is not installed")

STEPS = 4


def module_of(seed: int) -> Any:
    """A Lightning module as their documentation has it."""
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.model: Any = None

        def configure_model(self) -> None:
            from torch.distributed.fsdp import fully_shard

            if self.model is not None:
                return
            self.model = llama(seed=seed)
            mesh = self.device_mesh["data_parallel"]
            for layer in self.model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(mean_over_ranks(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)

    return Module()


def trainer_of(folder: Path, steps: int, **options: Any) -> Any:
    import lightning as L
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    return L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, **options),
        plugins=[TorchElasticEnvironment()],
        max_steps=steps,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def program(engine: str, folder: Path, **options: Any) -> list[Any]:
    """Train, save, train on; then the second half once more, from the file."""
    loader = torch.utils.data.DataLoader(samples(4 * 2 * STEPS), batch_size=2)  # type: ignore[arg-type]
    half = STEPS // 2
    with using(engine):
        module, trainer = module_of(0), trainer_of(folder, half, **options)
        trainer.fit(module, loader)
        assert len(sharded_by(module, engine)) == 3
        trainer.save_checkpoint(folder / "state.ckpt")
        trainer.fit_loop.epoch_loop.max_steps = STEPS
        first = list(module.losses)
        early = whole(module.model)
    with using(engine):
        again, trainer = module_of(1), trainer_of(folder, STEPS, **options)
        trainer.fit(again, loader, ckpt_path=folder / "state.ckpt", weights_only=False)
        return [first, again.losses, early, whole(again.model)]


@pytest.mark.parametrize("distributed", [True, False], ids=["folder", "file"])
@on_ranks(2, timeout_s=300.0)
def test_fit_save_and_resume(distributed: bool, tmp_path: Path) -> None:
    options = {"save_distributed_checkpoint": distributed}
    torchs, ours = [program(engine, tmp_path / engine, **options) for engine in ENGINES]
    assert len(ours[1]) == STEPS, "two micro-batches for each step of the second half"
    for got, want in zip(ours, torchs, strict=True):
        same_numbers(got, want, tolerance=TOLERANCE)
