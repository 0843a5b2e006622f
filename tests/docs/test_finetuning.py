"""The files and configurations of docs/finetuning.md do what they are shown for: each pair is read,
and what the assistant says in it is what is trained."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("datasets", reason="the extra 'hf' is not installed")
from test_code_blocks import ROOT, Block, blocks_of

from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.text.samples import TextSamples
from train.text_kit import make_tokenizer

PAGE = ROOT / "docs" / "finetuning.md"
QUESTIONS = [{"question": "What is it?", "answer": "It is a walk."}]
TRAINED = {
    "finetune.toml": ["It walks a directory tree.", "It looks at a file."],
    "sharegpt.toml": ["It walks a directory tree."],
    "alpaca.toml": ["It walks a directory tree.", "It looks at a file."],
    "parquet.toml": ["It is a walk."],
    "text.toml": [" A page\n"],  # nothing stands before its first token
}


def files() -> dict[str, Block]:
    found = {block.remark_of("file"): block for block in blocks_of(PAGE)}
    return {name: block for name, block in found.items() if name is not None}


def test_chats_come_first() -> None:
    """What most people have; each configuration of the page that names data is looked at here."""
    names = [name for name in files() if name.endswith(".toml")]
    assert names[0] == "finetune.toml"
    assert sorted(names) == sorted(TRAINED)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for file, block in files().items():
        Path(file).write_text(block.text)
    Path("README.md").write_text("# A page\n")
    write_parquet(Path("questions.parquet"))
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    options = {"data.tokenizer": str(tokenizer), "data.held_out": "0", "data.packing": "false"}
    options |= {"train.global_batch": "1", "train.micro_batch": "1", "data.seq_len": "256"}
    data = open_data(load_config(name, list(options.items())).config, None)
    assert isinstance(data.train, TextSamples)
    said = []
    for index in range(len(data.train)):
        for _, labels in data.train.documents(index):
            said.append(text_of(labels[labels >= 0].tolist()))
    assert sorted(said) == sorted(f"{text}<e>" for text in TRAINED[name])


def write_parquet(path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.Table.from_pylist(QUESTIONS), path)


def text_of(tokens: list[int]) -> str:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained("tokenizer").decode(tokens)
