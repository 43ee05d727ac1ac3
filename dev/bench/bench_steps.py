#!/usr/bin/env python3
"""Whole training steps of GPT-2 124M on a CPU, 4 x 256 tokens: this trainer's in FP32, BF16 and NVFP4, llm.c's and
PyTorch's, interleaved.

    python3 dev/bench/bench_steps.py [--llmc CHECKOUT] [--batch 4] [--seq_len 256] [--csv FILE] [--quick]

--llmc names a checkout of karpathy/llm.c. Its train_gpt2.c is compiled from a copy with its own flags (-Ofast
-march=native -fopenmp); changed are batch, sequence length and number of steps, and validation and samples are left
out. Weights and tokens are random. PyTorch is dev/bench/torch_gpt2.py, with the Python that runs this.
Every side runs at least --seconds in all; the first step of a process is not counted. README.md says how to read the
CSV."""
import array
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import steps

LAYERS, HIDDEN, HEADS, VOCAB, CONTEXT = 12, 768, 12, 50257, 1024


def llmc_weights(path, s):
    """A checkpoint of llm.c, version 3: header, then FP32 tensors in its order."""
    rng = random.Random(2)
    L, C, V, T = s["layers"], s["hidden"], s["vocab"], s["context"]
    padded = (V + 127) // 128 * 128
    block = array.array("f", (rng.gauss(0, 0.02) for _ in range(1 << 16)))
    normal = lambda n: (block * (n // len(block) + 1))[:n]
    same = lambda n, x: array.array("f", [x]) * n
    tensors = [normal(padded * C), normal(T * C), same(L * C, 1), same(L * C, 0), normal(L * 3 * C * C),
               same(L * 3 * C, 0), normal(L * C * C), same(L * C, 0), same(L * C, 1), same(L * C, 0),
               normal(L * 4 * C * C), same(L * 4 * C, 0), normal(L * 4 * C * C), same(L * C, 0), same(C, 1),
               same(C, 0)]
    with open(path, "wb") as f:
        array.array("i", [20240326, 3, T, V, L, s["heads"], C, padded] + [0] * 248).tofile(f)
        for t in tensors:
            t.tofile(f)


def llmc_build(checkout, folder, o):
    """train_gpt2.c of the checkout, compiled into the folder as llmc; BENCH_STEPS in its environment: how many."""
    text = (checkout / "train_gpt2.c").read_text()
    changes = {"int B = 4;": f"int B = {o.batch};", "int T = 64;": f"int T = {o.seq_len};",
               "step <= 40;": 'step < atoi(getenv("BENCH_STEPS"));', "if (step % 10 == 0) {": "if (0) {",
               "if (step > 0 && step % 20 == 0) {": "if (0) {"}
    for old, new in changes.items():
        if text.count(old) != 1:
            sys.exit(f"{checkout}/train_gpt2.c: not the file that is known: {old!r} is there {text.count(old)} times")
        text = text.replace(old, new)
    (folder / "llmc.c").write_text(text)
    steps.output_of([os.environ.get("CC", "cc"), "-Ofast", "-march=native", "-fopenmp", "-DOMP", "-w", "-I",
                     str(checkout), "llmc.c", "-lm", "-lgomp", "-o", "llmc"], folder)


def times_printed(command, folder, count, environment=None):
    """Milliseconds of `count` steps, of a program that runs one more first and prints "took 1.2 ms" for each."""
    text = steps.output_of(command, folder, env=environment)
    times = [float(ms) for ms in re.findall(r"took ([0-9.]+) ms", text)][1:]
    if len(times) != count:
        sys.exit(f"{command[0]}: printed {len(times) + 1} steps, not {count + 1}")
    return times


def llmc_side(o, folder, s):
    data = folder / "dev/data/tinyshakespeare"
    data.mkdir(parents=True)
    for name in "train", "val":
        os.link(folder / "tokens.bin", data / f"tiny_shakespeare_{name}.bin")
    llmc_weights(folder / "gpt2_124M.bin", s)
    llmc_build(Path(o.llmc).resolve(), folder, o)
    return lambda count: times_printed(["./llmc"], folder, count,
                                       dict(os.environ, OMP_NUM_THREADS=str(o.threads), BENCH_STEPS=str(count + 1)))


def torch_side(o, folder, s, precision):
    def side(count):
        command = [sys.executable, str(Path(__file__).parent / "torch_gpt2.py"), "--precision", precision, "--batch",
                   str(o.batch), "--seq_len", str(o.seq_len), "--steps", str(count + 1), "--threads", str(o.threads)]
        for key in "layers", "hidden", "heads", "vocab", "context":
            command += [f"--{key}", str(s[key])]
        return times_printed(command, folder, count)
    return side


def torch_precisions():
    """What PyTorch can do here. Where oneDNN has no BF16 for the CPU, PyTorch falls back to a loop: minutes a step."""
    test = "import torch; print(torch.ops.mkldnn._is_mkldnn_bf16_supported())"
    done = subprocess.run([sys.executable, "-c", test], capture_output=True, text=True)
    if done.returncode:
        steps.skipped("torch", f"{sys.executable} cannot import it (pip install torch)")
        return []
    if done.stdout.strip() == "True":
        return ["fp32", "bf16"]
    steps.skipped("torch bf16", "its oneDNN has no BF16 on this CPU")
    return ["fp32"]


def our_side(o, folder, s, precision):
    def side(count):
        return steps.ours(o, folder, folder / "tokens.bin", {
            "arch": "gpt2", "layers": s["layers"], "hidden": s["hidden"], "heads": s["heads"], "vocab": s["vocab"],
            "seq_len": o.seq_len, "batch": o.batch, "threads": o.threads, "precision": precision, "steps": count + 1})
    return side


def main():
    p = steps.parser(__doc__.split("\n\n")[0])
    p.add_argument("--llmc", help="checkout of karpathy/llm.c (none: skipped)")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq_len", type=int, default=256)
    p.add_argument("--seconds", type=float, default=10, help="at least so long in steps of every side")
    p.add_argument("--sides", help="only these, with commas: ours bf16,torch bf16")
    o = steps.arguments(p)
    s = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "vocab": VOCAB,
         "context": max(CONTEXT, o.seq_len)}
    if o.quick:
        s.update(layers=2, hidden=32, heads=2, vocab=256, context=64)
        o.batch, o.seq_len, o.seconds = 2, 32, 0.05

    with steps.Folder() as folder:
        steps.write_tokens(folder / "tokens.bin", max(100_000, 20 * o.batch * o.seq_len), s["vocab"])
        sides = {f"ours,{p}": our_side(o, folder, s, p) for p in ("fp32", "bf16", "nvfp4")}
        if o.llmc:
            sides["llm.c,fp32"] = llmc_side(o, folder, s)
        else:
            steps.skipped("llm.c", "no --llmc CHECKOUT")
        for precision in torch_precisions():
            sides[f"torch,{precision}"] = torch_side(o, folder, s, precision)
        if o.sides:
            wanted = [name.strip().replace(" ", ",") for name in o.sides.split(",")]
            unknown = [name for name in wanted if name not in sides]
            if unknown:
                sys.exit(f"--sides {unknown[0]}: there are {', '.join(n.replace(',', ' ') for n in sides)}")
            sides = {name: sides[name] for name in wanted}
        rounds = steps.interleave(sides, o.rounds, o.seconds)

    rows = []
    for name, r in rounds.items():
        precision = name.split(",")[1]
        same = rounds.get(f"ours,{precision}")
        median, best, count = steps.summary(r)
        rows.append([name, o.batch, o.seq_len, o.threads, count, median, best, o.batch * o.seq_len / median * 1e3,
                     steps.ratio(r, same) if same else ""])
    steps.write_csv(o, ["side", "precision", "batch", "seq_len", "threads", "steps", "median_ms", "best_ms",
                        "tokens_per_s", "times_as_long_as_ours"], rows)


if __name__ == "__main__":
    main()
