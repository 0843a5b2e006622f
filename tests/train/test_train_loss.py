"""Chunked cross-entropy beside the plain one: function by function, and model by model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import ConfigError
from shardwise.train.loss.causal import LossChoice, token_mean, use_token_loss
from shardwise.train.loss.chunked import linear_cross_entropy, rows_of_chunk
from shardwise.train.loss.lazy import LazyLogits

ROWS, DIM, VOCAB = 150, 24, 331  # three chunks, the last of them short


def cap(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2.0) * 2.0


def head(dtype: torch.dtype = torch.float32, *, bias: bool = False) -> tuple[Any, ...]:
    torch.manual_seed(3)
    hidden = torch.randn(ROWS, DIM, dtype=dtype, requires_grad=True)
    weight = torch.randn(VOCAB, DIM, dtype=dtype).mul_(0.3).requires_grad_()
    offset = torch.randn(VOCAB, dtype=dtype, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(VOCAB, (ROWS,))


def plain(hidden: Tensor, weight: Tensor, bias: Any, targets: Tensor, operations: Any) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    for operation in operations:
        logits = operation(logits)
    return F.cross_entropy(logits.float(), targets, reduction="sum")


def results(function: Any, tensors: tuple[Any, ...], operations: Any) -> list[Tensor]:
    wanted = [t for t in tensors[:3] if t is not None and t.requires_grad]
    loss = function(*tensors, operations)
    return [loss.detach(), *torch.autograd.grad(loss * 0.7, wanted)]


@pytest.mark.parametrize("operations", [(), (cap,), (torch.Tensor.float,)])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_to_the_plain_loss(bias: bool, operations: Any) -> None:
    tensors = head(bias=bias)
    assert 2 * rows_of_chunk(DIM) < ROWS < 3 * rows_of_chunk(DIM)
    for ours, want in zip(
        results(linear_cross_entropy, tensors, operations),
        results(plain, tensors, operations),
        strict=True,
    ):
        # fp32: sums of 150 rows in another order, a few units in the last place of the largest
        assert (ours - want).abs().max() <= 2e-6 * want.abs().max()


def test_bf16_is_as_near_to_the_truth_as_the_plain_loss() -> None:
    """Gradients of many chunks add up in float32; in bf16 they would lose what chunks give."""
    tensors = head(torch.bfloat16)
    exact = tuple(t.detach().double().requires_grad_() for t in tensors[:2])
    truth = results(plain, (*exact, None, tensors[3]), ())
    ours = results(linear_cross_entropy, tensors, ())
    theirs = results(plain, tensors, ())
    for found, other, want in zip(ours, theirs, truth, strict=True):
        error, allowed = (float((x.double() - want).square().mean().sqrt()) for x in (found, other))
        # One rounding more: the gradient is made before the loss's own gradient is known.
        assert error <= 1.5 * allowed + 1e-6 * float(want.abs().max())
    assert [x.dtype for x in ours] == [torch.float32, torch.bfloat16, torch.bfloat16]


def test_no_rows_and_no_gradients() -> None:
    hidden, weight, _, targets = head()
    loss = linear_cross_entropy(hidden[:0], weight, None, targets[:0])
    grads = torch.autograd.grad(loss, (hidden, weight), allow_unused=True)
    assert loss == 0 and all(g is None or not g.any() for g in grads)
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, None, targets).requires_grad


def test_a_frozen_head_has_no_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        "shardwise.train.loss.chunked._buffer_for", lambda t: made.append(t) or torch.zeros(t.shape)
    )
    hidden, weight, _, targets = head()
    linear_cross_entropy(hidden, weight.detach(), None, targets).backward()
    assert hidden.grad is not None and not made
    linear_cross_entropy(hidden, weight, None, targets).backward()
    assert len(made) == 1  # for all chunks


def test_gradients_are_given_out_once() -> None:
    hidden, weight, _, targets = head()
    loss = linear_cross_entropy(hidden, weight, None, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="asked for a second time"):
        loss.backward()


# -- lazy logits ---------------------------------------------------------------------------------
class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, VOCAB)
        self.calls: list[int] = []

    def forward(self, hidden: Tensor, targets: Any = None, operations: Any = ()) -> Tensor:
        self.calls.append(len(operations))
        if targets is None:
            return F.linear(hidden, self.weight, self.bias)
        return linear_cross_entropy(hidden, self.weight, self.bias, targets, operations)


OPERATIONS = [
    lambda x: (torch.tanh(x / 3.0) * 3.0).float(),
    lambda x: 1.5 * x.to(torch.float32) + 1 - 2,
    lambda x: torch.clamp(x, min=-1.0, max=1.0).contiguous(),
    lambda x: x * torch.full((), 2.0),  # a tensor: computed
    lambda x: x.softmax(-1),
    torch.nn.functional.relu,
    lambda x: x[..., :10].tanh(),
]


@pytest.mark.parametrize("number", range(len(OPERATIONS)))
def test_lazy_logits_are_logits(number: int) -> None:
    head, hidden = Head(), torch.randn(2, 5, DIM)
    found = OPERATIONS[number](LazyLogits(head, hidden))
    assert isinstance(found, LazyLogits) == (number < 3)
    found = found.computed() if isinstance(found, LazyLogits) else found
    assert torch.equal(found, OPERATIONS[number](head(hidden)))
    assert len(head.calls) == 2


# -- models of transformers ----------------------------------------------------------------------
SMALL = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama_tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8}),
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {**SMALL, "head_dim": 8}),
    "mistral": ("Mistral", SMALL),
    "phi": ("Phi", SMALL),  # a head with a bias
    "gpt2": ("GPT2LMHead", {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "olmo": ("Olmo", SMALL),
    "cohere": ("Cohere", {**SMALL, "logit_scale": 0.3}),
    "granite": ("Granite", {**SMALL, "logits_scaling": 3.0}),
    "mixtral": ("Mixtral", {**SMALL, "output_router_logits": True}),
    "qwen_moe": (
        "Qwen2Moe", {**SMALL, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    ),
}  # fmt: skip


def built(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    kind, options = MODELS[name]
    prefix = {"GPT2LMHead": "GPT2", "Gemma3": "Gemma3Text"}.get(kind, kind)
    config = getattr(transformers, f"{prefix}Config")(**options)
    causal = f"{kind}Model" if kind.endswith("LMHead") else f"{kind}ForCausalLM"
    torch.manual_seed(0)
    return getattr(transformers, causal)(config).eval()


def labelled() -> dict[str, Tensor]:
    """Some labels are not trained; one sample has none that is."""
    ids = torch.randint(1, 300, (3, 70), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[:, :20] = labels[1] = -100
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("name", MODELS)
def test_chunked_loss_of_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = built(name)
    theirs = copy.deepcopy(model)
    choice = use_token_loss(model, "on")
    assert choice is not None and choice.chunks(210)
    widest: list[int] = []
    linear = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, w, b=None: (widest.append(len(w) * len(x)), linear(x, w, b))[1]
    )
    batch, outputs = labelled(), []
    for one in (model, theirs):
        widest.clear()
        outputs.append(one(**batch, use_cache=False))
        outputs[-1].loss.backward()
        if one is model:  # all logits of a chunk at most
            assert max(widest) <= 300 * rows_of_chunk(32)
    ours, want = outputs
    assert "logits" not in ours and ours.loss.item() == pytest.approx(want.loss.item(), rel=1e-6)
    for (at, p), q in zip(model.named_parameters(), theirs.parameters(), strict=True):
        if q.grad is not None:
            assert p.grad is not None, at
            assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max() + 1e-9, at
    with torch.no_grad():
        assert torch.equal(model(batch["input_ids"]).logits, theirs(batch["input_ids"]).logits)
    again = copy.deepcopy(model)  # the copy's loss is that of the copy's head
    again.get_output_embeddings().weight.data.zero_()
    assert again(**batch, use_cache=False).loss.item() != pytest.approx(ours.loss.item())


@pytest.mark.parametrize("mode", ["on", "off"])
def test_a_batch_without_trained_tokens_has_loss_zero(mode: Any) -> None:
    model = built("llama")
    use_token_loss(model, mode)
    batch = labelled()
    loss = model(batch["input_ids"][1:2], labels=batch["labels"][1:2]).loss
    loss.backward()
    assert loss == 0 and all(not p.grad.any() for p in model.parameters() if p.grad is not None)


def test_auto_goes_by_tokens() -> None:
    """3 x tokens of logits against a chunk of 64 and the 32 columns of the head's gradient."""
    choice = LossChoice("auto", dim=32)
    assert not choice.chunks(32) and choice.chunks(33)
    assert LossChoice("auto", dim=32, is_trained=False).chunks(22)
    assert not LossChoice("off", dim=32).chunks(10**6) and LossChoice("on", dim=32).chunks(1)
    model = built("llama")
    assert use_token_loss(model, "auto") == choice
    ids = torch.ones(1, 32, dtype=torch.long)
    assert "logits" in model(input_ids=ids, labels=ids)
    ids = torch.ones(2, 32, dtype=torch.long)
    assert "logits" not in model(input_ids=ids, labels=ids)


def test_what_cannot_be_chunked_is_said() -> None:
    assert use_token_loss(nn.Linear(2, 2), "auto") is None
    with pytest.raises(ConfigError, match="chunked_loss: Linear is no causal language model"):
        use_token_loss(nn.Linear(2, 2), "on")
    model = built("llama")
    model.lm_head = nn.Sequential(model.lm_head)  # an adapter on the head
    choice = use_token_loss(model, "auto")
    assert choice is not None and "is a Sequential, not a Linear" in choice.why_not
    assert not choice.chunks(10**6)
    with pytest.raises(ConfigError, match="is a Sequential, not a Linear of the model; use auto"):
        use_token_loss(model, "on")


def test_token_mean_is_the_mean_of_transformers() -> None:
    pytest.importorskip("transformers")
    from transformers.loss.loss_utils import ForCausalLMLoss

    batch = labelled()
    logits = torch.randn(3, 70, 300)
    want = ForCausalLMLoss(logits, batch["labels"], 300)
    assert token_mean(logits, batch["labels"], 300).item() == pytest.approx(want.item(), rel=1e-6)
    want = ForCausalLMLoss(logits, batch["labels"], 300, num_items_in_batch=7)
    found = token_mean(logits, batch["labels"], vocab_size=300, num_items_in_batch=7)
    assert found.item() == pytest.approx(want.item(), rel=1e-6)
