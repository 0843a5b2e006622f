"""Agreement between ranks about small things: results and errors of one rank reach all of them.

Without it, an error on one rank leaves the others waiting in the next collective for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.comm.exchange import broadcast_object, gather_objects, gather_tensors
from shardwise.comm.waits import AtWork
from shardwise.errors import ShardwiseError

_T = TypeVar("_T")
_DOING = "starting, saving or loading"


class Ranks:
    """This rank among the others; every method is collective over `group` (a Gloo group). Without
    a process group this process is alone."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._is_alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._is_alone else dist.get_rank(group)
        self.world_size = 1 if self._is_alone else dist.get_world_size(group)
        self._cause: Exception | None = None
        # The error that every rank raises now, and the rank that should report it.
        self.agreed_error: Exception | None = None
        self.reporter = 0

    @classmethod
    def of_job(cls) -> Ranks:
        """All ranks of the job, over Gloo; this process alone where there is no process group."""
        if dist.is_initialized() and "gloo" not in dist.get_backend():
            group = dist.new_group(backend="gloo")
            assert isinstance(group, dist.ProcessGroup)
            return cls(group)
        return cls()

    def separate(self) -> Ranks:
        """The same ranks with a group of their own, for collectives of another thread. A
        collective."""
        if self._is_alone:
            return Ranks()
        members = dist.get_process_group_ranks(self.group or dist.group.WORLD)
        group = dist.new_group(members, backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        return Ranks(group)

    def on_rank0(self, action: Callable[[], _T], doing: str = _DOING) -> _T:
        """Runs on rank 0; its result, or its error, reaches every rank. `doing`: what the others
        hear that it is at while they wait."""
        own = self._attempt(action, doing) if self.rank == 0 else (None, None)
        if not self._is_alone:
            own = broadcast_object(own, self.group, f"rank 0, {doing}")
        return self._results([own])[0]

    def on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Runs on every rank; all get all results, or the first error."""
        return self._results(self._exchange(self._attempt(action)))

    def on_each(self, action: Callable[[], _T], doing: str = _DOING) -> _T:
        """Runs on every rank, returns the rank's own result; one's error is raised on all."""
        result, error = self._attempt(action, doing)
        self._results(self._exchange((None, error), doing))
        return result

    def gather_floats(self, values: list[float]) -> torch.Tensor:
        """float64 [world_size, len(values)]: the same cheap exchange for numbers of every step."""
        own = torch.tensor(values, dtype=torch.float64)
        if self._is_alone:
            return own.unsqueeze(0)
        # A rank that hangs is found here too.
        return torch.stack(gather_tensors(own, self.group, "numbers of the other ranks"))

    def _exchange(self, own: tuple[Any, Exception | None], doing: str = _DOING) -> list[Any]:
        if self._is_alone:
            return [own]
        return gather_objects(own, self.group, f"all ranks, {doing}")

    def _attempt(
        self, action: Callable[[], Any], doing: str = _DOING
    ) -> tuple[Any, Exception | None]:
        try:
            if self._is_alone:
                return action(), None
            with AtWork(doing):
                return action(), None
        except ShardwiseError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - sent on, not swallowed
            # It need not pickle: the text travels, and the rank itself adds the cause.
            text = f"rank {self.rank}: {type(error).__name__}: {error}"
            self._cause = error
            return None, RuntimeError(text)

    def _results(self, box: list[tuple[Any, Exception | None]]) -> list[Any]:
        for rank, (_, error) in enumerate(box):
            if error is not None:
                raise self.agreed(error, rank) from self._cause
        return [value for value, _ in box]

    def agreed(self, error: Exception, reporter: int = 0) -> Exception:
        """Marks an error that every rank raises at this point; `reporter` is to show it."""
        self.agreed_error, self.reporter = error, reporter
        return error
