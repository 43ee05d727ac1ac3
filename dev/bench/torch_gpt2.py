#!/usr/bin/env python3
"""GPT-2 in PyTorch on a CPU, for bench_steps.py: a plain model with what PyTorch has that is fast (scaled dot product
attention, fused AdamW), FP32, or BF16 by autocast over FP32 weights. Random weights and tokens; prints a line a step.

    python3 dev/bench/torch_gpt2.py [--precision fp32|bf16] [--batch 4] [--seq_len 256] [--steps 3]"""
import argparse
import contextlib
import sys
import time

try:
    import torch
    from torch import nn
    from torch.nn import functional as F
except ImportError:
    sys.exit("torch_gpt2.py: no torch here (pip install torch)")


class Block(nn.Module):
    def __init__(self, C, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.o = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for t in self.qkv(self.norm1(x)).split(C, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).reshape(B, T, C))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, o):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(o.vocab, o.hidden), nn.Embedding(o.context, o.hidden)
        self.blocks = nn.ModuleList(Block(o.hidden, o.heads) for _ in range(o.layers))
        self.norm, self.head = nn.LayerNorm(o.hidden), nn.Linear(o.hidden, o.vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    for key, value in dict(layers=12, hidden=768, heads=12, vocab=50257, context=1024, batch=4, seq_len=256, steps=3,
                           threads=0).items():
        p.add_argument(f"--{key}", type=int, default=value)
    o = p.parse_args()
    torch.manual_seed(1)
    if o.threads:
        torch.set_num_threads(o.threads)
    model = GPT2(o)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(o.steps):
        text = torch.randint(o.vocab, (o.batch, o.seq_len + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16) if o.precision == "bf16" else contextlib.nullcontext():
            loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        print(f"step {step} loss {value:.4f} (took {(time.perf_counter() - start) * 1e3:.3f} ms)", flush=True)


if __name__ == "__main__":
    main()
