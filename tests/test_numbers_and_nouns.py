"""Numbers and the nouns behind them, as people write them."""

import re
from pathlib import Path

from shardwise.units import counted

SOURCE = Path(__file__).parents[1] / "src" / "shardwise"


def test_one_has_no_s() -> None:
    found = [counted(number, "rank") for number in (0, 1, 2, 2000)]
    assert found == ["0 ranks", "1 rank", "2 ranks", "2,000 ranks"]


def test_no_text_leaves_that_to_the_reader() -> None:
    """A noun with its ending in brackets."""
    found = [
        f"{path.name}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        for match in re.finditer(r"\} \w+\(s\)", path.read_text())
    ]
    assert found == []
