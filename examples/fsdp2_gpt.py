"""A training script for torch's FSDP2, as people write them: it knows nothing of shardwise.

A small GPT on bytes: layers sharded one by one, bf16 or fp32, gradient clipping, accumulation,
checkpoints with torch.distributed.checkpoint. Run it with torch's engine or, unchanged, with
shardwise:

    torchrun --nproc-per-node 2 examples/fsdp2_gpt.py --steps 20
    torchrun --nproc-per-node 2 -m shardwise.install examples/fsdp2_gpt.py --steps 20

With `--checkpoint DIR` it saves at the end, and goes on from there when it is started again.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(args: argparse.Namespace, mesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(args.seed)
    model = GPT(256, args.dim, args.layers, heads=4, length=args.length).to(mesh.device_type)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if args.bf16 else None, reduce_dtype=torch.float32
    )
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    return model, torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)


def batch(args: argparse.Namespace, data: torch.Tensor, step: int, part: int) -> torch.Tensor:
    """This rank's rows of a micro-batch."""
    seed = 1000 * step + dist.get_world_size() * part + dist.get_rank()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - args.length - 1, (args.rows,), generator=generator)
    return torch.stack([data[s : s + args.length + 1] for s in starts.tolist()])


def train_step(args, model, optimizer, data, step, device) -> tuple[float, float]:
    total = torch.zeros((), device=device)
    for part in range(args.accumulate):
        model.set_requires_gradient_sync(part == args.accumulate - 1)
        tokens = batch(args, data, step, part).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss / args.accumulate).backward()
        total += loss.detach() / args.accumulate
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    if hasattr(norm, "full_tensor"):
        norm = norm.full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size(), norm.item()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps that the checkpoint has seen; 0 when there is none."""
    if not (path / ".metadata").exists():
        return 0
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return state["step"]


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("steps", 20), ("rows", 4), ("length", 64), ("dim", 64), ("layers", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--accumulate", type=int, default=2, help="micro-batches a step")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--checkpoint", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    on_gpu = torch.cuda.is_available()
    device = torch.device(
        "cuda" if on_gpu else "cpu", int(os.environ["LOCAL_RANK"]) if on_gpu else None
    )
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    model, optimizer = build(args, mesh)
    data = torch.frombuffer(bytearray(Path(__file__).read_bytes()), dtype=torch.uint8).long()
    done = load(args.checkpoint, model, optimizer) if args.checkpoint else 0
    started = time.perf_counter()
    for step in range(done, args.steps):
        loss, norm = train_step(args, model, optimizer, data, step, device)
        if dist.get_rank() == 0:
            print(f"step {step + 1} loss {loss!r} norm {norm!r}", flush=True)
    if dist.get_rank() == 0:
        engine = fully_shard.__module__.partition(".")[0]
        print(f"engine {engine} took {time.perf_counter() - started:.1f} s", flush=True)
    if args.checkpoint:
        save(args.checkpoint, model, optimizer, args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
