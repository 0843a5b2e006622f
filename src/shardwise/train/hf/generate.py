"""`shardwise generate`: what a model says to a prompt, for a first look.

Takes a directory that `transformers` or `peft` loads, or a run directory or checkpoint of
`shardwise train`, whose newest weights are put into the model of its `model.path`. One process; the
text is drawn by transformers' own `generate`. Where the tokenizer has a chat template the prompt is
a user's turn of a chat. Exit codes: 0, 2 a mistake (one line on stderr).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.errors import CheckpointError, ConfigError
from shardwise.train.options import CommandParser


def parser() -> argparse.ArgumentParser:
    """Of its command line."""
    own = CommandParser(
        prog="shardwise generate",
        description="What a model says to a prompt: a directory of transformers or peft, a run.",
    )
    add = own.add_argument
    add("path", type=Path, metavar="DIR", help="of a model or its adapters, a run, a checkpoint")
    add("--prompt", required=True, action="append", help="may be given several times")
    add("--system", help="the system's turn of the chat; by default what the template says")
    add("--plain", action="store_true", help="continue the prompt as text, without chat template")
    add("--max-new-tokens", type=_count, default=128, metavar="N", help="(128)")
    add("--temperature", type=_temperature, default=0.0, metavar="T", help="0: the likeliest (0)")
    add("--seed", type=int, default=0, help="of what is drawn where T is above 0 (0)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", action="store_true", help="one JSON object on stdout")
    return own


def _count(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"expected a number of tokens, found {text!r}")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 100:
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, found {text!r}")
    return value


def main(arguments: Sequence[str]) -> int:
    """Runs `generate`; returns the exit code."""
    try:
        options = parser().parse_args(list(arguments) or ["--help"])
        answers = _run(options)
    except (ConfigError, CheckpointError, OSError, MemoryError) as error:
        print(f"shardwise generate: {str(error) or type(error).__name__}", file=sys.stderr)
        return 2
    except SystemExit:  # after --help
        return 0
    if options.json:
        print(json.dumps([{"prompt": p, "answer": a} for p, a in answers]))
        return 0
    for prompt, answer in answers:
        print(f"> {prompt}\n{answer}" if len(answers) > 1 else answer)
    return 0


def _run(options: argparse.Namespace) -> list[tuple[str, str]]:
    import torch

    from shardwise.train.hf.library import quietly

    with quietly():
        has_cuda = torch.cuda.is_available()
        if options.device == "cuda" and not has_cuda:
            raise ConfigError("--device: cuda is asked for, but torch sees no GPU")
        device = "cuda" if has_cuda and options.device != "cpu" else "cpu"
        model, tokenizer = load(options.path)
        model.to(device).eval()
        torch.manual_seed(options.seed)
        how = {"max_new_tokens": options.max_new_tokens, "do_sample": options.temperature > 0}
        if options.temperature > 0:
            how["temperature"] = options.temperature
        use_chat = not options.plain
        return [
            (prompt, answer_to(model, tokenizer, prompt, options.system, use_chat=use_chat, **how))
            for prompt in options.prompt
        ]


def load(path: Path) -> tuple[Any, Any]:
    """Model and tokenizer of a directory or a run; ConfigError for what is neither."""
    from shardwise.checkpoint.importing import newest_in
    from shardwise.checkpoint.store import MANIFEST

    if not path.exists():
        raise ConfigError(f"{path}: no such file or directory")
    if (path / "adapter_config.json").is_file():
        return _of_adapters(path)
    if (path / "config.json").is_file():
        return _of_directory(path)
    if (path / MANIFEST).is_file() or newest_in(path) is not None:
        return _of_run(path)
    raise ConfigError(f"{path}: holds no config.json, no adapters and no checkpoint of a run")


def _of_directory(path: Path) -> tuple[Any, Any]:
    from shardwise.train.config import HFModelConfig
    from shardwise.train.hf.description import describe

    described = describe(HFModelConfig(path=str(path)))
    try:
        model = described.model_class.from_pretrained(path, dtype="auto")
    except Exception as error:
        raise ConfigError(f"{path}: transformers cannot load it: {_line(error)}") from error
    return model, tokenizer_of(path)


def _of_adapters(path: Path) -> tuple[Any, Any]:
    from shardwise.checkpoint.beside import tokenizer_in
    from shardwise.train.hf.library import library

    said = json.loads((path / "adapter_config.json").read_text(encoding="utf-8"))
    base = Path(str(said.get("base_model_name_or_path")))
    if not base.is_dir():
        raise ConfigError(
            f"{path}: its base {base} is not there; merge it with its base: "
            f"shardwise checkpoint merge {path} DIR --base BASE"
        )
    model, tokenizer = _of_directory(base)
    if tokenizer_in(path):  # with a template or a pad token of their own, say
        tokenizer = tokenizer_of(path)
    return library("peft", str(path)).PeftModel.from_pretrained(model, path), tokenizer


def _of_run(path: Path) -> tuple[Any, Any]:
    """The model as the run's own configuration builds it, with the weights of a checkpoint."""
    import torch

    from shardwise.checkpoint.importing import open_source
    from shardwise.checkpoint.loading import load_model
    from shardwise.checkpoint.source import CheckpointSource
    from shardwise.train.config import HFModelConfig
    from shardwise.train.config_file import load_config
    from shardwise.train.model import build_model, fill
    from shardwise.train.text.keys import tokenizer_dir
    from shardwise.train.text.tokenizer import find_tokenizer

    source = open_source(path)
    assert isinstance(source, CheckpointSource)
    run = source.checkpoint.path.parent.parent
    config = load_config(run / "config.toml", [("run.device", "cpu")]).config
    if not isinstance(config.model, HFModelConfig):
        raise ConfigError(f"{run}: generates no text: its model.kind is {config.model.kind!r}")
    model: Any = build_model(config, None)
    fill(model, config, torch.device("cpu"), is_resumed=True)
    load_model(source, model, cast=True)
    source.close()
    tokenizer = tokenizer_of(tokenizer_dir(config) or path)
    if config.data.chat_template:
        tokenizer.chat_template = find_tokenizer(config).chat_template
    return model, tokenizer


def tokenizer_of(path: Path) -> Any:
    """The tokenizer that lies beside a model; ConfigError where there is none."""
    from shardwise.train.hf.library import library

    directory = path if path.is_dir() else path.parent
    try:
        return library().AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as error:
        raise ConfigError(f"{directory}: has no tokenizer: {_line(error)}") from error


def answer_to(
    model: Any,
    tokenizer: Any,
    prompt: str,
    system: str | None = None,
    *,
    use_chat: bool = True,
    **how: Any,
) -> str:
    """What `model.generate` adds to a prompt."""
    if use_chat and tokenizer.chat_template:
        turns = [{"role": "system", "content": system}] if system is not None else []
        turns.append({"role": "user", "content": prompt})
        given = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    else:
        given = tokenizer(prompt, return_tensors="pt")
    ids = given["input_ids"].to(model.device)
    if not ids.numel():
        raise ConfigError("--prompt: is empty")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    mask = given["attention_mask"].to(ids.device)
    made = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=pad, **how)
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True).strip()


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
