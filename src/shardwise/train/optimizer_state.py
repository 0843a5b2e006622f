"""What an optimizer keeps beside each parameter, and in which dtype: `optim.state_dtype`.

    param       as torch makes it: in the dtype of the parameter
    bfloat16    half of that beside float32 parameters, where the optimizer's kernel takes it

Which kernels do is asked of the kernels: two steps of a parameter of three elements, of the job's
dtype and device, have to come out as with state in the parameter's dtype, up to the rounding of
bfloat16. In the job each parameter gets its state right before its first step: torch's own initial
values, in bfloat16 from the start, so that there is never more of it in float32 than a number.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwise.errors import ConfigError
from shardwise.offload import OffloadedOptimizer
from shardwise.train.config import OptimConfig, own_keys
from shardwise.train.optimizer_keys import OF_WHOLES, OPTIMIZERS, num_states

_TRIED = 3  # elements of the parameter that is stepped for trial
_STEPS = 2  # the second is the first that reads what a step has written
_TOLERANCE = 0.05  # of what two steps change: bfloat16 has 8 bits, so 0.4% a rounding, a few times


def in_bfloat16(optim: OptimConfig) -> bool:
    return optim.state_dtype == "bfloat16" and num_states(optim.kind, own_keys(optim)) > 0


def with_bfloat16(cls: Any, groups: list[dict[str, Any]], **how: Any) -> Optimizer:
    """An optimizer without any state, in which a parameter gets its own, in bfloat16, right before
    its first step."""
    optimizer = without_state(cls, groups, **how)
    optimizer.register_step_pre_hook(lambda self, args, kwargs: _give_state(self))
    return optimizer


def without_state(cls: Any, groups: list[dict[str, Any]], **how: Any) -> Optimizer:
    """An optimizer of which parameters have no state yet, whatever its constructor makes."""
    first = groups[0]["params"][0]
    # Adagrad makes state when it is built, of the parameters that it is built with.
    optimizer: Optimizer = cls([_small(first.dtype, first.device)], **how)
    optimizer.param_groups.clear()
    optimizer.state.clear()
    for group in groups:
        optimizer.add_param_group(group)
    return optimizer


def first_in_bfloat16(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """The state of a parameter before its first step, in bfloat16."""
    made = initial_state(optimizer, group, _small(parameter.dtype, parameter.device))
    return {name: _alike(value, parameter) for name, value in made.items()}


def _give_state(optimizer: Optimizer) -> None:
    """To the parameters that are about to be stepped for the first time."""
    for group in optimizer.param_groups:
        new = [p for p in group["params"] if p.grad is not None and not optimizer.state.get(p)]
        like = {(p.dtype, p.device) for p in new}
        kinds = {key: initial_state(optimizer, group, _small(*key)) for key in like}
        for parameter in new:
            made = kinds[parameter.dtype, parameter.device]
            optimizer.state[parameter] = {k: _alike(v, parameter) for k, v in made.items()}


def initial_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor
) -> dict[str, Any]:
    """The state that an optimizer of torch.optim makes for a parameter with a gradient before its
    first step. The public `step` makes it and steps at once, so `_init_group` is called."""
    cls: Any = type(optimizer)
    taken = [key for key in inspect.signature(cls).parameters if key in group and key != "params"]
    made = cls([parameter], **{key: group[key] for key in taken})
    lists = len(inspect.signature(made._init_group).parameters) - 1  # that it would fill for `step`
    made._init_group(made.param_groups[0], *([] for _ in range(lists)))
    state = dict(made.state[parameter])
    if group.get("momentum") and not state:  # SGD makes it of the first gradient
        state = {"momentum_buffer": torch.zeros_like(parameter)}
    return state


def _small(dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    made = nn.Parameter(torch.linspace(0.5, 2.0, _TRIED, dtype=dtype, device=device))
    made.grad = torch.linspace(-1.0, 1.5, _TRIED, dtype=dtype, device=device)
    return made


@torch.no_grad()
def _alike(value: Any, parameter: Tensor) -> Any:
    """A slot of the small parameter for a real one: of its shape and in bfloat16, or a copy."""
    if not _is_slot(value, (_TRIED,)):
        return value.clone() if isinstance(value, Tensor) else value
    # As checkpoints make slots: laid out like the parameter.
    made = torch.zeros_like(parameter, dtype=torch.bfloat16, requires_grad=False).detach()
    return made.fill_(float(value[0])) if value.any() else made


def _is_slot(value: Any, shape: Iterable[int]) -> bool:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return is_floating and tuple(value.shape) == tuple(shape)


@torch.no_grad()
def bring_to_dtype(optimizer: Optimizer, optim: OptimConfig) -> int:
    """State that was loaded, in the dtype that the configuration has now; how many tensors were in
    another one."""
    changed = 0
    if optim.kind in OF_WHOLES or isinstance(optimizer, OffloadedOptimizer):
        return changed  # what it keeps has a dtype of its own, into which all is read
    for parameter, slots in optimizer.state.items():
        wanted = torch.bfloat16 if in_bfloat16(optim) else parameter.dtype
        for name, value in slots.items():
            if parameter.ndim and _is_slot(value, parameter.shape) and value.dtype != wanted:
                slots[name] = value.to(wanted)
                changed += 1
    return changed


# -- asking the kernel ---------------------------------------------------------------------------
def way_with_bfloat16(
    optim: OptimConfig,
    dtypes: Iterable[torch.dtype],
    device: torch.device,
    ways: Iterable[Mapping[str, bool]],
) -> Mapping[str, bool]:
    """The first of the ways to compute steps whose kernel takes bfloat16 state; ConfigError where
    none does."""
    wanted, reasons = sorted(set(dtypes), key=str), []
    for way in ways:
        why = next(filter(None, (_refusal(optim.kind, own_keys(optim), d, device, way)
                                 for d in wanted)), "")  # fmt: skip
        if not why:
            return way
        reasons.append(why)
    names = " and ".join(str(d).removeprefix("torch.") for d in wanted)
    others = [
        kind
        for kind in OPTIMIZERS
        if kind != optim.kind and kind not in OF_WHOLES and num_states(kind, _default_keys(kind))
        if not any(_refusal(kind, _default_keys(kind), d, device, {}) for d in wanted)
    ]
    raise ConfigError(
        f"optim.state_dtype: optim.kind = {optim.kind!r} takes no bfloat16 state beside {names} "
        f"parameters on {device.type} ({reasons[-1]}); leave it out"
        + (f", or use one that does: {', '.join(others)}" if others else "")
    )


def _default_keys(kind: str) -> dict[str, Any]:
    return {"momentum": 0.9} if kind == "sgd" else {}


def _refusal(
    kind: str,
    keys: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    way: Mapping[str, bool],
) -> str:
    """Why the kernel does not take it; empty where it does."""
    if kind == "sgd" and keys.get("dampening"):
        return "with dampening the first momentum is the gradient, not zero"
    try:
        plain, halved = (_stepped(kind, keys, dtype, device, way, half) for half in (False, True))
    except ValueError as error:  # a number that the optimizer refuses
        raise ConfigError(f"optim.kind: {kind} says: {error}") from None
    except RuntimeError as error:  # NotImplementedError too
        return f"torch: {str(error).splitlines()[0]}" if str(error) else type(error).__name__
    start = _small(dtype, device).detach()
    largest = float((plain - start).abs().max())
    if not float((plain - halved).abs().max()) <= _TOLERANCE * largest:
        return f"its steps come out otherwise: {halved.tolist()} in place of {plain.tolist()}"
    return ""


def _stepped(
    kind: str,
    keys: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    way: Mapping[str, bool],
    half: bool,
) -> Tensor:
    """The small parameter behind two steps."""
    parameter = _small(dtype, device)
    cls: Any = getattr(torch.optim, OPTIMIZERS[kind][0])
    groups: list[dict[str, Any]] = [{"params": [parameter]}]
    how = {"lr": 0.01, **keys, **way}
    optimizer: Optimizer = with_bfloat16(cls, groups, **how) if half else cls(groups, **how)
    for _ in range(_STEPS):
        optimizer.step()
    return parameter.detach()
