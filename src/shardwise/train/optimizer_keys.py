"""The optimizers of torch.optim that a job knows: their own keys, or why a job cannot use them.

A copy of the constructors' signatures, so that a configuration is checked before torch is imported;
a test compares it with torch's. Left out are `lr`, which the schedule sets, and how steps are
computed (foreach, fused, capturable, differentiable), which the job chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.train.options import nearest

_ADAM = {
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False, "maximize": False
}  # fmt: skip
_NESTEROV = {
    "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "decoupled_weight_decay": False,
    "maximize": False,
}  # fmt: skip

# Configuration's name -> torch's name, and key -> torch's default.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adadelta": (
        "Adadelta",
        {"rho": 0.9, "eps": 1e-6, "weight_decay": 0.0, "maximize": False},
    ),
    "adafactor": (
        "Adafactor",
        {
            "beta2_decay": -0.8, "eps": (None, 1e-3), "d": 1.0, "weight_decay": 0.0,
            "maximize": False,
        },
    ),
    "adagrad": (
        "Adagrad",
        {
            "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10,
            "maximize": False,
        },
    ),
    "adam": ("Adam", {**_ADAM, "decoupled_weight_decay": False}),
    "adamax": ("Adamax", {k: v for k, v in _ADAM.items() if k != "amsgrad"}),
    "adamw": ("AdamW", {**_ADAM, "weight_decay": 0.01}),
    "asgd": (
        "ASGD",
        {"lambd": 1e-4, "alpha": 0.75, "t0": 1e6, "weight_decay": 0.0, "maximize": False},
    ),
    "muon": (
        "Muon",
        {
            "weight_decay": 0.1, "momentum": 0.95, "nesterov": True,
            "ns_coefficients": (3.4445, -4.775, 2.0315), "eps": 1e-7, "ns_steps": 5,
        },
    ),
    "nadam": ("NAdam", {**_NESTEROV, "momentum_decay": 4e-3}),
    "radam": ("RAdam", _NESTEROV),
    "rmsprop": (
        "RMSprop",
        {
            "alpha": 0.99, "eps": 1e-8, "weight_decay": 0.0, "momentum": 0.0, "centered": False,
            "maximize": False,
        },
    ),
    "rprop": ("Rprop", {"etas": (0.5, 1.2), "step_sizes": (1e-6, 50.0), "maximize": False}),
    "sgd": (
        "SGD",
        {
            "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False,
            "maximize": False,
        },
    ),
}  # fmt: skip

REFUSED = {
    "lbfgs": "computes the loss several times a step (it needs a closure)",
    "sparseadam": "expects sparse gradients, which a sharded parameter does not have",
}

# Steps of whole tensors, by their owners (`shardwise.OwnedOptimizer`).
OF_WHOLES = ("adafactor", "muon")
CHOSEN_BY_THE_JOB = ("foreach", "fused", "capturable", "differentiable", "adjust_lr_fn")


def takes(kind: str, key: str) -> bool:
    return key in OPTIMIZERS[kind][1] or (kind == "muon" and key == "betas")  # AdamW beside it


def num_states(kind: str, own: Mapping[str, Any]) -> int:
    """Tensors of a parameter's size that the optimizer keeps, with these keys of its own; at most,
    where it keeps less of matrices (Adafactor, Muon).
    """
    if kind == "sgd":
        return int(bool(own.get("momentum")))
    if kind == "rmsprop":
        return 1 + bool(own.get("momentum")) + bool(own.get("centered"))
    return {"adafactor": 1, "adagrad": 1, "asgd": 1}.get(kind, 2) + bool(own.get("amsgrad"))


def kind_problem(kind: str) -> str:
    """Why `optim.kind` cannot be that; empty if it can."""
    if kind in OPTIMIZERS:
        return ""
    if kind in REFUSED:
        return f"{kind} {REFUSED[kind]}; use one of {', '.join(OPTIMIZERS)}"
    hint = nearest(kind, OPTIMIZERS) or f"there are {', '.join(OPTIMIZERS)}"
    return f"{kind!r} is no optimizer of torch.optim that a job knows; {hint}"


def own_value(kind: str, name: str, value: Any, common: Iterable[str]) -> Any:
    """The value of an optimizer's own key, as its constructor takes it; ValueError says what is
    wrong. `common`: keys that all kinds have."""
    keys = OPTIMIZERS[kind][1]
    if name not in keys:
        if name in CHOSEN_BY_THE_JOB:
            raise ValueError("is chosen by the job; leave it out")
        others = [k for k, (_, own) in OPTIMIZERS.items() if name in own]
        if others:
            raise ValueError(f"belongs to optim.kind = {' or '.join(others)}, not to {kind}")
        hint = nearest(name, [*keys, *common]) or f"{kind} has {', '.join(keys)}"
        raise ValueError(f"unknown key for optim.kind = {kind!r}; {hint}")
    default = keys[name]
    if isinstance(default, bool):
        if isinstance(value, bool):
            return value
        raise ValueError(f"expected true or false, found {value!r}")
    if isinstance(default, int):
        if type(value) is int and value > 0:
            return value
        raise ValueError(f"expected a whole number from 1, found {value!r}")
    if isinstance(default, tuple):
        if isinstance(value, list | tuple) and len(value) == len(default):
            return tuple(_number(part) for part in value)
        raise ValueError(f"expected a list of {len(default)} numbers, found {value!r}")
    return _number(value)


def _number(value: Any) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise ValueError(f"expected a number, found {value!r}")
