"""Rules of this project that no general tool knows. Each breach: where, what, what to do.

| rule | where |
|---|---|
| private torch names are used in `_torch_compat.py` only | src |
| torch's own FSDP is imported in `install.py` and in `bench/peers/` only: it is what we are
  compared with, and in that folder it is what is measured; nothing else may import the folder,
  except `bench/trainers.py` by name when that engine is asked for | src |
| nothing is left for later: stub words, empty functions, NotImplementedError without a text | all |
| a test that is skipped or expected to fail says why | tests |

Names are followed through imports (`import torch.distributed as dist; dist._x`); private attributes
of instances (`mesh._x`) are not seen.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")
COMPAT = "_torch_compat.py"
INSTALL = "install.py"
PEER = "torch.distributed.fsdp"
PEERS_FOLDER = ("src", "shardwise", "bench", "peers")
PEERS_MODULE = "shardwise.bench.peers"
STUB_WORDS = re.compile(
    r"\b(TODO|FIXME|XXX|HACK|WIP)\b"  # project_rules: allow
    r"|(?i:\b(for now|not (yet )?implemented|coming soon)\b)"  # project_rules: allow
    r"|(?i:\b(implement me|lorem ipsum|left as an exercise)\b)"  # project_rules: allow
)

Breach = tuple[int, str]


def breaches_of(source: str, path: Path) -> list[Breach]:
    """All breaches in one file; the path (relative to the repository) says which rules apply."""
    tree = ast.parse(source, str(path))
    found = [*stub_words(source), *stub_functions(tree)]
    if path.parts[0] == "src":
        if path.name != COMPAT:
            found += private_torch(tree)
        if path.parts[:-1] != PEERS_FOLDER:
            found += imports_of_peers(tree)
            if path.name != INSTALL:
                found += peer_imports(tree)
    if path.parts[0] == "tests":
        found += silent_skips(tree)
    return sorted(set(found))


def private_torch(tree: ast.Module) -> Iterator[Breach]:
    """Private torch names, imported or reached through an imported name."""
    names = _torch_names(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        for full_name in _torch_paths(node, names):
            # What follows torch.ops is an operator's registered name.
            if not full_name.startswith("torch.ops.") and _is_private(full_name):
                yield (
                    line,
                    f"private torch name {full_name}; it belongs into {COMPAT}, with the reason",
                )


def peer_imports(tree: ast.Module) -> Iterator[Breach]:
    """Uses of torch's FSDP."""
    names = _torch_names(tree)
    for node in ast.walk(tree):
        for full_name in _torch_paths(node, names):
            if full_name == PEER or full_name.startswith(PEER + "."):
                yield (
                    node.lineno,
                    f"{full_name} is the peer; only {INSTALL} may import it (and bench/peers)",
                )


def imports_of_peers(tree: ast.Module) -> Iterator[Breach]:
    """Import statements of the folder that holds the peers."""
    for node in ast.walk(tree):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [f"{node.module}.{alias.name}" for alias in node.names]
        if any(f"{module}.".startswith(PEERS_MODULE + ".") for module in modules):
            yield node.lineno, f"{PEERS_MODULE} is what is measured; nothing is built on it"


def stub_words(source: str) -> Iterator[Breach]:
    """Words that announce work left undone."""
    for number, line in enumerate(source.splitlines(), 1):
        match = STUB_WORDS.search(line)
        if match and "project_rules: allow" not in line:
            yield number, f"'{match.group()}': finish it, or file an issue and say what holds today"


def stub_functions(tree: ast.Module) -> Iterator[Breach]:
    """Functions without a body or docstring, and NotImplementedError without a text."""
    declared = {
        id(member)
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        and any("Protocol" in ast.unparse(b) for b in owner.bases)
        for member in owner.body
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
            exempt = id(node) in declared or re.search(r"overload|abstract", decorators)
            if not exempt and all(_is_nothing(statement) for statement in node.body):
                yield node.lineno, f"{node.name} is empty; a docstring says why nothing is to do"
        elif isinstance(node, ast.Raise) and node.exc is not None:
            bare = ast.unparse(node.exc).removesuffix("()") == "NotImplementedError"
            if bare:
                text = "NotImplementedError needs a text: what is missing, and the way round"
                yield node.lineno, text


def silent_skips(tree: ast.Module) -> Iterator[Breach]:
    """skip, skipif and xfail without a reason."""
    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        name = ast.unparse(node)
        if not re.fullmatch(r"pytest\.(mark\.)?(skip|skipif|xfail)", name):
            continue
        call = called.get(id(node))
        if call is None:
            # pytest.skip.Exception is not a skip.
            has_reason = not name.startswith("pytest.mark.")
        else:
            by_name = any(keyword.arg in ("reason", "msg") for keyword in call.keywords)
            positional = name in ("pytest.skip", "pytest.xfail", "pytest.mark.skip") and call.args
            has_reason = by_name or bool(positional)
        if not has_reason:
            yield node.lineno, f"{name} without a reason; add reason='...'"


def _torch_names(tree: ast.Module) -> dict[str, str]:
    """Local names that stand for torch or something of it -> their full names."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "torch":
                    names[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def _torch_paths(node: ast.AST, names: dict[str, str]) -> Iterator[str]:
    """Full torch names that this node mentions."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
    elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute):
        chain = ast.unparse(node)
        if re.fullmatch(r"[\w.]+", chain):
            root, _, rest = chain.partition(".")
            if root in names:
                yield f"{names[root]}.{rest}"
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
        ("import_module", "__import__")
    ):
        first = node.args[0] if node.args else None
        if isinstance(first, ast.Constant) and str(first.value).split(".")[0] == "torch":
            yield str(first.value)


def _is_private(full_name: str) -> bool:
    return any(
        part.startswith("_") and not (part.startswith("__") and part.endswith("__"))
        for part in full_name.split(".")
    )


def _is_nothing(statement: ast.stmt) -> bool:
    is_dots = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return isinstance(statement, ast.Pass) or (is_dots and statement.value.value is ...)


def main() -> int:
    """Check every Python file of the project; 1 when a rule is broken."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    broken = 0
    for path in paths:
        name = path.relative_to(ROOT)
        for line, text in breaches_of(path.read_text(), name):
            broken += 1
            print(f"{name}:{line}: {text}")
    print(f"{broken} breaches in {len(paths)} files")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
