"""`make check`: run every mechanical check, show what the failing ones say, fail if any failed.

All of them run, also after a failure, so that one call shows everything. Arguments choose by name:
`python tools/check.py lint rules`.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent

CHECKS = {
    "lint": [BIN / "ruff", "check", "."],
    "format": [BIN / "ruff", "format", "--check", "."],
    "types": [BIN / "pyrefly", "check", "--min-severity", "error", "--summary=none"],
    "layers": [BIN / "lint-imports", "--no-logo"],
    "spelling": [BIN / "codespell"],
    "rules": [sys.executable, "tools/project_rules.py"],
    "files": [sys.executable, "tools/file_table.py"],
    "size": [sys.executable, "tools/size_budget.py"],
}
REMEDIES = {
    "lint": "`make format` fixes some; a `# noqa: CODE - why` is for the rest",
    "format": "`make format` rewrites them",
    "layers": "a layer imports only what stands below it: docs/architecture.md",
}


def main(names: list[str]) -> int:
    """Run the named checks, or all; 1 when one failed."""
    unknown = sorted(set(names) - set(CHECKS))
    if unknown:
        print(f"no such check: {', '.join(unknown)}; there are {', '.join(CHECKS)}")
        return 2
    failed = []
    for name in names or CHECKS:
        started_s = time.monotonic()
        done = subprocess.run(
            CHECKS[name],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        elapsed_s = time.monotonic() - started_s
        if done.returncode:
            failed.append(name)
            print(done.stdout.rstrip())
            remedy = f" ({REMEDIES[name]})" if name in REMEDIES else ""
            print(f"FAILED {name}{remedy}")
        else:
            last = done.stdout.rstrip().rpartition("\n")[2]
            print(f"ok     {name:<9}{elapsed_s:5.1f} s  {last}")
    if failed:
        print(f"{len(failed)} of {len(names or CHECKS)} checks failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
