"""Any optimizer of torch.optim, with parameter groups by the rule of what does not decay.

optim.no_decay    bias         parameters named bias
                  norm         other parameters with fewer than two dims: scales of norms
                  embedding    weights of nn.Embedding, also where the head is tied to them
                  a pattern    of parameters' names: "*.gate.weight"

Muon steps the matrices (and stacks of them) of the layers; AdamW the rest, and what `optim.adamw`
says: the weights of nn.Embedding, of the head, patterns of names. Both have one learning rate, to
which Muon's is scaled (`match_rms_adamw`; Liu et al. 2025, arXiv 2502.16982).
"""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardwise.errors import ConfigError, OffloadError
from shardwise.offload import OffloadedOptimizer
from shardwise.owned import OwnedOptimizer
from shardwise.train.config import Config, OptimConfig, chunk_bytes, own_keys
from shardwise.train.decoder import Decoder
from shardwise.train.optimizer_keys import OF_WHOLES, OPTIMIZERS, takes
from shardwise.train.optimizer_state import (
    first_in_bfloat16,
    in_bfloat16,
    way_with_bfloat16,
    with_bfloat16,
    without_state,
)
from shardwise.train.together import Together


def build_optimizer(
    model: nn.Module, config: OptimConfig, *, fused: bool = True, whole: Config | None = None
) -> torch.optim.Optimizer:
    """The optimizer of [optim] over all trainable parameters, in groups that decay and do not;
    with [offload] as the `whole` configuration has it.

    Fused on CPU, the last elements of a parameter round differently, so where it is cut matters.
    """
    kind = config.kind
    cls = getattr(torch.optim, OPTIMIZERS[kind][0])
    keys = dict(own_keys(config))
    if takes(kind, "betas"):
        keys["betas"] = config.betas
    device = next(model.parameters()).device
    way = way_of(model, config, device, fused=fused)
    try:
        if kind == "muon":
            return _muon_and_adamw(model, config, way)
        if kind in OF_WHOLES:
            return OwnedOptimizer(_groups(model, config), cls, lr=config.lr, **keys)
        if whole is not None and whole.offload.optimizer != "none":
            inner = without_state(cls, _groups(model, config), lr=config.lr, **keys, **way)
            return _offloaded(inner, whole)
        build = functools.partial(with_bfloat16, cls) if in_bfloat16(config) else cls
        return build(_groups(model, config), lr=config.lr, **keys, **way)
    except OffloadError as error:
        raise ConfigError(f"offload.directory: {error}") from None
    except (ValueError, RuntimeError) as error:  # a number that the optimizer refuses
        raise ConfigError(f"optim.kind: {kind} says: {error}") from None


def _offloaded(optimizer: torch.optim.Optimizer, config: Config) -> OffloadedOptimizer:
    """With room for all of its state, which may take a while to show that there is none."""
    section = config.offload
    made = OffloadedOptimizer(
        optimizer,
        state=section.optimizer,
        directory=section.directory or None,
        step_on=section.step_on,
        chunk_bytes=chunk_bytes(config) or 0,
        first_state=first_in_bfloat16 if in_bfloat16(config.optim) else None,
        in_background=section.in_background,
    )
    made.reserve()
    return made


def _muon_and_adamw(
    model: nn.Module, config: OptimConfig, way: Mapping[str, bool]
) -> torch.optim.Optimizer:
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    named = {n for rule in config.adamw for n in _matching(model, trainable, rule, "optim.adamw")}
    matrices = {n: p for n, p in trainable.items() if p.ndim in (2, 3) and n not in named}
    if not matrices:
        raise ConfigError(
            "optim.kind: muon has no matrix to step: all trainable parameters are those of "
            f"optim.adamw ({', '.join(config.adamw)}), or have other than 2 dims; use adamw"
        )
    muon = OwnedOptimizer(
        _groups(model, config, matrices), torch.optim.Muon, lr=config.lr,
        adjust_lr_fn="match_rms_adamw", **own_keys(config),
    )  # fmt: skip
    rest = {n: p for n, p in trainable.items() if n not in matrices}
    if not rest:
        return muon
    groups = _groups(model, config, rest)
    return Together([muon, torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, **way)])


def way_of(
    model: nn.Module, config: OptimConfig, device: torch.device, *, fused: bool
) -> Mapping[str, bool]:
    """How steps are computed: fused where there is such a kernel, since the plain loop takes
    several times as long on CPU (see benchmarks/README.md). ConfigError where `optim.state_dtype`
    is nothing for it."""
    cls = getattr(torch.optim, OPTIMIZERS[config.kind][0])
    cls = torch.optim.AdamW if config.kind == "muon" else cls  # beside it
    ways = [{"foreach": True}]
    on_cpu = device.type == "cpu"
    has_fused = "fused" in inspect.signature(cls).parameters
    dtypes = {p.dtype for p in model.parameters() if p.requires_grad}
    if on_cpu and cls is torch.optim.SGD and min(d.itemsize for d in dtypes or [torch.float32]) < 4:
        has_fused = False  # torch 2.13: its kernel keeps another momentum for 16 bits
    if fused and has_fused and (on_cpu or cls is not torch.optim.Adagrad):
        ways.insert(0, {"fused": True})
    if not in_bfloat16(config):
        return ways[0]
    return way_with_bfloat16(config, dtypes, device, ways)


def _groups(
    model: nn.Module, config: OptimConfig, chosen: Mapping[str, nn.Parameter] | None = None
) -> list[dict[str, object]]:
    """Of all trainable parameters, or of those that were chosen."""
    trainable = {n: p for n, p in model.named_parameters() if p.requires_grad}
    every, trainable = trainable, dict(chosen) if chosen is not None else trainable
    if not takes(config.kind, "weight_decay"):
        return [{"params": list(trainable.values())}]
    spared = {n for rule in config.no_decay for n in _matching(model, every, rule)}
    parts = {
        config.weight_decay: [p for name, p in trainable.items() if name not in spared],
        0.0: [p for name, p in trainable.items() if name in spared],
    }
    if config.weight_decay == 0:
        return [{"params": list(trainable.values()), "weight_decay": 0.0}]
    return [{"params": ps, "weight_decay": decay} for decay, ps in parts.items() if ps]


def _matching(
    model: nn.Module, params: Mapping[str, nn.Parameter], rule: str, key: str = "optim.no_decay"
) -> set[str]:
    """The names of parameters that a rule means."""
    if rule == "head" and key == "optim.adamw":
        heads = {id(p) for module in _heads(model) for p in module.parameters()}
        return {name for name, p in params.items() if id(p) in heads}
    biases = {name for name in params if name.rpartition(".")[2] == "bias"}
    if rule == "bias":
        return biases
    if rule == "norm":
        return {name for name, p in params.items() if p.ndim < 2} - biases
    if rule == "embedding":
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        return {name for name, p in params.items() if id(p) in tables}
    found = {name for name in params if fnmatch.fnmatchcase(name, rule)}
    if not found:
        raise ConfigError(
            f"{key}: {rule!r} is neither bias, norm nor embedding, and no trainable "
            f"parameter has such a name; there are {', '.join(list(params)[:4])}, ..."
        )
    return found


def _heads(model: nn.Module) -> list[nn.Module]:
    """What makes the logits: of transformers, or the built-in decoder's."""
    if isinstance(model, Decoder):
        return [model.output]
    asked: Any = getattr(model, "get_output_embeddings", None)
    found = asked() if asked is not None else None
    return [found] if isinstance(found, nn.Module) else []
