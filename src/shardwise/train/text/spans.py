"""Tokens of texts and chats, and which of them are trained: of a chat, those of the assistant.

A chat template may mark the assistant's part itself ({% generation %}). Else each answer is found
by rendering the chat up to it and through it:

    rendered up to the answer    <user> Hi <end> <assistant>
    rendered through the answer  <user> Hi <end> <assistant> Hello <end>
    trained                                                  ^^^^^^^^^^^

Both have to be beginnings of the whole chat, as texts and as tokens; for templates that render a
chat differently when it goes on (some leave out thoughts of earlier answers) they are not, and then
nothing tells which tokens are the assistant's: training is refused. White space behind the token
that ends an answer is not trained: generation stops before it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.errors import ConfigError
from shardwise.train.text.files import Place, RecordError
from shardwise.train.text.messages import Message

_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_END = 24  # characters
_REMEDY = (
    "use a template that marks the assistant's part with {% generation %} ... {% endgeneration %} "
    "(data.chat_template = FILE)"
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of one document; `trained` says of each whether it has a loss."""

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]

    @property
    def num_trained(self) -> int:
        """The first token of a document has none before it, which could predict it."""
        return int(self.trained[1:].sum())


class TextEncoder:
    """Texts, all of whose tokens are trained, with the token that ends a text behind them."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._end = tokenizer, tokenizer.eos_token_id

    def __call__(self, items: Sequence[tuple[Place, str]]) -> list[Encoded | RecordError]:
        texts = [text for _, text in items]
        found = self._tokenizer(texts, return_attention_mask=False, verbose=False)["input_ids"]
        return [self._ended(ids) for ids in found]

    def _ended(self, ids: list[int]) -> Encoded:
        if self._end is not None and (not ids or ids[-1] != self._end):
            ids = [*ids, self._end]
        return Encoded(np.array(ids, dtype=np.int64), np.ones(len(ids), dtype=bool))


class ChatEncoder:
    """Chats through the template of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._has_marks = _MARK.search(tokenizer.chat_template) is not None
        if self._has_marks and not tokenizer.is_fast:
            raise ConfigError(
                "data.tokenizer: marks in a chat template need a fast tokenizer (tokenizer.json)"
            )
        self._with_prompt: set[tuple[str, ...]] = set()  # roles that were seen to have one
        added = tokenizer.added_tokens_decoder
        self._special = {*tokenizer.all_special_ids, *(i for i, t in added.items() if t.special)}

    def __call__(self, items: Sequence[tuple[Place, list[Message]]]) -> list[Encoded | RecordError]:
        if self._has_marks:
            return [self._marked(place, chat) for place, chat in items]
        found: list[Encoded | RecordError | _Rendered] = []
        for place, chat in items:
            try:
                found.append(self._rendered(place, chat))
            except RecordError as error:
                found.append(error)
        texts = list({text: None for r in found if isinstance(r, _Rendered) for text in r.texts})
        tokens = dict(zip(texts, self._tokens(texts), strict=True)) if texts else {}
        return [self._spans(r, tokens) if isinstance(r, _Rendered) else r for r in found]

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        made = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, verbose=False
        )
        return made["input_ids"]

    def _marked(self, place: Place, chat: list[Message]) -> Encoded | RecordError:
        try:
            made = self._render(
                place, chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
        except RecordError as error:
            return error
        tokens = np.array(made["input_ids"], dtype=np.int64)
        trained = np.array(made["assistant_masks"], dtype=bool)
        _check_kept(place, chat, self._render(place, chat, tokenize=False))
        if not trained.any():
            raise ConfigError(f"data.chat_template: {place}: its marks hold no token of this chat")
        return Encoded(tokens, trained)

    def _render(self, place: Place, chat: list[Message], **options: Any) -> Any:
        """RecordError for what the template itself refuses."""
        from jinja2 import TemplateSyntaxError

        try:
            return self._tokenizer.apply_chat_template(chat, **options)
        except TemplateSyntaxError as error:
            text = f"data.chat_template: line {error.lineno}: {error.message}"
            raise ConfigError(text) from None
        except Exception as error:  # noqa: BLE001 - templates are programs
            why = " ".join(str(error).split()) or type(error).__name__
            hint = ""
            if chat[0]["role"] == "system":
                hint = '; data.system = "merge" puts the text of the system into the first message'
            raise RecordError(place, f"the chat template refuses it: {why}{hint}") from None

    def _rendered(self, place: Place, chat: list[Message]) -> _Rendered:
        whole = self._render(place, chat, tokenize=False)
        _check_kept(place, chat, whole)
        answers = []
        for at, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            prompt = self._render(place, chat[:at], tokenize=False, add_generation_prompt=True)
            through = whole
            if at < len(chat) - 1:
                through = self._render(place, chat[: at + 1], tokenize=False)
            if not whole.startswith(through) or not through.startswith(prompt):
                raise _cannot_tell(place, "an answer looks otherwise when the chat goes on")
            self._check_prompt(place, chat[: at + 1], prompt, through)
            answers.append((prompt, through))
        return _Rendered(place, whole, answers)

    def _check_prompt(self, place: Place, chat: list[Message], prompt: str, through: str) -> None:
        """Without a prompt for generation, what comes first may be the name of the role. Templates
        go by roles there, so it is asked once for those in that order."""
        roles = tuple(message["role"] for message in chat)
        if roles in self._with_prompt:
            return
        *before, answer = chat
        if self._render(place, before, tokenize=False) != prompt:
            self._with_prompt.add(roles)
            return
        name, found, _ = through[len(prompt) :].partition(answer["content"].strip())
        if not found or name.strip():
            raise _cannot_tell(
                place,
                "it has no prompt for generation, and the name of the role would be trained",
            )

    def _spans(self, rendered: _Rendered, tokens_of: dict[str, list[int]]) -> Encoded:
        whole = tokens_of[rendered.whole]
        trained = np.zeros(len(whole), dtype=bool)
        for prompt, through in rendered.answers:
            before, ids = tokens_of[prompt], tokens_of[through]
            if whole[: len(before)] != before or whole[: len(ids)] != ids:
                raise _cannot_tell(rendered.place, "a token holds the end of one message and the "
                                   "beginning of the next")  # fmt: skip
            trained[len(before) : self._end(whole, len(before), len(ids))] = True
        return Encoded(np.array(whole, dtype=np.int64), trained)

    def _end(self, tokens: list[int], start: int, end: int) -> int:
        """Without white space behind the token that ends the answer."""
        at = end
        while at > start and self._tokenizer.decode([tokens[at - 1]]).isspace():
            at -= 1
        return at if at > start and tokens[at - 1] in self._special else end


@dataclass(frozen=True, slots=True)
class _Rendered:
    """A chat as text, and for each answer the texts up to it and through it."""

    place: Place
    whole: str
    answers: list[tuple[str, str]]

    @property
    def texts(self) -> list[str]:
        return [self.whole, *(text for pair in self.answers for text in pair)]


def _check_kept(place: Place, chat: list[Message], whole: str) -> None:
    """Templates of models that see images take a text only as a part of a list, and leave out
    others without a word. The ends are looked for: what was thought before them may be left out."""
    for number, message in enumerate(chat, start=1):
        *_, end = message["content"].strip().splitlines() or [""]
        end = end[-_END:]
        if message["role"] in ("user", "assistant") and end not in whole:
            raise ConfigError(
                f"data.chat_template: {place}: the chat template leaves out the text of message "
                f"{number}; give one for texts (data.chat_template = FILE)"
            )


def _cannot_tell(place: Place, why: str) -> ConfigError:
    return ConfigError(
        f"data.chat_template: {place}: the chat template does not tell which tokens are the "
        f"assistant's ({why}); {_REMEDY}"
    )
