"""What ranks leave on disk about the items of a stage, so that a crash loses nothing that was done.

STAGE.begun.R  the number of the item that rank R is in
STAGE.rows     one JSON line for each item that ended, by rank 0
STAGE.error.R  what ended rank R: the item, the error, the traceback
"""

from __future__ import annotations

import json
import os
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Notes:
    folder: Path
    stage: str

    def _file(self, what: str) -> Path:
        return self.folder / f"{self.stage}.{what}"

    def begin(self, rank: int, number: int) -> None:
        _replace(self._file(f"begun.{rank}"), str(number))

    def end(self, number: int, row: dict[str, Any]) -> None:
        with open(self._file("rows"), "a", encoding="utf-8") as file:
            file.write(json.dumps({"number": number, **row}) + "\n")

    def fail(self, rank: int, number: int, error: BaseException) -> None:
        lines = [line for line in str(error).splitlines() if line.strip()]
        found: dict[str, Any] = {
            "number": number,
            "rank": rank,
            "error": f"{type(error).__name__}: {lines[0] if lines else ''}"[:500],
            "traceback": traceback.format_exc()[-6000:],
        }
        errors = getattr(error, "errors", None)  # of the sanitizer
        if isinstance(errors, list):
            found["reports"] = len(errors)
            found["first_report"] = str(errors[0])[:3000] if errors else ""
        _replace(self._file(f"error.{rank}"), json.dumps(found))

    # -- for the launcher ------------------------------------------------------------------------
    def begun(self) -> dict[int, int]:
        """The item that each rank is in, or was when it ended."""
        return {int(file.suffix[1:]): int(file.read_text()) for file in self._files("begun")}

    def begun_at(self) -> list[float]:
        """When, as `time.time`, of the ranks that are in one."""
        return [file.stat().st_mtime for file in self._files("begun")]

    def rows(self) -> dict[int, dict[str, Any]]:
        found: dict[int, dict[str, Any]] = {}
        if self._file("rows").exists():
            for line in self._file("rows").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                found[row.pop("number")] = row
        return found

    def take_errors(self) -> dict[int, dict[str, Any]]:
        """What ranks have left; it is forgotten, and so is where they were."""
        files = self._files("error")
        errors = {int(file.suffix[1:]): json.loads(file.read_text()) for file in files}
        for file in (*files, *self._files("begun")):
            file.unlink()
        return errors

    def _files(self, what: str) -> list[Path]:
        found = sorted(self.folder.glob(f"{self.stage}.{what}.*"))
        return [file for file in found if file.suffix != ".part"]


def _replace(path: Path, text: str) -> None:
    part = path.with_suffix(path.suffix + ".part")
    part.write_text(text)
    os.replace(part, path)
