# SPDX-License-Identifier: Apache-2.0
"""Three real models in plain torch, with the parameter names, shapes and order of tests/data/*.tsv.

GPT-2 as Hugging Face lays it out (its Conv1D keeps weights as [in, out]; the head is the token embedding),
nanoGPT's GPT (the same without biases), and Qwen2 (RMSNorm, rotary positions, grouped-query attention, SwiGLU).
Everything is written out because the point is to train without any other package. No dropout: two runs must
see the same numbers. forward(tokens, targets) returns the mean cross-entropy.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F


def attend(q, k, v):
    """Causal attention over [batch, heads, time, size]."""
    t = q.size(-2)
    scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


def split_heads(x, heads):
    b, t, width = x.shape
    return x.view(b, t, heads, width // heads).transpose(1, 2)


def merge_heads(x):
    b, heads, t, size = x.shape
    return x.transpose(1, 2).reshape(b, t, heads * size)


def gelu_tanh(x):
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x.pow(3.0))))


def next_token_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# --- GPT-2 and nanoGPT: one transformer, with biases or without ------------------------------------


class Conv1D(nn.Module):
    """A Linear whose weight is [in, out], which is how GPT-2 was published."""

    def __init__(self, inp, out, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inp, out))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None

    def forward(self, x):
        x = x @ self.weight
        return x if self.bias is None else x + self.bias


class LayerNorm(nn.Module):
    """torch's own cannot be without a bias in 1.13."""

    def __init__(self, width, bias):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class SelfAttention(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.c_attn = Conv1D(width, 3 * width, bias)
        self.c_proj = Conv1D(width, width, bias)

    def forward(self, x):
        q, k, v = (split_heads(y, self.heads) for y in self.c_attn(x).chunk(3, -1))
        return self.c_proj(merge_heads(attend(q, k, v)))


class FeedForward(nn.Module):
    def __init__(self, width, bias, act):
        super().__init__()
        self.c_fc = Conv1D(width, 4 * width, bias)
        self.c_proj = Conv1D(4 * width, width, bias)
        self.act = act

    def forward(self, x):
        return self.c_proj(self.act(self.c_fc(x)))


class Block(nn.Module):
    def __init__(self, width, heads, bias, act):
        super().__init__()
        self.ln_1 = LayerNorm(width, bias)
        self.attn = SelfAttention(width, heads, bias)
        self.ln_2 = LayerNorm(width, bias)
        self.mlp = FeedForward(width, bias, act)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, vocab, positions, bias, act):
        super().__init__()
        self.vocab = vocab
        self.transformer = nn.ModuleDict(
            dict(
                wte=nn.Embedding(vocab, width),
                wpe=nn.Embedding(positions, width),
                h=nn.ModuleList([Block(width, heads, bias, act) for _ in range(layers)]),
                ln_f=LayerNorm(width, bias),
            )
        )
        init(self, residual="c_proj.weight", layers=layers)

    def forward(self, tokens, targets):
        t = self.transformer
        x = t.wte(tokens) + t.wpe(torch.arange(tokens.size(1)))
        for block in t.h:
            x = block(x)
        return next_token_loss(F.linear(t.ln_f(x), t.wte.weight), targets)


# --- Qwen2 --------------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class QwenAttention(nn.Module):
    def __init__(self, width, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads = heads, kv_heads
        kv = width // heads * kv_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv)
        self.v_proj = nn.Linear(width, kv)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x, cos, sin):
        q = rotate(split_heads(self.q_proj(x), self.heads), cos, sin)
        k = rotate(split_heads(self.k_proj(x), self.kv_heads), cos, sin)
        v = split_heads(self.v_proj(x), self.kv_heads)
        share = self.heads // self.kv_heads
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        return self.o_proj(merge_heads(attend(q, k, v)))


class QwenMLP(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class QwenLayer(nn.Module):
    def __init__(self, width, heads, kv_heads, inner):
        super().__init__()
        self.self_attn = QwenAttention(width, heads, kv_heads)
        self.mlp = QwenMLP(width, inner)
        self.input_layernorm = RMSNorm(width)
        self.post_attention_layernorm = RMSNorm(width)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    def __init__(self, layers, width, heads, kv_heads, inner, vocab, theta=1e6):
        super().__init__()
        self.vocab, self.size, self.theta = vocab, width // heads, theta
        self.model = nn.ModuleDict(
            dict(
                embed_tokens=nn.Embedding(vocab, width),
                layers=nn.ModuleList([QwenLayer(width, heads, kv_heads, inner) for _ in range(layers)]),
                norm=RMSNorm(width),
            )
        )
        init(self)

    def forward(self, tokens, targets):
        m = self.model
        rate = self.theta ** (-torch.arange(0, self.size, 2).float() / self.size)
        angle = torch.outer(torch.arange(tokens.size(1)).float(), rate).repeat(1, 2)
        cos, sin = angle.cos(), angle.sin()
        x = m.embed_tokens(tokens)
        for layer in m.layers:
            x = layer(x, cos, sin)
        return next_token_loss(F.linear(m.norm(x), m.embed_tokens.weight), targets)


def init(model, residual=None, layers=1):
    """GPT-2's: normal(0, 0.02), the matrices that end a residual branch smaller, biases zero, norms one."""
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            shrink = math.sqrt(2 * layers) if residual and name.endswith(residual) else 1.0
            nn.init.normal_(p, 0.0, 0.02 / shrink)
        elif name.endswith("bias"):
            nn.init.zeros_(p)


# --- what can be trained, and how people train it ------------------------------------------------------------

# `clip` and `adamw` are the usual fine-tuning or training settings of each model; `decay_matrices_only`
# makes the two groups nanoGPT makes.
MODELS = {
    "nanogpt-char": dict(
        make=lambda: GPT(6, 384, 6, 65, 256, bias=False, act=F.gelu),
        adamw=dict(lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1),
        decay_matrices_only=True,
        clip=1.0,
    ),
    "gpt2": dict(
        make=lambda: GPT(12, 768, 12, 50257, 1024, bias=True, act=gelu_tanh),
        adamw=dict(lr=5e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
        decay_matrices_only=False,
        clip=1.0,
    ),
    "qwen2.5-0.5b": dict(
        make=lambda: Qwen2(24, 896, 14, 2, 4864, 151936),
        adamw=dict(lr=2e-5, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2),
        decay_matrices_only=False,
        clip=None,
    ),
}
