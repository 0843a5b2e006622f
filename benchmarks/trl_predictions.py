"""What a loss must be, from the losses of single tokens of a plain model: for trl_losses.py.

mean               over all trained tokens: a step's loss, on any ranks and micro-batches
mean_of_ranks      the mean over ranks of each rank's mean over its tokens
mean_of_batches    the mean over batches of each batch's mean, as `Trainer` evaluates
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

Sample = tuple[list[int], list[int]]  # tokens and labels


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The losses of the trained tokens of each sample."""

    samples: list[list[float]]

    def mean(self) -> float:
        return _mean([loss for sample in self.samples for loss in sample])

    def mean_of_ranks(self, size: int, num_ranks: int) -> float:
        """Batches of `size` go to the ranks in turn."""
        owned: list[list[float]] = [[] for _ in range(num_ranks)]
        for number, batch in enumerate(self._batches(size)):
            owned[number % num_ranks] += batch
        return _mean([_mean(losses) for losses in owned])

    def mean_of_batches(self, size: int, num_ranks: int) -> float:
        """A batch's mean counts `size` times, for the last too, and what exceeds the number of
        samples is cut off; where ranks are left without a batch, the first samples come again."""
        count, share = len(self.samples), size * num_ranks
        samples = list(self.samples)
        while num_ranks > 1 and len(samples) % share:
            samples.append(self.samples[(len(samples) - count) % count])
        repeated = TokenLosses(samples)._batches(size)
        losses = [_mean(batch) for batch in repeated for _ in range(size)]
        return _mean(losses[:count])

    def _batches(self, size: int) -> list[list[float]]:
        starts = range(0, len(self.samples), size)
        return [[x for s in self.samples[i : i + size] for x in s] for i in starts]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Of each part and kind ("answers": as we label them, "whole": all but the first token)."""

    losses: dict[tuple[str, str], TokenLosses]

    @classmethod
    def of_model(cls, path: Path, parts: dict[str, list[Sample]]) -> Predictions:
        import torch
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        found: dict[tuple[str, str], TokenLosses] = {}
        for part, samples in parts.items():
            answers, whole = [], []
            for tokens, labels in samples:
                losses = _losses(model, tokens)
                whole.append(losses)
                pairs = zip(losses, labels[1:], strict=True)
                answers.append([loss for loss, label in pairs if label >= 0])
            found[part, "answers"], found[part, "whole"] = TokenLosses(answers), TokenLosses(whole)
        return cls(found)

    def of(self, part: str, kind: str) -> TokenLosses:
        return self.losses[part, kind]

    def summary(self, micro_batch: int, eval_batches: tuple[int, ...]) -> dict[str, Any]:
        """The first step, and the evaluation before it."""
        result: dict[str, Any] = {}
        for (part, kind), tokens in self.losses.items():
            row: dict[str, Any] = {"tokens": sum(map(len, tokens.samples)), "mean": tokens.mean()}
            if part == "train":
                row["mean_of_2_ranks"] = tokens.mean_of_ranks(micro_batch, 2)
            else:
                row["mean_of_batches"] = {n: tokens.mean_of_batches(n, 1) for n in eval_batches}
            result[f"{part}, {kind}"] = row
        return result


def _losses(model: Any, tokens: list[int]) -> list[float]:
    """Of each token but the first, alone in its row: nothing is padded."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = torch.tensor([tokens])
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        return cross_entropy(logits.double(), ids[0, 1:], reduction="none").tolist()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
