"""One step of the pieces of one team: rows of the next piece travel while owners step this one.

rank        collect 1 | wait 1, collect 2 | step 1, spread 1 | wait 2, collect 3 | step 2, ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.comm.exchange import gather_objects
from shardwise.offload.kept import local_part_of
from shardwise.owned.form import Form
from shardwise.owned.moving import Round, assemble, collect, spread
from shardwise.owned.pieces import Piece, Team, rounds

if TYPE_CHECKING:
    from shardwise.owned.optimizer import OwnedOptimizer


class Step:
    """See the module docstring."""

    def __init__(
        self, optimizer: OwnedOptimizer, team: Team | None, gradients: Mapping[Tensor, Tensor]
    ) -> None:
        self._optimizer, self._team, self._gradients = optimizer, team, gradients

    def run(self, pieces: list[Piece]) -> None:
        team = self._team
        if team is None:
            for piece in pieces:
                self._step_here(piece)
            return
        turns = rounds(pieces, team.size)
        coming = self._collect(turns[0])
        going: tuple[Round, dict[int, Piece]] | None = None
        for number, turn in enumerate(turns):
            arrived, here = coming, coming is None
            mine = turn.get(team.rank)
            found = None if arrived is None else arrived.wait()
            coming = self._collect(turns[number + 1]) if number + 1 < len(turns) else None
            weight, slots = self._stepped(mine, found)
            self._learn_forms(turn, mine, slots)
            if going is not None:
                self._land(*going)
            going = self._spread(turn, mine, weight, slots, here=here)
        if going is not None:
            self._land(*going)

    def _collect(self, turn: dict[int, Piece]) -> Round | None:
        """None where owners have all of it, and step it where it lies."""
        assert self._team is not None
        if all(piece.is_at_home(self._team) for piece in turn.values()):
            return None
        return collect(self._team, turn, self._locals_of)

    def _locals_of(self, piece: Piece) -> tuple[Tensor, Tensor]:
        return self._gradients[piece.parameter], local_part_of(piece.parameter)

    def _stepped(
        self, mine: Piece | None, arrived: Mapping[int, list[Tensor]] | None
    ) -> tuple[Tensor | None, dict[str, Any]]:
        """The new tensor of this rank's piece, and its slots."""
        if mine is None:
            return None, {}
        assert self._team is not None
        if arrived is None:
            place = self._team.place(self._team.rank)
            gradient, weight = (mine.of_local(t, place) for t in self._locals_of(mine))
        else:
            gradient, weight = assemble(self._team, mine, arrived)
        slots = self._optimizer.step_whole(mine, weight, gradient)
        self._optimizer.keep(self._team, mine, slots)
        return weight, slots

    def _step_here(self, piece: Piece) -> None:
        gradient, weight = (
            t if piece.index is None else t[piece.index] for t in self._locals_of(piece)
        )
        slots = self._optimizer.step_whole(piece, weight, gradient)
        form = Form.of(slots)
        self._optimizer.keep_form(piece, form)
        self._optimizer.keep(None, piece, slots)
        self._optimizer.show(None, piece, {k: slots[k] for k in (*form.numbers, *form.others)})

    def _learn_forms(
        self, turn: dict[int, Piece], mine: Piece | None, slots: Mapping[str, Any]
    ) -> None:
        """In the first step of a piece owners tell the others what they keep of it."""
        assert self._team is not None
        if all(self._optimizer.form_of(piece) is not None for piece in turn.values()):
            return
        own = (self._team.rank, Form.of(slots) if mine is not None else None)
        told = dict(gather_objects(own, self._team.group, "forms of optimizer state"))
        for owner, piece in turn.items():
            form = told[owner]
            assert form is not None
            self._optimizer.keep_form(piece, form)

    def _spread(
        self,
        turn: dict[int, Piece],
        mine: Piece | None,
        weight: Tensor | None,
        slots: Mapping[str, Any],
        *,
        here: bool,
    ) -> tuple[Round, dict[int, Piece]] | None:
        """None where there is nothing to tell: owners stepped in place, and keep no numbers."""
        assert self._team is not None
        forms = {id(piece): self._optimizer.form_of(piece) for piece in turn.values()}
        if here and not any(form is not None and form.numbers for form in forms.values()):
            for piece in turn.values():
                form = forms[id(piece)]
                assert form is not None
                self._optimizer.show(self._team, piece, form.others)
            return None
        pack = None
        if mine is not None:
            form, device = forms[id(mine)], self._team.device
            assert form is not None and weight is not None
            pack = (weight, form.pack(slots, device))
        moving = spread(
            self._team, turn, pack, lambda p: local_part_of(p.parameter).dtype,
            lambda p: len(forms[id(p)].numbers),  # type: ignore[union-attr]
        )  # fmt: skip
        return moving, turn

    def _land(self, moving: Round, turn: dict[int, Piece]) -> None:
        assert self._team is not None
        place = self._team.place(self._team.rank)
        arrived = moving.wait()
        for owner, piece in turn.items():
            numbers, *rows = arrived[owner]
            if rows:
                _, local = self._locals_of(piece)
                piece.of_local(local, place).copy_(rows[0])
            form = self._optimizer.form_of(piece)
            assert form is not None
            self._optimizer.show(self._team, piece, form.unpack(numbers))
