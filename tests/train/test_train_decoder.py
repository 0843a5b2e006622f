"""The decoder: what it computes, and that it can be filled module by module after meta init."""

import math

import pytest
import torch
import torch.nn.functional as F

from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder, Rotary

SMALL = DecoderConfig(dim=32, layers=2, heads=4)


def build(config=SMALL, seed=0):
    torch.manual_seed(seed)
    return Decoder(config, max_seq_len=16)


def tokens(batch=2, length=13):
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(1))


def test_loss_is_the_mean_cross_entropy_of_the_next_token():
    model, x = build(), tokens()
    expected = F.cross_entropy(model.logits(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert torch.equal(model(x), expected)
    assert abs(model(x).item() - math.log(256)) < 0.1  # knows nothing yet


@pytest.mark.parametrize("kv_heads", [0, 1, 2])
def test_no_token_sees_a_later_one(kv_heads):
    model = build(DecoderConfig(dim=32, layers=2, heads=4, kv_heads=kv_heads))
    x = tokens()
    changed = x.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 256
    before, after = model.logits(x), model.logits(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_grouped_query_attention_repeats_key_and_value_heads():
    grouped = build(DecoderConfig(dim=32, layers=1, heads=4, kv_heads=2))
    whole = build(DecoderConfig(dim=32, layers=1, heads=4))
    state = grouped.state_dict()
    for name in ("blocks.0.attention.key.weight", "blocks.0.attention.value.weight"):
        heads = state[name].unflatten(0, (2, 8))
        state[name] = heads.repeat_interleave(2, dim=0).flatten(0, 1)
    whole.load_state_dict(state)
    torch.testing.assert_close(grouped(tokens()), whole(tokens()))


def test_rotary_depends_on_distance_only():
    rotary = Rotary(head_dim=8, max_seq_len=16, theta=10000.0)
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 8, generator=generator)
    q = rotary(query.expand(1, 1, 16, 8))[0, 0]
    k = rotary(key.expand(1, 1, 16, 8))[0, 0]
    scores = q @ k.T
    for distance in range(8):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))


def test_tied_embeddings_share_one_parameter():
    model = build(DecoderConfig(dim=32, layers=1, heads=4, tie_embeddings=True))
    assert model.output.weight is model.embedding.weight
    assert len([n for n, _ in model.named_parameters() if n.endswith("embedding.weight")]) == 1


def test_every_module_fills_its_own_tensors_after_meta_init():
    with torch.device("meta"):
        model = Decoder(SMALL, max_seq_len=16)
    assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))
    for module in model.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        assert not own or hasattr(module, "reset_parameters"), type(module).__name__
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    reference = build()
    for name, buffer in reference.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer)
    for name, parameter in reference.named_parameters():
        filled = model.get_parameter(name)
        torch.testing.assert_close(filled.std(), parameter.std(), rtol=0.2, atol=1e-3)
    assert torch.isfinite(model(tokens()))


def test_state_dict_holds_weights_only():
    assert not [name for name in build().state_dict() if "rotary" in name]
