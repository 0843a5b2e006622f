"""What is said where an operator cannot work on sharded tensors."""

from __future__ import annotations

from typing import Any

import torch

from shardwise._torch_compat import in_parametrization


def mixed_text(func: Any, originals: dict[int, Any], args: Any) -> str:
    """A shard met a plain tensor, or the whole form of a parameter that was left gathered."""
    names = sorted({t._param_name for t in originals.values() if t._param_name}) or [
        "a sharded tensor"
    ]
    homes = [(a, home()) for a in args if (home := getattr(a, "_shardwise_home", None)) is not None]
    whole = [
        a for a, home in homes if getattr(home, "full", None) is a and not home.unit().context.depth
    ]
    if whole:
        return (
            f"{', '.join(names)}: {func.name()} met a sharded parameter and the whole form of one "
            f"of shape {tuple(whole[0].shape)}, whose unit is gathered: its forward ran with "
            "gradients and no backward followed. Call reshard() on that model before, or run its "
            "forward under torch.no_grad()"
        )
    if func is torch.ops.aten.copy_.default and id(args[0]) not in originals:
        return (
            f"{', '.join(names)}: a plain tensor of shape {tuple(args[0].shape)} should take the "
            "values of a sharded one, of which this rank has its rows only (a state dict of a "
            "sharded model, loaded into a plain one?). Pass .full_tensor(), which all ranks call; "
            "or load what shardwise.full_parameters, save_pretrained or "
            "get_model_state_dict(..., StateDictOptions(full_state_dict=True)) have gathered"
        )
    if in_parametrization():
        return (
            f"{', '.join(names)}: {func.name()} of a parametrization would write, from shards, to "
            "a tensor of its own. Read or remove it in evaluation mode, or before fully_shard"
        )
    return (
        f"{', '.join(names)}: {func.name()} met a sharded parameter and a plain tensor. The "
        f"parameter is sharded "
        "because its unit is not running: call the module itself, register the method that you "
        "called with "
        "shardwise.register_fsdp_forward_method(module, 'method'), or call module.unshard() "
        "before; to compute with "
        "sharded tensors, make the other operand a DTensor too"
    )


def uneven_text(func: Any, originals: dict[int, Any]) -> str:
    """Rows that are cut unevenly cannot be flattened."""
    t = next(iter(originals.values()))
    return (
        f"{t._param_name or 'a sharded tensor'}: {func.name()} would join the rows of "
        f"{tuple(t.shape)}, which are cut unevenly ({t.placements} over {t.device_mesh.size()} "
        "ranks); the flat tensor has no even cut. torch.optim.LBFGS and parameters_to_vector need "
        "parameters whose sharded dim the number of ranks divides: pad it, shard another dim "
        "(shard_placement_fn), use strategy='no_shard', or flatten .full_tensor() (a copy: writes "
        "to it change nothing)"
    )


def no_rule_note(func: Any, originals: dict[int, Any]) -> str:
    """DTensor's own error follows it."""
    names = sorted({t._param_name for t in originals.values() if t._param_name})
    return (
        f"{', '.join(names) or 'a sharded tensor'}: torch's DTensor cannot do {func.name()} on "
        "shards like these; do it before fully_shard, or on .full_tensor() and copy_ it back"
    )
