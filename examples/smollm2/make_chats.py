"""Makes chats with known answers out of the docstrings of Python's standard library, as JSONL.

    {"messages": [{"role": "user", "content": "What does os.walk do in Python?"},
                  {"role": "assistant", "content": "Directory tree generator. ..."}]}

The answer is the beginning of the docstring. The same Python version makes the same file; a
part is kept apart by the name, so that what is held out was never trained on.

    python examples/smollm2/make_chats.py data/chats.jsonl --held-out data/held_out.jsonl
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# Modules that do nothing when they are imported, here on every platform that Python runs on.
MODULES = """
abc argparse ast base64 bisect bz2 calendar cmath codecs collections concurrent.futures
configparser contextlib copy csv dataclasses datetime decimal difflib dis email.message
email.utils enum fileinput fnmatch fractions ftplib functools gc getpass gettext glob graphlib
gzip hashlib heapq hmac html http.client http.cookies importlib importlib.metadata
importlib.resources inspect io ipaddress itertools json keyword linecache locale logging lzma
mailbox math mimetypes multiprocessing netrc numbers operator os os.path pathlib pdb pickle
pkgutil platform plistlib pprint profile pstats py_compile pydoc queue quopri random re reprlib
runpy sched secrets selectors shelve shlex shutil signal smtplib socket socketserver sqlite3 ssl
stat statistics string struct subprocess symtable sys sysconfig tarfile tempfile textwrap
threading time timeit tokenize trace traceback tracemalloc types typing unicodedata unittest
unittest.mock urllib.parse urllib.request uuid warnings wave weakref webbrowser xml.dom
xml.etree.ElementTree zipfile zipimport zlib zoneinfo
""".split()
MIN_ANSWER, MAX_ANSWER = 40, 600  # characters


def main() -> int:
    parser = argparse.ArgumentParser(description="write chats about the standard library")
    parser.add_argument("file", type=Path, nargs="?", default=Path("data/chats.jsonl"))
    parser.add_argument("--held-out", type=Path, help="write every tenth to this file instead")
    options = parser.parse_args()
    chats: dict[bool, list[str]] = {False: [], True: []}
    for name, answer in sorted(answers().items()):
        question = f"What does {name} do in Python?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        is_held_out = options.held_out is not None and tenth(name)
        chats[is_held_out].append(json.dumps({"messages": turns}, ensure_ascii=False))
    for path, lines in ((options.file, chats[False]), (options.held_out, chats[True])):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
            print(f"{path}: {len(lines)} chats")
    return 0


def answers() -> dict[str, str]:
    """What each function and class does, by its full name; none twice."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for module_name in MODULES:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:  # an optional part of this Python
            continue
        for name, thing in public(module):
            text = beginning(thing)
            if MIN_ANSWER <= len(text) <= MAX_ANSWER and text not in seen:
                seen.add(text)
                found[f"{module_name}.{name}"] = text
    return found


def public(module: ModuleType) -> Iterator[tuple[str, object]]:
    for name, thing in sorted(vars(module).items()):
        is_own = getattr(thing, "__module__", None) in (module.__name__, None, "builtins")
        of_package = str(getattr(thing, "__module__", "")).lstrip("_").startswith(module.__name__)
        if name.startswith("_") or not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue
        if is_own or of_package:
            yield name, thing


def beginning(thing: object) -> str:
    """The first paragraph of its own docstring, and the next where that says little."""
    own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else thing.__doc__
    if not isinstance(own, str):
        return ""
    text = ""
    for paragraph in inspect.cleandoc(own).split("\n\n"):
        text = f"{text} {' '.join(paragraph.split())}".strip()
        if len(text) >= MIN_ANSWER:
            break
    is_signature = "->" in text[:60] or ("(" in text and text.split("(")[0].isidentifier())
    return "" if is_signature else text


def tenth(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 10 == 0


if __name__ == "__main__":
    sys.exit(main())
