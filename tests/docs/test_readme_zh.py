"""README.zh-CN.md mirrors README.md: only the words differ.

Both pages are cut into blocks: headings, fenced code, rows of tables, list items, comments,
paragraphs. A block of one page and its counterpart have the same *facts*:

| block | what must be equal |
|---|---|
| heading | its level |
| fenced code | every byte |
| comment that stands alone | every byte |
| row of a table | number of cells; in each cell the facts of text |
| list item, paragraph | the facts of text |

Facts of text: the numbers with their bold marks and the link targets (in any order, as words move),
the comments, and which names hold a digit (`fp32`) or stand in backticks. A link to a heading of
the page itself counts as the number of that heading.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
ENGLISH, CHINESE = "README.md", "README.zh-CN.md"
SWITCHES = (f"English | [简体中文]({CHINESE})", f"[English]({ENGLISH}) | 简体中文")
WHAT_TO_DO = f"Make the same change in {CHINESE}: words translated, all else as in {ENGLISH}."

_HEADING = re.compile(r"(#+) (.+)")
_COMMENT = re.compile(r"<!-- .*? -->")
_CODE = re.compile(r"`[^`]+`")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NUMBER = re.compile(r"\*{0,2}(?<![A-Za-z0-9])\d+(?:[.,:-]\d+)*\*{0,2}")
_NAME = re.compile(r"[A-Za-z]+\d\w*", re.ASCII)


@dataclass(frozen=True)
class Block:
    line: int
    text: str
    facts: tuple[object, ...]


def blocks_of(page: str) -> list[Block]:
    """The page without its switch of languages."""
    found: list[tuple[int, str, str]] = []  # line, kind, text
    kind = ""  # of the block that the next line may go on
    for number, line in enumerate(page.splitlines(), 1):
        if kind == "code":
            at, _, text = found.pop()
            found.append((at, "code", f"{text}\n{line}"))
            kind = "" if line == "```" else kind
        elif line in SWITCHES or not line.strip():
            kind = ""
        elif kind in ("text", "item") and kind_of(line) == "text":
            at, _, text = found.pop()
            found.append((at, kind, f"{text} {line.strip()}"))
        else:
            kind = kind_of(line)
            found.append((number, kind, line))
    anchors = anchors_of([text for _, kind, text in found if kind == "heading"])
    return [Block(at, text, facts_of(kind, text, anchors)) for at, kind, text in found]


def kind_of(line: str) -> str:
    """The kind of the block that begins with this line."""
    if _COMMENT.fullmatch(line):
        return "comment"
    beginnings = {"```": "code", "|": "row", "- ": "item"}
    for beginning, kind in beginnings.items():
        if line.startswith(beginning):
            return kind
    return "heading" if _HEADING.fullmatch(line) else "text"


def anchors_of(headings: list[str]) -> dict[str, str]:
    """What a link to a heading of this page is on both pages: the heading's number."""
    slugs = [re.sub(r"[^\w\- ]", "", h.lstrip("# ").lower()).replace(" ", "-") for h in headings]
    return {f"#{slug}": f"heading {number}" for number, slug in enumerate(slugs)}


def facts_of(kind: str, text: str, anchors: dict[str, str]) -> tuple[object, ...]:
    """What a block and its counterpart on the other page share."""
    if kind in ("code", "comment"):
        return kind, *text.splitlines()
    if kind == "heading":
        return kind, _HEADING.fullmatch(text)[1]  # type: ignore[index]
    if kind == "row":
        cells = re.split(r"(?<!\\)\|", _CODE.sub(lambda m: m[0].replace("|", "\\|"), text))[1:-1]
        return kind, *(facts_of_text(cell, anchors) for cell in cells)
    return kind, facts_of_text(text, anchors)


def facts_of_text(text: str, anchors: dict[str, str]) -> tuple[tuple[str, ...], ...]:
    links = [anchors.get(target, target) for target in _LINK.findall(text)]
    comments = _COMMENT.findall(text)
    words = _LINK.sub("]", _COMMENT.sub("", text))
    code = _CODE.findall(words)
    words = _CODE.sub("", words)
    return (
        tuple(sorted(_NUMBER.findall(words))),
        tuple(sorted(links)),
        tuple(comments),
        tuple(sorted({*code, *_NAME.findall(words)})),
    )


def differences(english: str, chinese: str) -> list[str]:
    """Where the mirror is not one: for each place the lines of both pages, and what to do."""
    ours, theirs = blocks_of(english), blocks_of(chinese)
    matcher = difflib.SequenceMatcher(
        None, [b.facts for b in ours], [b.facts for b in theirs], autojunk=False
    )
    found = []
    for tag, *ends in matcher.get_opcodes():
        if tag != "equal":
            here, there = slice(*ends[:2]), slice(*ends[2:])
            counts = Counter(flat(ours[here])), Counter(flat(theirs[there]))
            found.append(
                f"{shown(ENGLISH, ours, here)}\n{shown(CHINESE, theirs, there)}\n"
                f"  only in {ENGLISH}: {list(counts[0] - counts[1])}\n"
                f"  only in {CHINESE}: {list(counts[1] - counts[0])}\n"
                f"  {WHAT_TO_DO}"
            )
    return found


def shown(name: str, blocks: list[Block], part: slice) -> str:
    """The part's blocks with their lines; the block before it if it is empty."""
    if part.start == part.stop:
        before = blocks[part.start - 1].line if part.start else 0
        return f"  {name}:{before}: nothing that corresponds after this line"
    return "\n".join(f"  {name}:{b.line}: {b.text.splitlines()[0]}" for b in blocks[part])


def flat(facts: Any) -> Iterator[str]:
    """All single facts of blocks."""
    for fact in facts:
        if isinstance(fact, str):
            yield fact
        else:
            yield from flat(fact.facts if isinstance(fact, Block) else fact)


def test_mirror() -> None:
    """Same headings, code, tables, numbers, links and comments."""
    pages = [(ROOT / name).read_text() for name in (ENGLISH, CHINESE)]
    found = differences(*pages)
    assert not found, f"{CHINESE} does not mirror {ENGLISH}:\n" + "\n".join(found)


@pytest.mark.parametrize(("name", "switch"), [(ENGLISH, SWITCHES[0]), (CHINESE, SWITCHES[1])])
def test_switch_of_languages(name: str, switch: str) -> None:
    """Each page leads to the other, below the title."""
    assert (ROOT / name).read_text().splitlines()[2] == switch


# -- the check itself ----------------------------------------------------------------------------
_PAGE = """# Title

English | [简体中文](README.zh-CN.md)

Words about FSDP2, 1.5 times ([table](#a-table)),
and `code`.

```sh
make test  # 3
```

## A table

<!-- mark -->

| what | `a | b` |
|---|---|
| one <!-- test_one --> | **0.54** s |
| | 1,743 MiB of fp32 |

## More

- [docs](docs/fsdp2.md#there): 2 words
  and more
- last
"""
_MIRROR = """# 标题

[English](README.md) | 简体中文

`code` 和 FSDP2，FSDP2 是 1.5 倍（[表](#表格)）。

```sh
make test  # 3
```

## 表格

<!-- mark -->

| 内容 | `a | b` |
|---|---|
| 一 <!-- test_one --> | **0.54** s |
| | fp32 的 1,743 MiB |

## 更多

- 2 个词（[文档](docs/fsdp2.md#there)）
- 最后
"""


def test_translated_words_are_no_difference() -> None:
    assert differences(_PAGE, _MIRROR) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("## More", "## New\n\nWords.\n\n## More"),
        ("## More", "### More"),
        ("- last\n", "- last\n\n## New\n"),
        ("make test  # 3", "make test  # 4"),
        ("```sh", "```console"),
        ("1.5 times", "1.6 times"),
        ("2 words", "two words"),
        ("1,743", "1,744"),
        ("**0.54**", "0.54"),
        ("**0.54** s |", "| **0.54** s |"),
        ("fp32", "bf16"),
        ("| | 1,743 MiB of fp32 |\n", ""),
        ("`code`", "`other`"),
        ("#there", "#here"),
        ("#a-table", "#more"),
        ("<!-- mark -->", "<!-- other -->"),
        ("test_one", "test_two"),
        ("- last", "- last\n- and one more"),
        ("and `code`.", "and `code`.\n\nAnother paragraph."),
    ],
)
def test_changes_are_found(old: str, new: str) -> None:
    """Each change of the English page alone is one difference that says what to do."""
    assert old in _PAGE
    (found,) = differences(_PAGE.replace(old, new), _MIRROR)
    assert found.endswith(WHAT_TO_DO)
    assert re.search(rf"^  {re.escape(ENGLISH)}:\d+: ", found)
