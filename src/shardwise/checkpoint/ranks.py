"""Agreement between ranks about small things: results and errors of one rank reach all of them.

Without it, an error on one rank leaves the others waiting in the next collective for good.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.errors import ShardwiseError

_T = TypeVar("_T")


class Ranks:
    """This rank among the others; every method is collective over `group` (a Gloo group)."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._cause: Exception | None = None
        # The error that every rank raises now, and the rank that should report it.
        self.agreed_error: Exception | None = None
        self.reporter = 0

    def on_rank0(self, action: Callable[[], _T]) -> _T:
        """Runs on rank 0; its result, or its error, reaches every rank."""
        box: list[Any] = [self._attempt(action) if self.rank == 0 else None]
        dist.broadcast_object_list(box, group=self.group, group_src=0)
        return self._results(box)[0]

    def on_all(self, action: Callable[[], _T]) -> list[_T]:
        """Runs on every rank; all get all results, or the first error."""
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, self._attempt(action), group=self.group)
        return self._results(box)

    def on_each(self, action: Callable[[], _T]) -> _T:
        """Runs on every rank, returns the rank's own result; one's error is raised on all."""
        result, error = self._attempt(action)
        box: list[Any] = [None] * self.world_size
        dist.all_gather_object(box, (None, error), group=self.group)
        self._results(box)
        return result

    def gather_floats(self, values: list[float]) -> torch.Tensor:
        """float64 [world_size, len(values)]: the same cheap exchange for numbers of every step."""
        own = torch.tensor(values, dtype=torch.float64)
        rows = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(rows, own, group=self.group)
        return torch.stack(rows)

    def _attempt(self, action: Callable[[], Any]) -> tuple[Any, Exception | None]:
        try:
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
