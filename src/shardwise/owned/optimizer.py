"""`OwnedOptimizer`: one that needs whole matrices, over parameters of which ranks have rows.

    hidden = [p for p in model.layers.parameters() if p.ndim == 2]
    optimizer = shardwise.OwnedOptimizer(hidden, torch.optim.Muon, lr=0.02)

    gradient rows   rank 0 ---+                       +--> rank 0   rows of the new matrix
                    rank 1 ---+--> owner: whole step --+--> rank 1
                    rank 2 ---+                       +--> rank 2

Each matrix has one owner, who alone keeps its state and steps it, once; owners are chosen so that
ranks have the same work. While they work the rows of their next matrices travel. The step is the
optimizer's own, on whole tensors, so its numbers are those of one process. What travels for each
optimizer step is gradient, parameter and new parameter: 3 / ranks of a gather of everything per
rank, beside the 2 gathers and the reduction of a training step.

A parameter that its owner has whole already (`WholeOn`, `whole_matrices`) does not travel. State is
a `ShardTensor` that lies on the owner, so checkpoints hold it like any other and give it to other
owners, or to even cuts. Idea: the owners of optimizer state in ZeRO-1 (Rajbhandari et al. 2020,
arXiv 1910.02054), and of matrices in distributed Shampoo (Shi et al. 2023, arXiv 2309.06497).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardwise._torch_compat import is_wrapper_subclass, local_of, make_spec
from shardwise.engine.mesh.rows import own_box, part_of
from shardwise.engine.tensor.shard_tensor import ShardTensor, settle, written
from shardwise.errors import EngineError
from shardwise.offload.bare_step import BareStep, set_gradient
from shardwise.offload.kept import gradient_of, local_part_of, name_of
from shardwise.owned.form import Form
from shardwise.owned.pieces import (
    Piece,
    Team,
    cut_of,
    pieces_of,
    stack_part,
    state_placements,
)
from shardwise.owned.step import Step

REFUSED = {
    "LBFGS": "computes the loss several times a step and takes products over all parameters",
    "SparseAdam": "expects sparse gradients, which sharded parameters do not have",
}
Key = tuple[Tensor, int | None]


class OwnedOptimizer(Optimizer):
    """See the module docstring. To torch it is an optimizer like others: schedulers, hooks,
    `zero_grad`, `add_param_group` and state dicts work; `step` is a collective of all ranks.

    Args:
        params: parameters of a sharded model, or groups of them; sharded over one mesh dim, whole
            on every rank (`no_shard`), or plain tensors, which every rank steps by itself.
        optimizer_class: of torch.optim, or one that steps each tensor for itself.
        stacks_are_matrices: a parameter of 3 dims (experts, rows, columns) is stepped as that many
            matrices. By default for `torch.optim.Muon`, which takes matrices only.
        defaults: go to `optimizer_class`.

    Raises:
        ValueError: an optimizer whose step is not one of each tensor for itself, or a parameter
            that is cut over several mesh dims.
    """

    needs_all_ranks = True  # its step is a collective
    steps_whole = True  # whatever the optimizer computes, it does not depend on how it is cut

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: Callable[..., Optimizer],
        *,
        stacks_are_matrices: bool | None = None,
        **defaults: Any,
    ) -> None:
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        if optimizer_class is getattr(torch.optim, name, None) and name in REFUSED:
            raise ValueError(f"{name} {REFUSED[name]}; use another optimizer")
        is_muon = optimizer_class is getattr(torch.optim, "Muon", None)
        self._splits = is_muon if stacks_are_matrices is None else stacks_are_matrices
        groups = _as_groups(params)
        self._teams: dict[Any, Team] = {}
        self._plan: tuple[tuple[Any, ...], list[tuple[Team | None, list[Piece]]]] = ((), [])
        self._groups: dict[int, int] = {}  # of parameters, by id
        self._held: dict[Key, dict[str, Any]] = {}  # by what this rank owns: all its slots
        self._forms: dict[Key, Form] = {}
        self._failure = ""
        inner = optimizer_class([self._in_place_of(g) for g in groups], **defaults)
        self._inner, self._bare = inner, BareStep(inner)
        self._refuse_fewer_bits(name)
        super().__init__(groups, inner.defaults)
        self._pieces()  # what cannot be stepped shows now

    def _refuse_fewer_bits(self, name: str) -> None:
        """Unknown optimizers are tried: owners send values, not codes and scales."""
        if getattr(torch.optim, name, None) is type(self._inner):
            return
        tried = torch.ones(64, 64)
        set_gradient(tried, torch.ones(64, 64))
        try:
            after = self._bare.as_it_is().run(self._bare.only(0, [tried]), {})
        except (
            ArithmeticError,
            AssertionError,
            AttributeError,
            LookupError,
            RuntimeError,
            TypeError,
        ):
            return  # it shows when it is stepped
        for slot, value in after.get(tried, {}).items():
            if isinstance(value, Tensor) and is_wrapper_subclass(value):
                raise ValueError(
                    f"{name} keeps {slot!r} as {type(value).__name__}, which OwnedOptimizer does "
                    "not take; use shardwise.local_view with "
                    "shard_placement_fn=shardwise.whole_blocks(256, least=4096)"
                )

    def __repr__(self) -> str:
        return f"OwnedOptimizer({type(self._inner).__name__}, {super().__repr__()})"

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("an OwnedOptimizer cannot be pickled; its state_dict() can")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        if len(self._inner.param_groups) < len(self.param_groups):
            self._inner.add_param_group(self._in_place_of(self.param_groups[-1]))

    def owners(self) -> dict[str, int]:
        """Which rank of its mesh steps a parameter, or matrix of a stack ("experts.w1[3]")."""
        return {
            name_of(p.parameter) + ("" if p.index is None else f"[{p.index}]"): p.owner
            for team, listed in self._pieces()
            if team is not None
            for p in listed
        }

    # -- stepping --------------------------------------------------------------------------------
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step all parameters that have a gradient, which must be the same on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._failure:
            raise EngineError(
                f"a step of this optimizer has failed ({self._failure}), so some parameters are "
                "stepped and others are not; load the last checkpoint"
            )
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        settle([p.grad for p in held])
        plan = self._pieces(held)
        gradients = {p: gradient_of(p).view(local_part_of(p).shape) for p in held}
        for own, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            inner.update({k: v for k, v in own.items() if k not in ("params", "param_names")})
        for parameter in held:  # in one order on all ranks: owners come to theirs sooner
            self.state[parameter]
        try:
            for team, pieces in plan:
                Step(self, team, gradients).run(pieces)
        except BaseException as error:
            self._failure = str(error) or type(error).__name__
            raise
        finally:
            for parameter in held:
                if isinstance(parameter, ShardTensor):
                    written(parameter)
        return loss

    def _pieces(self, held: list[Tensor] | None = None) -> list[tuple[Team | None, list[Piece]]]:
        """Those of parameters that are to be stepped (all by default), team by team. Owners follow
        from all parameters, whichever of them have a gradient."""
        every = [p for group in self.param_groups for p in group["params"]]
        # Parameters that were made on meta lie elsewhere now.
        known = (*map(id, every), *{local_part_of(p).device for p in every[:1]})
        if self._plan[0] != known:
            self._plan = (known, self._planned(every))
            self._groups = {id(p): i for i, g in enumerate(self.param_groups) for p in g["params"]}
        if held is None or len(held) == len(every):
            return self._plan[1]
        chosen = set(map(id, held))
        found = [(t, [p for p in ps if id(p.parameter) in chosen]) for t, ps in self._plan[1]]
        return [(team, pieces) for team, pieces in found if pieces]

    def _planned(self, every: list[Tensor]) -> list[tuple[Team | None, list[Piece]]]:
        by_team: dict[Any, list[tuple[DTensor, str]]] = {}
        alone: list[Piece] = []
        for parameter in every:
            if not isinstance(parameter, DTensor):
                indices = range(len(parameter)) if self._is_stack(parameter) else [None]
                shape = parameter.shape[1:] if self._is_stack(parameter) else parameter.shape
                alone += [Piece(parameter, i, shape, 0, None, None) for i in indices]
                continue
            mesh_dim, _, _ = cut_of(parameter, name_of(parameter))
            key = (parameter.device_mesh, mesh_dim, local_of(parameter).device)
            if key not in self._teams:
                self._teams[key] = Team(*key)
            by_team.setdefault(key, []).append((parameter, name_of(parameter)))
        found: list[tuple[Team | None, list[Piece]]] = [(None, alone)] if alone else []
        for key, listed in by_team.items():
            splits = {id(p) for p, _ in listed if self._is_stack(p)}
            found.append((self._teams[key], pieces_of(listed, self._teams[key], splits)))
        return found

    def _is_stack(self, parameter: Tensor) -> bool:
        return self._splits and parameter.ndim == 3

    def _in_place_of(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of the inner optimizer: shapes alone, which it may look at when it is made."""
        shapes = [(p.shape[1:] if self._is_stack(p) else p.shape, p) for p in group["params"]]
        stand_ins = [
            torch.empty(s, dtype=p.dtype, device="meta", requires_grad=True) for s, p in shapes
        ]
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        return {**options, "params": stand_ins}

    def step_whole(self, piece: Piece, weight: Tensor, gradient: Tensor) -> dict[str, Any]:
        """One step of a whole tensor, in place; its slots."""
        key = (piece.parameter, piece.index)
        before = self._held.get(key)
        target = weight.detach()
        set_gradient(target, gradient)
        state = {} if before is None else {target: dict(before)}
        group = self._groups[id(piece.parameter)]
        after = self._bare.run(self._bare.only(group, [target]), state)[target]
        target.grad = None
        if target.data_ptr() != weight.data_ptr():
            weight.copy_(target)
        return after

    # -- state -----------------------------------------------------------------------------------
    def form_of(self, piece: Piece) -> Form | None:
        return self._forms.get((piece.parameter, piece.index))

    def keep_form(self, piece: Piece, form: Form) -> None:
        self._forms[piece.parameter, piece.index] = form

    def keep(self, team: Team | None, piece: Piece, slots: dict[str, Any]) -> None:
        """What the owner has after a step."""
        key = (piece.parameter, piece.index)
        before = self._held.get(key, {})
        kept = {}
        for name, value in slots.items():
            place = before.get(name)
            if not isinstance(value, Tensor) or not value.ndim:
                kept[name] = value
                continue
            if place is None:
                kept[name] = self._place(team, piece, name, value)
            else:
                kept[name] = place
            if kept[name].data_ptr() != value.data_ptr():
                kept[name].copy_(value)
        self._held[key] = kept

    def _place(self, team: Team | None, piece: Piece, name: str, value: Tensor) -> Tensor:
        """Where a new slot lies: itself, or a row of what the state has of the stack."""
        if piece.index is None:
            return value
        stack = self._stack_slot(team, piece, name, tuple(value.shape), value.dtype)
        first = 0 if team is None else stack_part(team, len(piece.parameter), team.rank)[0]
        return local_part_of(stack)[piece.index - first]

    def _stack_slot(
        self, team: Team | None, piece: Piece, name: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Of all matrices that this rank steps of a stack, perhaps none."""
        shown = self.state[piece.parameter]
        if name not in shown:
            num = len(piece.parameter)
            device = local_part_of(piece.parameter).device
            own = num if team is None else stack_part(team, num, team.rank)[1]
            local = torch.zeros((own, *shape), dtype=dtype, device=device)
            shown[name] = self._shown(team, piece, local, torch.Size((num, *shape)))
        return shown[name]

    def show(self, team: Team | None, piece: Piece, numbers: Mapping[str, Any]) -> None:
        """`state` of a parameter on this rank: what it owns, and the numbers."""
        shown, form = self.state[piece.parameter], self.form_of(piece)
        assert form is not None
        owns = self._held.get((piece.parameter, piece.index))
        for name, (shape, dtype) in form.tensors.items():
            if piece.index is not None:
                self._stack_slot(team, piece, name, shape, dtype)
            elif owns is not None:
                known = shown.get(name)
                if known is None or local_part_of(known).data_ptr() != owns[name].data_ptr():
                    shown[name] = self._shown(team, piece, owns[name], torch.Size(shape))
            elif name not in shown:
                assert team is not None
                local = torch.empty((0, *shape[1:]), dtype=dtype, device=team.device)
                shown[name] = self._shown(team, piece, local, torch.Size(shape))
        shown.update(numbers)

    def _shown(self, team: Team | None, piece: Piece, local: Tensor, shape: torch.Size) -> Tensor:
        if team is None:
            return local
        stride = torch.empty(shape, device="meta").stride()
        spec = make_spec(team.mesh, state_placements(team, piece), shape, stride, local.dtype)
        return ShardTensor(local, spec)

    def empty_slot(self, parameter: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for a slot of this shape, laid out as this optimizer keeps it."""
        team, piece = self._first_piece(parameter)
        if team is None or not shape:
            return torch.zeros(shape, dtype=dtype, device=local_part_of(parameter).device)
        where = state_placements(team, piece)
        _, size = own_box(torch.Size(shape), team.mesh, where)
        local = torch.zeros(size, dtype=dtype, device=team.device)
        return self._shown(team, piece, local, torch.Size(shape))

    def _first_piece(self, parameter: Tensor) -> tuple[Team | None, Piece]:
        return next((t, p) for t, ps in self._pieces() for p in ps if p.parameter is parameter)

    @torch.no_grad()
    def put_state(self, values: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """State for these parameters, and none for all others, a collective of all ranks. Tensors
        may be whole, or cut in any way. A step that has failed is forgotten."""
        self._failure = ""
        self._held.clear()
        self._forms.clear()
        self.state.clear()
        for team, pieces in self._pieces():
            for piece in pieces:
                slots = values.get(piece.parameter)
                if slots:
                    self._put(team, piece, slots)

    def _put(self, team: Team | None, piece: Piece, slots: Mapping[str, Any]) -> None:
        shown = self.state[piece.parameter]
        for name, value in slots.items():
            if name not in shown:
                shown[name] = self._laid_out(team, piece, value)
        owns = team is None or piece.owner == team.rank
        first = 0
        if team is not None and piece.index is not None:
            first = stack_part(team, len(piece.parameter), team.rank)[0]
        form, held = Form(), {}
        for name, value in shown.items():
            if not isinstance(value, Tensor) or not value.ndim:
                form = form.joined(Form.of({name: value}))
                held[name] = value.clone() if isinstance(value, Tensor) else value
                continue
            shape = value.shape if piece.index is None else value.shape[1:]
            form.tensors[name] = (tuple(shape), value.dtype)
            if owns:
                local = local_part_of(value)
                held[name] = local if piece.index is None else local[piece.index - first]
        self.keep_form(piece, form)
        if owns:
            self._held[piece.parameter, piece.index] = held

    def _laid_out(self, team: Team | None, piece: Piece, value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.ndim or team is None:
            return value.clone() if isinstance(value, Tensor) else value
        where = state_placements(team, piece)
        if isinstance(value, DTensor):
            if value.device_mesh == team.mesh and tuple(value.placements) == where:
                return self._shown(team, piece, local_of(value).clone(), value.shape)
            value = value.full_tensor()
        local = part_of(value.to(team.device), team.mesh, where).clone()
        return self._shown(team, piece, local, value.shape)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What torch's `load_state_dict` ends with."""
        if "_inner" not in vars(self):
            super().__setstate__(state)
            return
        for group, loaded in zip(self.param_groups, state["param_groups"], strict=True):
            params = group["params"]
            group.clear()
            group.update(loaded, params=params)
        self.put_state({p: dict(slots) for p, slots in state["state"].items()})


def _as_groups(params: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(params)
    if not listed:
        raise ValueError("OwnedOptimizer got an empty parameter list")
    if isinstance(listed[0], dict):
        return [{**g, "params": _plain(g["params"])} for g in listed]
    return [{"params": _plain(listed)}]


def _plain(params: Any) -> list[Tensor]:
    """Without the names that torch's optimizers take beside parameters."""
    listed = [params] if isinstance(params, Tensor) else list(params)
    return [p[1] if isinstance(p, tuple) else p for p in listed]
