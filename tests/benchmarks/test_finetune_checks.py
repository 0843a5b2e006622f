"""The checks of benchmarks/finetune_ranks.py and trl_losses.py see what they look for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def path_of_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def note(rows: Any, reads: list[list[int]]) -> None:
    """What each rank has read."""
    for rank, own in enumerate(reads):
        Path(f"{rows.note}.{rank}.count").write_text("6")
        text = "".join(json.dumps([row]) + "\n" for row in own)
        Path(f"{rows.note}.{rank}").write_text(text)


def test_rows_that_are_read_twice_or_never_are_seen(tmp_path: Path) -> None:
    from finetune_rows import ReadRows

    def read(second: list[list[int]]) -> tuple[Any, list[list[int]]]:
        found = ReadRows(tmp_path, "run", global_batch=2)
        note(found.start(0, 2), [[0, 2, 4], [1, 3, 5]])  # killed in its third step
        note(found.start(2, 1), second)
        return found, found.by_step(4)

    found, by_step = read([[5, 4, 1, 0]])
    assert by_step == [[0, 1], [2, 3], [4, 5], [0, 1]]
    assert found.are_once_per_epoch(by_step)
    assert (found.num_rows, found.num_reads) == (6, 10)
    for wrong in ([5, 3, 1, 0], [5, 4, 1, 1], [5, 4, 1]):
        found, by_step = read([wrong])
        assert not found.are_once_per_epoch(by_step)


def test_means_of_tokens_ranks_and_batches() -> None:
    from trl_predictions import TokenLosses

    tokens = TokenLosses([[1.0], [3.0, 3.0, 3.0], [5.0, 5.0]])
    assert tokens.mean() == 20 / 6
    assert tokens.mean_of_ranks(1, 2) == ((1 + 5 + 5) / 3 + 3) / 2
    assert tokens.mean_of_batches(1, 1) == 3
    assert tokens.mean_of_batches(2, 1) == (2.5 + 2.5 + 5) / 3
    assert tokens.mean_of_batches(8, 1) == pytest.approx(20 / 6)
