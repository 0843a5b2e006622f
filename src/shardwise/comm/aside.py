"""A thread that waits in the place of this one, and is left behind when that takes too long."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

Answer = queue.SimpleQueue[Any]  # of one thing: what the question returned, or its exception
_Questions = queue.SimpleQueue[tuple[Callable[[], Any], Answer] | None]


class Aside:
    """One thread, made at the first question."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._questions: _Questions | None = None

    def ask(self, question: Callable[[], Any]) -> Answer:
        """Answers come in the order of the questions."""
        if self._questions is None:
            self._questions = queue.SimpleQueue()
            threading.Thread(
                target=_answer, args=(self._questions,), daemon=True, name=self._name
            ).start()
        answer: Answer = queue.SimpleQueue()
        self._questions.put((question, answer))
        return answer

    def leave(self) -> None:
        """The thread ends once it is no longer stuck; the next question gets a new one."""
        if self._questions is not None:
            self._questions.put(None)
            self._questions = None


def _answer(questions: _Questions) -> None:
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            with torch.no_grad():
                answer.put(question())
        except Exception as error:  # noqa: BLE001 - it is raised by whoever asked
            answer.put(error)
