"""Every code block of the README and of docs/ does what it says.

    ```python            runs on 2 ranks, in an empty folder that they share; must not raise
    ```toml              loads as a configuration of `shardwise train`
    ```sh  ```console    every command exists, takes these options, and its configuration loads; the
                         lines of a console block that do not begin with $ are output

A comment above the fence changes that: `<!-- continues -->` runs a block after the ones before it,
`<!-- raises: text -->` expects an error that holds the text, `<!-- file: name -->` also writes the
block to a file that later commands and blocks of the page may use.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import re
import shlex
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import run_ranks
from shardwise.bench.command import parser as bench_parser
from shardwise.bench.engines import parse_engines
from shardwise.bench.workload import workload_named
from shardwise.cli import main as shardwise_main
from shardwise.cli.replicas import parser as replicas_parser
from shardwise.doctor.command import parser as verify_parser
from shardwise.doctor.command import plan_of
from shardwise.doctor.examine import parse_arguments as parse_doctor
from shardwise.errors import ConfigError
from shardwise.install import uninstall
from shardwise.report.command import parse as parse_report
from shardwise.train.command import parse
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import load_config
from shardwise.train.hf.generate import parser as generate_parser

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_MODEL = "models/mine"  # of docs/quickstart.md
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LANGUAGES = {"python", "toml", "sh", "console", "diff", "text"}
OF_THE_SITE = {"{toctree}", "{eval-rst}"}  # for Sphinx, see test_site.py
_MIGRATING = ROOT / "docs" / "migrating.md"
_FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    remark: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def remark_of(self, name: str) -> str | None:
        """What follows `name:` in the comment above the fence."""
        key, _, value = self.remark.partition(":")
        return value.strip() if key == name else None


def blocks(*languages: str) -> list[Block]:
    return [b for page in PAGES for b in blocks_of(page) if b.language in languages]


def blocks_of(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in _FENCE.finditer(text):
        line = text.count("\n", 0, match.start(2)) + 1
        yield Block(page, line, match[2], match[3], match[1] or "")


# -- python --------------------------------------------------------------------------------------
def chains() -> list[list[Block]]:
    """Python blocks, each with those that continue it."""
    found: list[list[Block]] = []
    for block in blocks("python"):
        if block.remark == "continues" and found and found[-1][0].page == block.page:
            found[-1].append(block)
        else:
            found.append([block])
    return found


def run_block(rank: int, world: int, texts: list[tuple[str, str, str | None]], where: str) -> None:
    """On a rank: the blocks of a chain, one after the other, in one namespace."""
    os.chdir(where)
    sys.path.insert(0, where)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    torch.manual_seed(1000 + rank)  # as in processes of their own: seeds are the block's matter
    warned = _Warnings()
    logging.getLogger("shardwise").addHandler(warned)
    try:
        _run_texts(texts, namespace)
    finally:
        logging.getLogger("shardwise").removeHandler(warned)
        uninstall()  # what a block of docs/integrations.md leaves in force
    assert warned.texts == []


class _Warnings(logging.Handler):
    """What the engine says on its logger: a program that seeds has nothing to hear of it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def _run_texts(texts: list[tuple[str, str, str | None]], namespace: dict[str, Any]) -> None:
    for name, text, error in texts:
        code = compile(text, name, "exec")
        if error is None:
            exec(code, namespace)
            continue
        with pytest.raises(Exception, match=re.escape(error)):
            exec(code, namespace)


@pytest.mark.parametrize("chain", chains(), ids=lambda c: str(c[0]))
def test_python(chain: list[Block], tmp_path: Path) -> None:
    for block in blocks_of(chain[0].page):
        if (name := block.remark_of("file")) is not None:
            (tmp_path / name).write_text(block.text)
    texts = []
    for block in chain:
        lines = "\n" * block.line  # so that a traceback shows the page's line
        texts.append((str(block.page), lines + block.text, block.remark_of("raises")))
    run_ranks(2, run_block, texts, str(tmp_path), timeout_s=60.0)


# -- configurations and commands -----------------------------------------------------------------
@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_toml(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(block.text)
    assert load_config(path).config is not None


def commands() -> list[tuple[Block, str]]:
    found = []
    for block in blocks("sh", "console"):
        text = block.text.replace("\\\n", " ")
        for line in text.splitlines():
            if block.language == "console":
                if not line.startswith("$ "):
                    continue
                line = line[2:]
            if line.strip() and not line.startswith("#"):
                found.append((block, line))
    return found


@pytest.mark.parametrize(("block", "line"), commands(), ids=lambda x: str(x)[:60])
def test_command(block: Block, line: str, tmp_path: Path) -> None:
    for other in blocks_of(block.page):
        if (name := other.remark_of("file")) is not None:
            (tmp_path / name).write_text(other.text)
            if f'path = "{_MODEL}"' in other.text:
                shutil.copytree(model_directory(), tmp_path / _MODEL)
    words = shlex.split(line, comments=True)
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # VARIABLE=value
        words = words[1:]
    assert words[0] in _COMMANDS, f"{block}: no rule for the command {words[0]!r}"
    _COMMANDS[words[0]](words[1:], tmp_path)


@functools.cache
def model_directory() -> Path:
    """In the place of the reader's model: a small one, with a tokenizer, by transformers."""
    import tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    path = Path(tempfile.mkdtemp())
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
    config = LlamaConfig(**sizes, num_attention_heads=2, max_position_embeddings=2048)
    LlamaForCausalLM(config).save_pretrained(path)
    words = {word: number for number, word in enumerate("<unk> <s> </s> <pad> It a the".split())}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s> {% endfor %}"
        "{% if add_generation_prompt %}<s> assistant {% endif %}"
    )
    tokenizer.save_pretrained(path)
    return path


def _make(words: list[str], folder: Path) -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for word in words:
        assert word in targets or re.fullmatch(r"[A-Z_]+=.*", word), word


def _pip(words: list[str], folder: Path) -> None:
    assert words[0] == "install"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in re.findall(r"\.\[(.*?)\]", " ".join(words)):
        assert extra in project["optional-dependencies"]


def _shardwise(words: list[str], folder: Path) -> None:
    if words[0] in ("--help", "--version"):
        return
    if words[0] == "bench":
        _bench(words[1:], folder)
        return
    if words[0] == "verify":
        _verify(words[1:], folder)
        return
    if words[0] == "doctor":
        parse_doctor(words[1:])
        return
    if words[0] == "replicas":
        assert replicas_parser().parse_args(words[1:]).dir
        return
    if words[0] == "data":
        assert load_config(folder / words[1], parse(words[2:]).overrides)
        return
    if words[0] == "report":
        assert parse_report(words[1:])
        return
    if words[0] in ("plan", "explain"):
        with contextlib.chdir(folder):
            assert shardwise_main(words) == 0
        return
    if words[0] == "generate":
        assert generate_parser().parse_args(words[1:]).prompt
        return
    if words[0] == "import-config":
        _import_config(words, folder)
        return
    assert words[0] == "train", f"shardwise {words[0]} does not exist"
    _train(words[1:], folder)


def _import_config(words: list[str], folder: Path) -> None:
    """It is run on the page's file; what it writes loads, and is the page's next configuration."""
    with contextlib.chdir(folder):
        assert shardwise_main(words) == 0
        if "--write" in words:
            written = Path(words[words.index("--write") + 1])
            assert load_config(written)
            assert "\n".join(written.read_text().splitlines()[3:]) in _MIGRATING.read_text()


def _bench(words: list[str], folder: Path) -> None:
    """The options and engines exist; so do the configuration, or the functions of a module."""
    if words == ["--help"]:
        return
    args = bench_parser().parse_args(words)
    assert parse_engines(args.engines)
    for name in (args.workload or "tiny").split(","):
        assert workload_named(name)
    if args.config:
        assert load_config(ROOT / args.config)
    for name in filter(None, (args.model, args.batch)):
        module, _, function = name.partition(":")
        assert f"def {function}(" in (folder / f"{module}.py").read_text()


def _verify(words: list[str], folder: Path) -> None:
    """The options and the configuration exist."""
    args = verify_parser().parse_args(words)
    if args.config:
        args.config = str(folder / args.config)
    assert plan_of(args, folder).variants()


def _train(words: list[str], folder: Path) -> None:
    """The arguments are understood, and fit the number of ranks."""
    if words == ["--help"]:
        return
    arguments = parse(words)
    config = arguments.config_file
    if config is not None:
        config = str(folder / config) if (folder / config).exists() else str(ROOT / config)
    loaded = load_config(config, arguments.overrides)
    if arguments.nproc is not None:
        assert not world_problems(loaded.config, arguments.nproc)


def _torchrun(words: list[str], folder: Path) -> None:
    nproc = int(words[words.index("--nproc-per-node") + 1])
    if "-m" not in words:
        assert (ROOT / words[words.index("--nproc-per-node") + 2]).exists()
        return
    module = words.index("-m")
    if words[module + 1] == "shardwise.install":
        script = words[module + 2]
        assert script == "train.py" or (ROOT / script).exists()
        return
    assert words[module + 1] == "shardwise.train"
    _train([*words[module + 2 :], "--nproc", str(nproc)], folder)


def _srun(words: list[str], folder: Path) -> None:
    _torchrun(words[words.index("torchrun") + 1 :], folder)


def _python(words: list[str], folder: Path) -> None:
    script = ROOT / words[0]
    assert script.exists(), script
    text = script.read_text()
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in text, f"{script.name} has no {word}"


def _kill(words: list[str], folder: Path) -> None:
    assert words[0] in ("-TERM", "-KILL", "-9")


_COMMANDS = {
    "make": _make,
    "pip": _pip,
    "shardwise": _shardwise,
    "torchrun": _torchrun,
    "srun": _srun,
    "python": _python,
    "kill": _kill,
}


# -- the checks themselves -----------------------------------------------------------------------
def test_fences_are_named() -> None:
    """A block of another language, or of none, would go unchecked."""
    for page in PAGES:
        for number, line in enumerate(page.read_text().splitlines(), 1):
            if line.startswith("```") and line != "```":
                assert line[3:] in LANGUAGES | OF_THE_SITE, f"{page.name}:{number}: {line}"


def test_wrong_options_are_found(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        _train(["--train.stepps", "3"], tmp_path)
    with pytest.raises(AssertionError):
        _make(["frobnicate"], tmp_path)


def test_links() -> None:
    """Links inside the repository lead somewhere, anchors too."""
    for page in [*PAGES, ROOT / "README.zh-CN.md", ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            goal = (page.parent / path).resolve() if path else page
            assert goal.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in _anchors(goal), f"{page.name}: {target}"


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in heads}
