"""Writes tests/checkpoint/deepspeed_zero3 with DeepSpeed itself (0.19.8).

    DS_ACCELERATOR=cpu torchrun --nproc-per-node 2 make_deepspeed_fixture.py DIRECTORY

Not part of the tests: DeepSpeed is in no requirement. `expected_weights.pt` beside the files is
what DeepSpeed's own zero_to_fp32 makes of them.
"""

import sys

import deepspeed
import deepspeed.comm.torch
import torch
import torch.nn as nn

deepspeed.comm.torch.build_shm_op = lambda: None  # would be compiled


class Small(nn.Module):
    """Uneven sizes, a buffer, a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)
        self.register_buffer("count", torch.arange(3.0))
        self.frozen = nn.Parameter(torch.arange(6.0).reshape(2, 3), requires_grad=False)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).sum() + 0 * self.frozen.sum()


torch.manual_seed(0)
model = Small()
config = {
    "train_micro_batch_size_per_gpu": 2,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}
trainable = [p for p in model.parameters() if p.requires_grad]
engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
for _ in range(2):
    engine.backward(engine(torch.ones(2, 5, dtype=torch.bfloat16)))
    engine.step()
engine.save_checkpoint(sys.argv[1], tag="global_step2")
