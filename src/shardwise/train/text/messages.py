"""Records as texts or as chats, checked: what cannot be trained on is named, with its place.

A chat is a list of messages as chat templates take them: an optional system message, then user and
assistant in turn (tool messages behind the assistant that asked for them), and an answer at its
end. An instruction becomes a chat of two messages.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from shardwise.train.text.files import Record, RecordError, missing

Message = dict[str, Any]

# Names of roles in files of other projects.
_ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
_KNOWN = ("system", "user", "assistant", "tool")
# Who may speak after whom; "" is the beginning (behind the system's message).
_NEXT = {
    "": ("user",),
    "user": ("assistant",),
    "assistant": ("user", "tool"),
    "tool": ("tool", "assistant"),
}


@dataclass(frozen=True, slots=True)
class Reader:
    """How records of one format are read."""

    format: str
    fields: dict[str, str]
    system: str

    def text(self, record: Record) -> str:
        """The text of a record; RecordError where it has none."""
        return self._text(record, "text")

    def chat(self, record: Record) -> list[Message]:
        """The messages of a record; RecordError where they are no chat with an answer."""
        if self.format == "instruction":
            return self._instruction(record)
        raw = self._value(record, "messages")
        if isinstance(raw, str):  # a cell of a table
            raw = _list_in(raw)
        if not isinstance(raw, list) or not all(isinstance(m, dict) for m in raw):
            name = self.fields["messages"]
            raise RecordError(record.place, f"{name!r} is not a list of messages (objects)")
        if not raw:
            raise RecordError(record.place, "has no messages")
        messages = [self._message(record, m, n) for n, m in enumerate(raw, start=1)]
        _check_order(record, messages)
        return self._with_system(record, messages)

    def _instruction(self, record: Record) -> list[Message]:
        question = self._text(record, "instruction")
        name = self.fields["input"]
        extra = record.values.get(name)
        if extra is not None and not isinstance(extra, str):
            raise RecordError(record.place, f"{name!r} is not a text")
        _check_whole(record, extra or "")
        if name != "input" and name not in record.values:
            self._value(record, "input")  # somebody asked for it
        if extra and extra.strip():
            question = f"{question}\n\n{extra}"
        answer = self._text(record, "output", "the answer")
        return [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def _value(self, record: Record, key: str) -> Any:
        field = self.fields[key]
        if field not in record.values:
            raise RecordError(record.place, missing(field, key, record.values))
        return record.values[field]

    def _text(self, record: Record, key: str, what: str = "") -> str:
        value, field = self._value(record, key), self.fields[key]
        if value is not None and not isinstance(value, str):
            raise RecordError(record.place, f"{field!r} is not a text")
        if not value or not value.strip():
            what = f"{what} ({field!r})" if what else repr(field)
            raise RecordError(record.place, f"{what} is empty")
        _check_whole(record, value)
        return value

    def _message(self, record: Record, raw: Message, number: int) -> Message:
        found = {k: v for k, v in raw.items() if v is not None}  # tables fill what lacks with None
        role_field, content_field = self.fields["role"], self.fields["content"]
        for key, field in (("role", role_field), ("content", content_field)):
            if field not in raw:
                text = missing(field, key, raw)
                raise RecordError(record.place, f"message {number} {text}")
        said = found.pop(role_field, None)
        role = _ROLES.get(said, said) if isinstance(said, str) else said
        if role not in _KNOWN:
            text = f"message {number} has the role {said!r}; there are {', '.join(_KNOWN)}"
            raise RecordError(record.place, text)
        content = _joined(found.pop(content_field, ""))
        if content is None:
            raise RecordError(record.place, f"the content of message {number} is not a text")
        _check_whole(record, json.dumps(found, ensure_ascii=False, default=str) + content)
        if not content.strip() and not (role == "assistant" and found.get("tool_calls")):
            what = "the answer" if role == "assistant" else f"the text of the {role}"
            raise RecordError(record.place, f"{what} (message {number}) is empty")
        return {**found, "role": role, "content": content}

    def _with_system(self, record: Record, messages: list[Message]) -> list[Message]:
        """As `data.system` says, for templates without that role."""
        if messages[0]["role"] != "system" or self.system == "keep":
            return messages
        system, first, *rest = messages
        if self.system == "merge":
            first = {**first, "content": f"{system['content']}\n\n{first['content']}"}
        return [first, *rest]


def _check_whole(record: Record, text: str) -> None:
    """JSON can write half of a pair of code units, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(text[error.start]):04x}"
        raise RecordError(
            record.place, f"holds {half}, half of a character (of a text that was cut?)"
        ) from None


def _list_in(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _joined(content: Any) -> str | None:
    """A text, or a list of parts that are all texts; None for anything else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    texts: list[Any] = [
        p.get("text") for p in content if isinstance(p, dict) and p.get("type") == "text"
    ]
    is_text = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
    return "".join(texts) if is_text else None


def _check_order(record: Record, messages: list[Message]) -> None:
    before = ""
    for number, message in enumerate(messages, start=1):
        role = message["role"]
        if role == "system":
            if number > 1:
                text = f"message {number} is of the system, which may only be the first"
                raise RecordError(record.place, text)
            continue
        if role not in _NEXT[before]:
            expected = " or ".join(_NEXT[before])
            where = f"behind {before}" if before else "at the beginning"
            text = f"message {number} is of the {role}; {where} it has to be of the {expected}"
            raise RecordError(record.place, text)
        before = role
    if before != "assistant":
        text = f"ends with a message of the {before or 'system'}: there is no answer to train on"
        raise RecordError(record.place, text)
