#!/usr/bin/env python3
"""Writes test/fixtures/*.safetensors: what the trainer must compute, from the reference beside this file.

Each file holds one small model and ten steps of training:

    <name>            the parameters, Hugging Face names and layouts; no lm_head.weight when the head is tied
    tokens, targets   I32 [steps * micro_batches, B, T]; step s takes rows s * micro_batches and following
    logits            [B, T, V], loss [], grad_norm [] and grad.<name>: of tokens[0] alone, with those parameters
    adamw_losses      [steps]: loss of each global batch, before its update
    adamw_grad_norms  [steps]: norm of each global gradient, before clipping
    final.<name>      the parameters after the ten steps

Reals are F32, rounded once from float64. The parameters are float32 values to begin with, so a float32 program
starts from exactly the same model. __metadata__ holds the configuration and `loss` with 17 digits.
"""

import argparse
import dataclasses
from pathlib import Path

import numpy as np

import gpt
import safetensors
from adamw import AdamW, global_norm
from gpt import Array, Config, Params

STEPS = 10


@dataclasses.dataclass(frozen=True)
class Fixture:
    name: str
    seed: int
    config: Config
    batch: int
    micro_batches: int
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip: float


# Two layers of width 32. Query heads share key/value heads as 4 to 2 where they can, because 2 to 1 would not tell
# h // G from h % K. T passes 64 twice, a common block of keys in attention. grad_clip lies between the smallest and
# the largest norm of the run. eps is large enough to be seen, and keeps the bias of the keys, whose exact gradient is
# zero, from turning rounding errors into updates.
FIXTURES = [
    Fixture(
        "gpt2", 1,
        Config("gpt2", layers=2, hidden=32, heads=4, kv_heads=4, head_dim=8, ffn=48, vocab=61, seq_len=37, tie=True,
               norm_eps=1e-5, eot_token=60),
        batch=3, micro_batches=2, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.1, grad_clip=0.6),
    Fixture(
        "llama", 2,
        Config("llama", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=61, seq_len=40, tie=False,
               norm_eps=1e-5, rope_theta=100.0, rope_factor=8.0, rope_low_freq_factor=1.0,
               rope_high_freq_factor=4.0, rope_original_context=32, eot_token=60),
        batch=2, micro_batches=2, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, grad_clip=1.5),
    Fixture(
        "llama_tied", 3,
        Config("llama", layers=2, hidden=32, heads=4, kv_heads=1, head_dim=8, ffn=48, vocab=61, seq_len=72, tie=True,
               norm_eps=1e-5, rope_theta=10000.0, eot_token=60),
        batch=2, micro_batches=1, lr=0.005, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.2, grad_clip=1.7),
    Fixture(
        "qwen3", 4,
        Config("qwen3", layers=2, hidden=32, heads=4, kv_heads=2, head_dim=12, ffn=48, vocab=61, seq_len=37, tie=True,
               norm_eps=1e-6, rope_theta=1000.0, eot_token=60),
        batch=3, micro_batches=1, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, grad_clip=1.4),
    Fixture(
        "gpt2_docmask", 5,
        Config("gpt2", layers=2, hidden=32, heads=2, kv_heads=2, head_dim=16, ffn=48, vocab=61, seq_len=72, tie=True,
               norm_eps=1e-5, document_mask=True, eot_token=60),
        batch=2, micro_batches=1, lr=0.01, beta1=0.9, beta2=0.95, eps=1e-5, weight_decay=0.1, grad_clip=0.7),
]


def random_parameters(config: Config, rng: np.random.RandomState) -> Params:
    """Far from an initialisation: gains not 1, biases not 0, weights so large that no term of a gradient is small, and
    embeddings that are smaller, so that the eps of the norms is seen. float64 arrays of float32 values."""
    p: Params = {}
    for name, shape in gpt.parameter_shapes(config).items():
        z = rng.standard_normal(shape)
        if len(shape) == 2:
            z *= 0.1 if name.endswith(("wte.weight", "wpe.weight", "embed_tokens.weight")) else 0.2
        else:
            z *= 0.1
            if name.endswith(".weight"):
                z += 1.0
        p[name] = z.astype(np.float32).astype(np.float64)
    return p


def random_batches(fixture: Fixture, rng: np.random.RandomState) -> tuple[Array, Array]:
    """Tokens and the tokens after them, half of which follow a rule, so that there is something to learn. End-of-text
    tokens at random in every fixture; they mean something only under a document mask."""
    config = fixture.config
    n, T, eot = STEPS * fixture.micro_batches, config.seq_len, config.eot_token
    stream = rng.randint(0, eot, (n, fixture.batch, T + 1))
    follows = rng.random_sample(stream.shape) < 0.5
    for t in range(1, T + 1):
        stream[:, :, t] = np.where(follows[:, :, t], (7 * stream[:, :, t - 1] + 3) % eot, stream[:, :, t])
    stream[rng.random_sample(stream.shape) < 0.04] = eot
    if config.document_mask:  # the first batch has every case
        stream[0, 0, [0, 5, 6, 31, T - 1, T]] = eot  # first, one-token documents, last, last target
        stream[0, 1, : T // 2] %= eot  # starts inside a document that has no end-of-text in sight
        stream[0, 1, T - 9 : T - 7] = [eot, 17]  # a document across position 64
    return stream[:, :, :-1].astype(np.int32), stream[:, :, 1:].astype(np.int32)


def global_batch(config: Config, p: Params, tokens: Array, targets: Array) -> tuple[float, Params]:
    """Loss and gradients of the mean over all micro-batches [micro_batches, B, T]."""
    losses: list[float] = []
    total: Params = {name: np.zeros_like(value) for name, value in p.items()}
    for x, y in zip(tokens, targets):
        loss, _, grads = gpt.loss_and_gradients(config, p, x, y)
        losses.append(loss)
        for name in total:
            total[name] += grads[name] / len(tokens)
    return sum(losses) / len(losses), total


def train(fixture: Fixture, p: Params, tokens: Array, targets: Array) -> tuple[Array, Array, Params]:
    """Ten steps from p, which stays as it is: losses, gradient norms, final parameters."""
    p = {name: value.copy() for name, value in p.items()}
    optimizer = AdamW(fixture.lr, fixture.beta1, fixture.beta2, fixture.eps, fixture.weight_decay, fixture.grad_clip)
    losses, norms = np.zeros(STEPS), np.zeros(STEPS)
    for step in range(STEPS):
        rows = slice(step * fixture.micro_batches, (step + 1) * fixture.micro_batches)
        losses[step], grads = global_batch(fixture.config, p, tokens[rows], targets[rows])
        norms[step] = optimizer.update(p, grads)
    return losses, norms, p


def require_coverage(fixture: Fixture, tokens: Array, norms: Array) -> None:
    """A fixture that misses the case it was made for would pass for the wrong reason."""
    config, clip = fixture.config, fixture.grad_clip
    assert norms.min() < 0.97 * clip and norms.max() > 1.03 * clip, f"{fixture.name}: clipping on and off"
    assert np.abs(norms / clip - 1.0).min() > 1e-3, f"{fixture.name}: a norm too close to the clipping threshold"
    if config.rope_factor != 0.0:
        turns = config.rope_original_context * gpt.rope_frequencies(dataclasses.replace(config, rope_factor=0.0))
        turns /= 2.0 * np.pi
        low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
        assert turns.max() > high and turns.min() < low, f"{fixture.name}: frequencies kept and divided"
        assert ((turns > low) & (turns < high)).any(), f"{fixture.name}: a frequency in between"
        assert config.seq_len > config.rope_original_context, fixture.name
    if config.document_mask:
        documents = (tokens[:, :, 1:] == config.eot_token).sum(axis=2)
        assert documents.max() >= 3, f"{fixture.name}: several documents in a sequence"


def metadata(fixture: Fixture, loss: float) -> dict[str, str]:
    values = dataclasses.asdict(fixture.config)
    run = dataclasses.asdict(fixture)
    values |= {key: run[key] for key in run if key not in ("name", "seed", "config")}
    text = {key: str(int(value)) if isinstance(value, bool) else str(value) for key, value in values.items()}
    return text | {"format": "pt", "steps": str(STEPS), "loss": f"{loss:.17g}"}


def make(fixture: Fixture) -> tuple[dict[str, Array], dict[str, str]]:
    config = fixture.config
    rng = np.random.RandomState(fixture.seed)  # the generator that NumPy has frozen (NEP 19)
    p = random_parameters(config, rng)
    tokens, targets = random_batches(fixture, rng)
    loss, logits, grads = gpt.loss_and_gradients(config, p, tokens[0], targets[0])
    losses, norms, final = train(fixture, p, tokens, targets)
    require_coverage(fixture, tokens, norms)
    reals: dict[str, Array] = {
        "logits": logits, "loss": np.array(loss), "grad_norm": np.array(global_norm(grads)),
        "adamw_losses": losses, "adamw_grad_norms": norms,
    }
    for name in p:
        reals |= {name: p[name], "grad." + name: grads[name], "final." + name: final[name]}
    tensors = {name: value.astype(np.float32) for name, value in reals.items()}
    return tensors | {"tokens": tokens, "targets": targets}, metadata(fixture, loss)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the fixtures of the trainer's tests.")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parents[2] / "test" / "fixtures")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for fixture in FIXTURES:
        tensors, meta = make(fixture)
        path = out / f"{fixture.name}.safetensors"
        safetensors.write(path, tensors, meta)
        norms, losses = tensors["adamw_grad_norms"], tensors["adamw_losses"]
        print(f"{path.name}: {path.stat().st_size} bytes, loss {meta['loss']}, ten steps {losses[0]:.4f} to "
              f"{losses[-1]:.4f}, gradient norms {norms.min():.3f} to {norms.max():.3f}")


if __name__ == "__main__":
    main()
