#!/usr/bin/env python3
"""Checks the reference against itself: every gradient against finite differences of the loss, and the forward and the
optimizer against facts that do not depend on how they are written.

Each architecture, with and without a document mask, in a tiny model: all entries of all tensors, one central
difference each. Then each fixture's model at its full size: one random direction per tensor. Prints one line per check
and `N passed, N failed`; exits 1 on failure.
"""

import dataclasses
import math
import sys

import numpy as np

import gpt
from adamw import AdamW
from gpt import Array, Config, Params
from make_fixtures import FIXTURES, random_batches, random_parameters

STEP = 1e-5  # the truncation, STEP^2, and the rounding, 1e-16 / STEP, are both below TOLERANCE
TOLERANCE = 1e-7  # of the norm of a tensor's gradient

TINY = {"layers": 2, "hidden": 12, "ffn": 10, "vocab": 11, "seq_len": 9, "eot_token": 3}
SCALED = {"rope_theta": 20.0, "rope_factor": 4.0, "rope_low_freq_factor": 1.0, "rope_high_freq_factor": 3.0,
          "rope_original_context": 16}
MODELS = {
    "gpt2": Config("gpt2", heads=3, kv_heads=3, head_dim=4, tie=True, norm_eps=1e-5, **TINY),
    "gpt2 untied": Config("gpt2", heads=2, kv_heads=2, head_dim=6, tie=False, norm_eps=1e-5, **TINY),
    "llama": Config("llama", heads=4, kv_heads=2, head_dim=6, tie=False, norm_eps=1e-5, **SCALED, **TINY),
    "llama tied": Config("llama", heads=3, kv_heads=1, head_dim=4, tie=True, norm_eps=1e-5, rope_theta=1e4, **TINY),
    "qwen3": Config("qwen3", heads=4, kv_heads=2, head_dim=4, tie=True, norm_eps=1e-6, rope_theta=100.0, **TINY),
}

results: list[bool] = []


def check(name: str, error: float, tolerance: float) -> None:
    ok = bool(error <= tolerance)  # NaN fails
    results.append(ok)
    print(f"{'ok  ' if ok else 'FAIL'} {name}: {error:.2e} (limit {tolerance:.0e})")


def difference(config: Config, p: Params, name: str, direction: Array, tokens: Array, targets: Array) -> float:
    """The derivative of the loss along a direction in one tensor."""
    losses = []
    for sign in (1.0, -1.0):
        moved = p | {name: p[name] + sign * STEP * direction}
        losses.append(gpt.loss_only(config, moved, tokens, targets))
    return (losses[0] - losses[1]) / (2.0 * STEP)


def check_every_entry(label: str, config: Config, rng: np.random.RandomState) -> None:
    p = random_parameters(config, rng)
    tokens = rng.randint(0, config.vocab, (2, config.seq_len))
    targets = rng.randint(0, config.vocab, tokens.shape)
    tokens[0, [0, 3, 4, 7]] = config.eot_token  # first, then two in a row; the other sequence has none at first
    tokens[1, :4] = (tokens[1, :4] + (tokens[1, :4] == config.eot_token)) % config.vocab
    _, _, grads = gpt.loss_and_gradients(config, p, tokens, targets)
    for name, value in p.items():
        numeric = np.zeros_like(value)
        for index in np.ndindex(value.shape):
            direction = np.zeros_like(value)
            direction[index] = 1.0
            numeric[index] = difference(config, p, name, direction, tokens, targets)
        error = np.linalg.norm(numeric - grads[name]) / np.linalg.norm(numeric)
        check(f"{label}, {name}, {value.size} entries", float(error), TOLERANCE)


def check_directions(rng: np.random.RandomState) -> None:
    for fixture in FIXTURES:
        config = fixture.config
        p = random_parameters(config, rng)
        tokens, targets = random_batches(fixture, rng)
        _, _, grads = gpt.loss_and_gradients(config, p, tokens[0], targets[0])
        for name, value in p.items():
            direction = rng.choice([-1.0, 1.0], value.shape)  # no entry is left out
            numeric = difference(config, p, name, direction, tokens[0], targets[0])
            error = abs(numeric - float((grads[name] * direction).sum())) / np.linalg.norm(grads[name])
            check(f"fixture {fixture.name}, {name}, one direction", float(error), 10.0 * TOLERANCE)


def check_forward(rng: np.random.RandomState) -> None:
    for label, config in MODELS.items():
        p = random_parameters(config, rng)
        tokens = rng.randint(0, config.vocab, (1, config.seq_len))
        logits = gpt.forward(config, p, tokens)[0]

        later = tokens.copy()
        later[0, 6:] = (later[0, 6:] + 1) % config.vocab
        error = np.abs(gpt.forward(config, p, later)[0][:, :6] - logits[:, :6]).max()
        check(f"{label}: no token sees a later one", float(error), 1e-13)

        # Documents one by one give the logits of the documents in one masked sequence: RoPE sees only distances, and
        # for GPT-2 the position rows are moved along.
        tokens[tokens == config.eot_token] += 1
        tokens[0, 4] = config.eot_token
        masked = gpt.forward(dataclasses.replace(config, document_mask=True), p, tokens)[0]
        moved = p | {"wpe.weight": p["wpe.weight"][4:]} if "wpe.weight" in p else p
        parts = [gpt.forward(config, p, tokens[:, :4])[0], gpt.forward(config, moved, tokens[:, 4:])[0]]
        check(f"{label}: a document by itself", float(np.abs(np.concatenate(parts, 1) - masked).max()), 1e-12)
        check(f"{label}: the mask matters", 1.0 / float(np.abs(gpt.forward(config, p, tokens)[0] - masked).max()), 1e3)

        silent = p | {"lm_head.weight": np.zeros_like(p["lm_head.weight"])} if not config.tie else None
        if silent is not None:
            error = abs(gpt.loss_only(config, silent, tokens, tokens) - math.log(config.vocab))
            check(f"{label}: equal logits cost log V", error, 1e-14)

    gpt2 = next(f for f in FIXTURES if f.config.arch == "gpt2")
    p = random_parameters(gpt2.config, rng)
    tokens, targets = random_batches(gpt2, rng)
    C = gpt2.config.hidden
    bias = gpt.loss_and_gradients(gpt2.config, p, tokens[0], targets[0])[2]["h.0.attn.c_attn.bias"]
    check("gpt2: softmax does not see the bias of the keys", float(np.abs(bias[C : 2 * C]).max()), 1e-15)

    one = np.array([1.0])
    check("GELU(1), tanh form", abs(float(gpt.gelu(one)[0]) - 0.8411919906082768), 1e-15)
    check("SwiGLU(1, 2)", abs(float(gpt.swiglu(one, 2.0 * one)[0]) - 2.0 / (1.0 + math.exp(-1.0))), 1e-15)

    # RoPE as a product of complex numbers, dimension d being the real and d + D/2 the imaginary part.
    config = MODELS["llama tied"]
    x = rng.standard_normal((1, 9, 2, 4))
    angle = np.arange(9)[:, None] * np.array([1.0, 1e4**-0.5])
    z = (x[..., :2] + 1j * x[..., 2:]) * np.exp(1j * angle)[:, None]
    error = np.abs(gpt.rope(x, gpt.rope_tables(config, 9, np.float64)) - np.concatenate([z.real, z.imag], -1)).max()
    check("RoPE pairs d with d + D/2", float(error), 1e-14)

    # Llama 3.1's published values: wavelengths to 8192 / 4 stay, those from 8192 on are 8 times as long.
    config = Config("llama", 1, 128, 1, 1, 128, 1, 1, 1, True, 1e-5, 5e5, 8.0, 1.0, 4.0, 8192)
    plain = gpt.rope_frequencies(dataclasses.replace(config, rope_factor=0.0))
    ratio = plain / gpt.rope_frequencies(config)
    wavelength = 2.0 * math.pi / plain
    check("Llama-3 scaling, short wavelengths", float(np.abs(ratio[wavelength < 2048.0] - 1.0).max()), 1e-14)
    check("Llama-3 scaling, long wavelengths", float(np.abs(ratio[wavelength > 8192.0] - 8.0).max()), 1e-14)
    between = ratio[(wavelength > 2048.0) & (wavelength < 8192.0)]
    blended = between.size > 3 and between.min() > 1.0 and between.max() < 8.0
    check("Llama-3 scaling, in between", 0.0 if blended else 1.0, 0.0)


def check_adamw() -> None:
    """Two steps on two numbers, worked out with scalars; the 2-D one decays and the 1-D one does not."""
    lr, b1, b2, eps, wd, clip = 0.1, 0.9, 0.95, 0.01, 0.5, 1.0
    p = {"matrix": np.array([[2.0]]), "gain": np.array([2.0])}
    optimizer = AdamW(lr, b1, b2, eps, wd, clip)
    norms = [optimizer.update(p, {"matrix": np.array([[3.0]]), "gain": np.array([4.0])}),
             optimizer.update(p, {"matrix": np.array([[0.3]]), "gain": np.array([-0.4])})]
    check("gradient norms", abs(norms[0] - 5.0) + abs(norms[1] - 0.5), 1e-15)
    for name, first, second, decay in (("matrix", 0.6, 0.3, wd), ("gain", 0.8, -0.4, 0.0)):
        x = 2.0
        x -= lr * (first / (first + eps) + decay * x)  # both corrections cancel in the first step
        mean = (b1 * (1 - b1) * first + (1 - b1) * second) / (1 - b1**2)
        square = (b2 * (1 - b2) * first**2 + (1 - b2) * second**2) / (1 - b2**2)
        x -= lr * (mean / (math.sqrt(square) + eps) + decay * x)
        check(f"AdamW, {name}", abs(p[name].item() - x), 1e-15)


def main() -> int:
    rng = np.random.RandomState(0)
    for label, config in MODELS.items():
        check_every_entry(label, config, rng)
        check_every_entry(label + ", document mask", dataclasses.replace(config, document_mask=True), rng)
    check_directions(rng)
    check_forward(rng)
    check_adamw()
    print(f"{results.count(True)} passed, {results.count(False)} failed")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
