"""Data parallel by hand, on the simulated device: gradients are averaged on a stream beside the
backward.

    torchrun --nproc-per-node 2 tests/simulated_device/worked_example.py
    torchrun --nproc-per-node 2 tests/simulated_device/worked_example.py --forget-to-wait
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import simulated_device


def train(waits: bool) -> list[torch.Tensor]:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to("sim")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    side = torch.sim.Stream()
    simulated_device.name_stream(side, "averaging")

    def average(parameter: torch.Tensor) -> None:
        side.wait_stream(torch.sim.current_stream())
        with torch.sim.stream(side):
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(average)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(8, 32, generator=generator).to("sim")
        model(x).square().mean().backward()
        if waits:
            torch.sim.current_stream().wait_stream(side)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return [parameter.detach().cpu() for parameter in model.parameters()]


if __name__ == "__main__":
    simulated_device.load()
    dist.init_process_group("cpu:gloo,sim:simccl")
    simulated_device.slow_down(500, seed=dist.get_rank())
    train(waits="--forget-to-wait" not in sys.argv)
    found = simulated_device.report()
    if dist.get_rank() == 0:
        print(f"{len(found.races)} races, {found.num_host_waits} waits of the host")
        print("\n".join(found.races[:1]))
    dist.destroy_process_group()
    sys.exit(1 if found.races else 0)
