"""The built-in decoder: pre-norm transformer with RMSNorm, rotary positions, SwiGLU, grouped-query
attention.

Contract: `build_decoder(config)` makes it on whatever device is current (the trainer uses meta);
every module that holds tensors, the rotary tables included, fills them in its own
`reset_parameters`, so that the engine can materialise it unit by unit. `forward(tokens)` takes
int64 [B, T + 1] and returns the mean cross-entropy in nats per token: token t + 1 is predicted from
tokens 0 .. t.

Sources: Llama 2 (https://arxiv.org/abs/2307.09288) for the shape, RoFormer (2104.09864) for rotary
positions, GLU variants (2002.05202) for SwiGLU, GQA (2305.13245), GPT-2 for the scaled residual
init.

Shape suffixes: B batch, T time, D model dim, H query heads, G key/value heads, K head dim, F hidden
dim, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.train.config import DecoderConfig

_INIT_STD = 0.02


class Linear(nn.Linear):
    """Linear without bias that knows its own init scale."""

    def __init__(self, in_features: int, out_features: int, init_std: float = _INIT_STD) -> None:
        self.init_std = init_std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.init_std)


class Embedding(nn.Embedding):
    """Embedding with the same init scale as the linear layers, so that it can be tied to the
    output."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=_INIT_STD)


class Rotary(nn.Module):
    """Rotates pairs (k, k + K/2) of each head by an angle that grows with the position."""

    cos_TK: Tensor
    sin_TK: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim, self.max_seq_len, self.theta = head_dim, max_seq_len, theta
        # Not persistent: it follows from the sizes, and a longer context must be able to load old
        # weights.
        table = torch.empty(max_seq_len, head_dim // 2)
        self.register_buffer("cos_TK", table, persistent=False)
        self.register_buffer("sin_TK", table.clone(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        device = self.cos_TK.device
        exponent_K = torch.arange(0, self.head_dim, 2, device=device).float() / self.head_dim
        position_T = torch.arange(self.max_seq_len, device=device).float()
        angle_TK = torch.outer(position_T, self.theta**-exponent_K)
        with torch.no_grad():
            self.cos_TK.copy_(angle_TK.cos())
            self.sin_TK.copy_(angle_TK.sin())

    def forward(self, x_BHTK: Tensor) -> Tensor:
        num_positions = x_BHTK.size(-2)
        cos_TK = self.cos_TK[:num_positions].to(x_BHTK.dtype)
        sin_TK = self.sin_TK[:num_positions].to(x_BHTK.dtype)
        a, b = x_BHTK.chunk(2, dim=-1)
        return torch.cat((a * cos_TK - b * sin_TK, b * cos_TK + a * sin_TK), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, out_std: float) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.heads, config.num_kv_heads
        self.head_dim = config.dim // config.heads
        kv_dim = self.num_kv_heads * self.head_dim
        self.query = Linear(config.dim, config.dim)
        self.key = Linear(config.dim, kv_dim)
        self.value = Linear(config.dim, kv_dim)
        self.out = Linear(config.dim, config.dim, init_std=out_std)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        q_BHTK = self._heads(self.query(x_BTD), self.num_heads)
        k_BGTK = self._heads(self.key(x_BTD), self.num_kv_heads)
        v_BGTK = self._heads(self.value(x_BTD), self.num_kv_heads)
        y_BHTK = F.scaled_dot_product_attention(
            rotary(q_BHTK),
            rotary(k_BGTK),
            v_BGTK,
            is_causal=True,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.out(y_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTD: Tensor, num_heads: int) -> Tensor:
        return x_BTD.unflatten(2, (num_heads, self.head_dim)).transpose(1, 2)


class FeedForward(nn.Module):
    def __init__(self, config: DecoderConfig, out_std: float) -> None:
        super().__init__()
        self.gate = Linear(config.dim, config.num_hidden)
        self.up = Linear(config.dim, config.num_hidden)
        self.down = Linear(config.num_hidden, config.dim, init_std=out_std)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        return self.down(h_BTF)


class Block(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        # Two branches per block add to the residual stream; GPT-2 keeps its variance independent of
        # depth.
        out_std = _INIT_STD / math.sqrt(2 * config.layers)
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.attention = Attention(config, out_std)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.feed_forward = FeedForward(config, out_std)

    def forward(self, x_BTD: Tensor, rotary: Rotary) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotary)
        return x_BTD + self.feed_forward(self.feed_forward_norm(x_BTD))


class Decoder(nn.Module):
    """Decoder-only language model whose forward returns its own loss."""

    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        super().__init__()
        self.embedding = Embedding(config.vocab_size, config.dim)
        self.rotary = Rotary(config.dim // config.heads, max_seq_len, config.rope_theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-6)
        self.output = Linear(config.dim, config.vocab_size)
        if config.tie_embeddings:
            self.output.weight = self.embedding.weight

    def logits(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, self.rotary)
        return self.output(self.norm(x_BTD))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = self.logits(tokens_BT[:, :-1])
        # fp32: in bf16 the log-sum-exp alone costs about 1% of the loss.
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), tokens_BT[:, 1:].flatten())
