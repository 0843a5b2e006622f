"""Hold src/ to a size that a reader can take in: lines in all, and lines a file."""

import sys
from pathlib import Path

# 13,000 held the engine and the trainer; bench, verify, checkpoints, import and export,
# reproducible numbers, two-level shards, copies in memory, memory that units hand on came on top
# (27,900). Then about 60 faults that use found: guests and graphs of functional calls, forms that
# modules keep, importers that believe no file (1,200 lines), a launcher without pickles, liveness.
# What went for them: torch's agent and rendezvous around the launcher, event kinds that nobody
# emitted, marks on streams in vain, `torch.load` in importers.
MAX_LINES = 32_700
WARN_FILE_LINES = 600
MAX_FILE_LINES = 700
SOURCE = Path(__file__).resolve().parent.parent / "src"


def main() -> int:
    """Print the total and every long file; 1 when a limit is passed."""
    sizes = {path: len(path.read_text().splitlines()) for path in sorted(SOURCE.rglob("*.py"))}
    total, failed = sum(sizes.values()), False
    for path, lines in sizes.items():
        if lines > WARN_FILE_LINES:
            too_long = lines > MAX_FILE_LINES
            failed |= too_long
            word = "error" if too_long else "warning"
            name = path.relative_to(SOURCE.parent)
            print(
                f"{name}: {word}: {lines} lines; split it by noun ({MAX_FILE_LINES} is the limit)"
            )
    if total > MAX_LINES:
        failed = True
        print(f"src/: error: {total:,} lines; the budget is {MAX_LINES:,}")
    print(f"{total:,} of {MAX_LINES:,} lines in {len(sizes)} files")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
