"""The training job on a Ray cluster, by Ray Train:

    pip install "shardwise[hf,ray]"
    python examples/launch/ray_train.py --workers 16 --gpu job.toml --run.dir /shared/runs/job

Each worker starts one rank, with torchrun's variables. The run directory lies on storage that all
workers see: when one is lost, Ray starts all of them again, and the job goes on from its newest
checkpoint. See docs/launching.md.
"""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
from typing import Any

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchTrainer


def run_rank(config: dict[str, Any]) -> None:
    """In each worker. Ray's own process group agrees on where the ranks meet."""
    place, meeting = get_context(), [free_address()]
    dist.broadcast_object_list(meeting, src=0)
    host, port = meeting[0]
    variables = {
        "RANK": place.get_world_rank(),
        "WORLD_SIZE": place.get_world_size(),
        "LOCAL_RANK": place.get_local_rank(),
        "LOCAL_WORLD_SIZE": place.get_local_world_size(),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, "-m", "shardwise.train", *config["arguments"]]
    subprocess.run(command, env=environment, check=True)


def free_address() -> tuple[str, int]:
    with socket.socket() as found:
        found.bind(("", 0))
        return ray.util.get_node_ip_address(), found.getsockname()[1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--max-failures", type=int, default=3)
    own, arguments = parser.parse_known_args()
    TorchTrainer(
        run_rank,
        train_loop_config={"arguments": arguments},
        scaling_config=ScalingConfig(num_workers=own.workers, use_gpu=own.gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=own.max_failures)),
    ).fit()
