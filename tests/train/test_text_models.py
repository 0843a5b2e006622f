"""Packed documents give the loss and the gradients of single ones, on all types of models that are
tested; a model that does not keep them apart is refused."""

import numpy as np
import pytest
import torch
import transformers
from hf_kit import CONFIGS
from text_kit import chats, load, write_lines
from torch.nn import functional as F

from shardwise.checkpoint.ranks import Ranks
from shardwise.errors import ConfigError
from shardwise.train.calling import arguments_of
from shardwise.train.data import open_data
from shardwise.train.loss.weights import weigh_in_tree
from shardwise.train.text.check import check_packing

# float32 has 24 bits; a loss is a mean over some hundred tokens, a gradient a sum over them in
# another order. Measured: at most 8e-8 and 4e-7. Documents that see each other: 0.01 and more.
LOSS, GRADIENT = 1e-6, 5e-6
EXPERTS = ("mixtral", "qwen2_moe", "qwen3_moe")


def make_model(kind):
    """Windows are shorter than documents, experts have their own losses, and weights are so large
    that documents which see each other are far off."""
    name, values = CONFIGS[kind]
    changes = {
        "vocab_size": 300,
        "n_positions" if kind == "gpt2" else "max_position_embeddings": 128,
    }
    if "sliding_window" in values:
        changes["sliding_window"] = 8
    if kind in EXPERTS:
        changes |= {"output_router_logits": True, "router_aux_loss_coef": 0.1}
    torch.manual_seed(0)
    config = getattr(transformers, name)(**(values | changes))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.fixture
def jobs(tmp_path, monkeypatch):
    """The same chats packed and unpacked: (configuration, data) each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_lines(tmp_path / "chats.jsonl", chats(24))
    found = {}
    for packing in (True, False):
        loaded = load(tmp_path, path, data__seq_len=128, data__packing=packing)
        found[packing] = loaded.config, open_data(loaded.config, None)
    return found


def sum_of_losses(model, batch):
    """As training calls the model; without what mixtures of experts add to their loss."""
    args, kwargs = arguments_of(model, {k: v for k, v in batch.items() if k != "labels"})
    logits = model(*args, **kwargs).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    return F.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
    )


def loss_and_gradients(model, samples, micro_batch):
    """Of one step over all samples: the mean over all trained tokens."""
    model.zero_grad()
    every = np.arange(len(samples))
    total, loss = samples.trained_tokens(every), 0.0
    for start in range(0, len(every), micro_batch):
        part = sum_of_losses(model, samples.batch(every[start : start + micro_batch])) / total
        part.backward()
        loss += float(part.detach())
    return loss, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def apart(one, other):
    """The largest difference of gradients, relative to the largest of all: parameters that have no
    true gradient (a bias of keys) have rounding only."""
    scale = max(float(g.abs().max()) for g in one.values())
    return max(float((one[n] - other[n]).abs().max()) for n in one) / scale


@pytest.mark.parametrize("micro_batch", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("kind", CONFIGS)
def test_packed_is_unpacked(jobs, kind, micro_batch):
    (_, packed), (_, single) = jobs[True], jobs[False]
    assert len(packed.train) < len(single.train)
    model = make_model(kind).eval()
    loss, gradients = loss_and_gradients(model, packed.train, micro_batch)
    expected, of_single = loss_and_gradients(model, single.train, 1)
    assert loss == pytest.approx(expected, rel=LOSS)
    assert gradients.keys() == of_single.keys()
    assert apart(of_single, gradients) < GRADIENT


def test_the_comparison_sees_documents_that_see_each_other(jobs):
    (_, packed), (_, single) = jobs[True], jobs[False]
    model = make_model("llama").eval()
    expected, of_single = loss_and_gradients(model, single.train, 1)
    leaking = packed.train.batch
    packed.train.batch = lambda indices: leaking(indices) | {"position_ids": None}
    loss, gradients = loss_and_gradients(model, packed.train, 1)
    assert abs(loss / expected - 1) > 1e-3
    assert apart(of_single, gradients) > 1e-2


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_check_at_the_start_lets_them_pass(jobs, kind):
    config, data = jobs[True]
    (note,) = check_packing(config, data, make_model(kind), Ranks(), torch.device("cpu"))
    assert ("router_aux_loss" in note) == (kind in EXPERTS)


def refusal(jobs, model):
    config, data = jobs[True]
    with pytest.raises(ConfigError, match=r"^data\.packing: ") as found:
        check_packing(config, data, model, Ranks(), torch.device("cpu"))
    assert model.training
    return str(found.value)


def test_a_model_that_ignores_positions_is_refused(jobs):
    class Deaf(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model("llama")

        def forward(self, input_ids, position_ids, labels=None):
            return self.model(input_ids=input_ids, use_cache=False)

    text = refusal(jobs, Deaf())
    assert "Deaf does not keep the documents of a row apart" in text
    assert "set data.packing = false" in text


def test_a_model_with_a_cache_is_refused(jobs):
    """What happens without use_cache=False, which `calling` gives where forward takes it."""

    class Cached(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model("llama")

        def forward(self, input_ids, position_ids):
            return self.model(input_ids=input_ids, position_ids=position_ids)

    assert "does not keep the documents" in refusal(jobs, Cached())


def test_a_model_for_one_row_at_a_time_is_told_so(jobs):
    """As the kernels of flash attention are."""

    class OneRow(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = make_model("llama")

        def forward(self, input_ids, position_ids):
            positions = position_ids if len(input_ids) == 1 else None
            return self.model(input_ids=input_ids, position_ids=positions, use_cache=False)

    assert "set train.micro_batch = 1" in refusal(jobs, OneRow())


def test_a_model_without_logits_is_refused(jobs):
    class Loss(torch.nn.Module):
        def forward(self, input_ids, position_ids, labels=None):
            return input_ids.sum()

    assert "returns no .logits" in refusal(jobs, Loss())


def test_nothing_is_asked_of_a_job_that_does_not_pack(jobs):
    config, data = jobs[False]
    assert check_packing(config, data, torch.nn.Linear(1, 1), Ranks(), torch.device("cpu")) == []


def test_weights_of_a_step_are_known_without_reading(jobs):
    """`verify` counts what is read: each sample once a step."""
    _, data = jobs[True]
    every = [np.arange(0, 2), np.arange(2, 4)]
    batches = [data.train.batch(indices) for indices in every]
    data.train.batch = None  # a call would fail
    weigh = weigh_in_tree(make_model("llama"), data.train, every, Ranks(), seed=0, step=1)
    trained = [int((batch["labels"] >= 0).sum()) for batch in batches]
    expected = [2 * count / sum(trained) for count in trained]
    assert [weigh(batch) for batch in batches] == pytest.approx(expected)
