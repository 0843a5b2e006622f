"""`shardwise report RUN`: what is on the page, that nothing of it is loaded from elsewhere, and
that no text of a run is taken for HTML.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli import main
from shardwise.report.charts import thinned
from shardwise.train.config_file import config_as_toml, load_config

MIB = 2**20
EMPTY = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Tags that close as they open, texts, and what would be fetched."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in EMPTY:
            self._open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "data") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {value}")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in EMPTY:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._open and self._open[-1] == "h2":
            self.headings.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def rows_of(num: int) -> list[dict[str, Any]]:
    return [
        {
            "step": step,
            "loss": 5.0 - 0.01 * step,
            "tokens_per_s": 1000.0 + step,
            "step_time_s": 0.1,
            "peak_memory_bytes": 400 * MIB + step,
            **({"val_loss": 4.5} if step % 10 == 0 else {}),
        }
        for step in range(1, num + 1)
    ]


def run_of(folder: Path, num: int = 30, **options: Any) -> Path:
    """The files of a run of two ranks."""
    folder.mkdir(parents=True)
    given = [("run.dir", str(folder)), ("train.steps", str(num))]
    given += [(key.replace("__", "."), str(value)) for key, value in options.items()]
    (folder / "config.toml").write_text(config_as_toml(load_config(None, given).config))
    rows = rows_of(num)
    write(folder / "metrics.jsonl", rows)
    both = {"busy_s": 0.06, "waiting_s": 0.02, "data_s": 0.001, "queue_s": 0.0}
    ranks = [
        {"step": r["step"], "loss": [r["loss"]] * 2, "peak_memory_bytes": [400 * MIB] * 2,
         "batch": [r["step"], 1000 + r["step"]], **{k: [v] * 2 for k, v in both.items()}}
        for r in rows
    ]  # fmt: skip
    write(folder / "ranks.jsonl", ranks)
    start = {
        "event": "start", "at": "2026-12-01T00:00:00+00:00", "step": 0, "ranks": 2,
        "device": "cpu", "torch": "2.13.0", "threads": 1, "cores": 2, "buffer_bytes": 0,
        "units": [{"name": "Decoder", "gathered_bytes": 1000}],
        "base_bytes": 300 * MIB, "room_bytes": 2**33, "notes": [],
    }  # fmt: skip
    end = {"event": "end", "at": "2026-12-01T00:01:00+00:00", "step": num, "seconds": 60.0}
    write(folder / "log.jsonl", [start, end])
    return folder


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def report_of(run: Path, capsys: pytest.CaptureFixture[str]) -> Page:
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out.strip() == str(run / "report.html")
    return Page((run / "report.html").read_text())


def test_what_is_on_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report_of(run_of(tmp_path / "run"), capsys)
    assert page.headings == [
        *("Findings", "Loss", "Speed", "Memory of a rank", "Where a step's time goes"),
        *("Promised and found", "Events", "Configuration"),
    ]
    for text in (
        *("run: step 30 of 30", "2 ranks, cpu, torch 2.13.0", "4.7000", "4.5000 at the end"),
        *("0.1 s, 1,016 tokens/s", "waiting for peers", "measured, at most", "100.0 MiB", "20%"),
        *("micro_batch = 16", "val_loss"),
    ):
        assert text in page.text.replace("measured,\nat most", "measured, at most"), text
    assert "measured, 100.0 MiB" not in page.text, "it is no kind of what the plan says"
    assert page.fetched == []
    assert len(page.ids) == len(set(page.ids)), "pictures of one page share their ids"
    assert "script" not in page.tags


def test_promises_are_those_of_explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    page = report_of(run, capsys)
    assert main(["explain", str(run / "config.toml"), "--nproc", "2", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    received = f"{plan['received_bytes'] / MIB:.1f} MiB"
    assert f"received by a rank in a micro-batch {received}" in page.text
    assert f"units {len(plan['units'])} 1 differ" in page.text


def test_texts_of_a_run_are_no_html(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = "<script>alert(1)</script>"
    run = run_of(tmp_path / "<script>run", data__source=bad)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    log[0]["device"] = log[0]["torch"] = bad
    write(run / "log.jsonl", [*log, {"event": bad, "at": bad, "step": 30, "reason": bad}])
    (run / "profile").mkdir()
    (run / "profile" / "step_<script>_rank_0.json").write_text("{}")
    page = report_of(run, capsys)
    assert "script" not in page.tags
    assert bad in page.text and "step_<script>_rank_0.json" in page.text
    assert "Traces" in page.headings


@pytest.mark.parametrize("left", [(), ("metrics.jsonl",), ("log.jsonl",), ("ranks.jsonl",)])
def test_runs_that_have_less(
    left: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed at its begin, or of an older version: what is not known is left out."""
    run = run_of(tmp_path / "run")
    for name in left or ("metrics.jsonl", "log.jsonl", "ranks.jsonl"):
        (run / name).unlink()
    page = report_of(run, capsys)
    assert page.headings[0] == "Findings" and page.headings[-1] == "Configuration"
    assert ("Loss" in page.headings) == (bool(left) and left != ("metrics.jsonl",))


def test_findings_are_the_doctors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path / "run")
    rows = [json.loads(line) for line in (run / "ranks.jsonl").read_text().splitlines()]
    for row in rows:
        row["batch"] = [row["step"]] * 2  # both ranks read the same samples
    write(run / "ranks.jsonl", rows)
    page = report_of(run, capsys)
    main(["doctor", str(run), "--json"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found
    for finding in found:
        assert " ".join(finding["title"].split()) in page.text


def test_long_runs_are_thinned() -> None:
    rows = [{"step": step} for step in range(1, 123_457)]
    found = thinned(rows)
    assert 1000 < len(found) <= 2000 and found[-1]["step"] == 123_456
    assert thinned(rows[:5]) == rows[:5] and thinned([]) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "name the run.dir of a job"),
        (["nowhere"], "nowhere: no such directory; name the run.dir of a job"),
        (["--output", "x"], "--output: unknown option; there is --out FILE.html"),
        (["RUN", "RUN"], "a second run"),
        (["RUN", "--out"], "--out: needs a file"),
        (["RUN", "--out", "RUN"], "is a directory; name a file"),
        (["RUN", "--out", "RUN/config.toml"], "is there and is no report; name another file"),
        (["RUN", "--out", "RUN/none/x.html"], "cannot be written: No such file or directory"),
    ],
)
def test_mistakes(
    arguments: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(tmp_path / "run", 3)
    before = (run / "config.toml").read_text()
    assert main(["report", *(word.replace("RUN", str(run)) for word in arguments)]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
    assert (run / "config.toml").read_text() == before
    assert not (run / "report.html").exists()


CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.timeout(90)
def test_a_browser_draws_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a network; the picture is no empty page."""
    from PIL import Image

    run = run_of(tmp_path / "run")
    report_of(run, capsys)
    picture = tmp_path / "page.png"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,2400",
        "--host-resolver-rules=MAP * ~NOTFOUND", f"--screenshot={picture}",
        f"--user-data-dir={tmp_path / 'profile'}", (run / "report.html").as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)  # type: ignore[arg-type]
    assert picture.exists(), done.stderr[-2000:]
    image = Image.open(picture).convert("RGB")
    colors = image.getcolors(2**24)
    assert colors is not None
    drawn = {color for count, color in colors if count > 200}
    assert {(0x1F, 0x6F, 0x8B), (0xE0, 0x7A, 0x5F)} <= drawn, "curves and areas are there"
    lines = [re.sub(r"\s+", " ", line) for line in done.stderr.splitlines()]
    assert not [line for line in lines if "net::ERR" in line]
