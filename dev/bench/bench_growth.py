#!/usr/bin/env python3
"""How the time of a step grows on a CPU: with the sequence length at constant tokens, with the batch, with threads.

    python3 dev/bench/bench_growth.py [--precision bf16] [--layers 4] [--csv FILE] [--quick]

The model is GPT-2 124M's width and heads with fewer layers and a vocabulary of 8192, so that blocks weigh as much as in
the whole model. Along each axis all points run once a round, one after the other. README.md says how to read the
CSV."""
import steps


def points(o):
    """(axis, value of the axis, batch, seq_len, threads)"""
    lengths = [2 ** i for i in range(8, 13) if 2 ** i <= o.tokens]
    batches, threads = [1, 2, 4, 8, 16], sorted({1, max(1, o.threads // 2), o.threads})
    length = 256
    if o.quick:
        lengths, batches, length = [16, 32, 64], [1, 2], 32
    for T in lengths:
        yield "seq_len", T, o.tokens // T, T, o.threads
    for B in batches:
        yield "batch", B, B, length, o.threads
    for n in threads:
        yield "threads", n, 4, length, n


def main():
    p = steps.parser(__doc__.split("\n\n")[0])
    p.add_argument("--precision", choices=["fp32", "bf16", "nvfp4"], default="bf16")
    p.add_argument("--layers", type=int, default=4)
    p.add_argument("--tokens", type=int, default=4096, help="of a step, along the axis of sequence lengths")
    p.add_argument("--seconds", type=float, default=10, help="at least so long in steps of every point")
    o = steps.arguments(p)
    shape = {"arch": "gpt2", "layers": o.layers, "hidden": 768, "heads": 12, "vocab": 8192, "precision": o.precision}
    if o.quick:
        o.tokens, o.seconds = 64, 0.02
        shape.update(layers=1, hidden=32, heads=2, vocab=256)

    with steps.Folder() as folder:
        data = folder / "tokens.bin"
        steps.write_tokens(data, max(100_000, 40 * o.tokens), shape["vocab"])

        def side(batch, seq_len, threads):
            return lambda count: steps.ours(o, folder, data, {**shape, "batch": batch, "seq_len": seq_len,
                                                              "threads": threads, "steps": count + 1})
        rows = []
        for axis in "seq_len", "batch", "threads":
            along = {f"{axis} {value}": rest for a, value, *rest in points(o) if a == axis}
            rounds = steps.interleave({name: side(*rest) for name, rest in along.items()}, o.rounds, o.seconds)
            first = next(iter(rounds.values()))
            for name, r in rounds.items():
                batch, seq_len, threads = along[name]
                median, best, count = steps.summary(r)
                rows.append([axis, name.split()[1], o.precision, batch, seq_len, threads, count, median, best,
                             batch * seq_len / median * 1e3, steps.ratio(r, first)])
    steps.write_csv(o, ["axis", "value", "precision", "batch", "seq_len", "threads", "steps", "median_ms", "best_ms",
                        "tokens_per_s", "times_as_long_as_first"], rows)


if __name__ == "__main__":
    main()
