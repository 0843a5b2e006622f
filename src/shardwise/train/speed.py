"""How much of the device's arithmetic a step uses (MFU), where its peak is known.

A token costs 6 operations per parameter that multiplies it: 2 in the forward, 4 in the backward.
Embedding tables that are no head multiply nothing; attention, recomputation and the optimizer count
not, and of a mixture of experts all experts count. Source: PaLM (Chowdhery et al. 2022,
arXiv 2204.02311), appendix B, without its term for attention. Peaks are the vendors' for dense
products without sparsity. A CPU has none that means anything.
"""

from __future__ import annotations

import torch
from torch import nn

# Part of the device's name -> peak in bfloat16 and in float32 (by TF32 only where torch is told to
# use it, so of plain float32), in operations a second. The first that fits counts.
_PEAKS: tuple[tuple[str, float, float], ...] = (
    ("B200", 2.25e15, 75e12),
    ("H200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("A100", 312e12, 19.5e12),
    ("A10G", 70e12, 35e12),
    ("L40S", 362e12, 91.6e12),
    ("L4", 121e12, 30.3e12),
    ("MI300X", 1.307e15, 163.4e12),
    ("MI250X", 383e12, 95.7e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Of a device, by its name; None where it is not known."""
    for part, in_bf16, in_fp32 in _PEAKS:
        if part in device_name:
            return in_bf16 if dtype == "bfloat16" else in_fp32
    return None


def device_peak(device: torch.device, dtype: str) -> float | None:
    if device.type != "cuda":
        return None
    return peak_flops(torch.cuda.get_device_name(device), dtype)


def flops_per_token(model: nn.Module) -> int:
    """Of a forward and backward; frozen parameters have no gradient of their own."""
    tables = {
        id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)
    }
    heads = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)}
    idle = sum(size for table, size in tables.items() if table not in heads)
    params = ((p.numel(), 6 if p.requires_grad else 4) for p in model.parameters())
    return sum(size * cost for size, cost in params) - 6 * idle
