"""What the benchmarks of whole training steps share: token files, runs of the trainer, medians, the CSV."""
import argparse
import array
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parser(what):
    """The options that every benchmark of steps has."""
    p = argparse.ArgumentParser(description=what)
    p.add_argument("--program", default=str(ROOT / "train_gpt"), help="the trainer (default ./train_gpt)")
    p.add_argument("--threads", type=int, default=0, help="0: all cores")
    p.add_argument("--rounds", type=int, default=5, help="times that every side runs, one after the other")
    p.add_argument("--quick", action="store_true", help="a tiny model, to see that it works; its figures say nothing")
    p.add_argument("--csv", help="file to write (default: stdout)")
    return p


def arguments(p):
    o = p.parse_args()
    if o.rounds < 1 or o.threads < 0:
        sys.exit("--rounds: at least 1; --threads: at least 0")
    o.program = os.path.abspath(o.program)
    if not o.threads:
        o.threads = len(os.sched_getaffinity(0))
    return o


class Folder:
    """A temporary folder that goes with the program."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(prefix="bench"))

    def __enter__(self):
        return self.path

    def __exit__(self, *_):
        shutil.rmtree(self.path)


def write_tokens(path, count, vocab):
    """A token file of llm.c's format: 256 int32 (magic, version, count), then uint16; Zipf-like, as text is."""
    rng = random.Random(1)
    tokens = array.array("H", (min(vocab - 1, int(vocab ** rng.random()) - 1) for _ in range(count)))
    with open(path, "wb") as f:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(f)
        tokens.tofile(f)


def ours(o, folder, data, options):
    """Milliseconds of each step but the first, which touches the memory. options: {key: value} of `train`."""
    run = folder / "run"
    command = [o.program, "train", "--train_data", str(data), "--run_dir", str(run), "--overwrite", "--lr", "1e-4"]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    output_of(command, folder)
    times = [json.loads(line)["step_ms"] for line in open(run / "log.jsonl")]
    return times[1:]


def output_of(command, folder, **more):
    """What a program prints; ends the benchmark when it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, **more)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return done.stdout


def skipped(what, why):
    print(f"skipped {what}: {why}", file=sys.stderr)


def interleave(sides, rounds, seconds):
    """sides: {name: function(steps) -> ms of those steps}. Every round runs each side once, one after the other, so
    that what else the machine does meets all alike, with as many steps as fill what is left of `seconds`.
    Returns {name: [[ms of a round's steps], ...]}."""
    result = {name: [] for name in sides}
    for r in range(rounds):
        for name, side in sides.items():
            done = [t for times in result[name] for t in times]
            left = (seconds * 1e3 - sum(done)) / (rounds - r)
            times = side(max(1, math.ceil(left / statistics.median(done))) if done else 1)
            result[name].append(times)
            middle = statistics.median(times)
            print(f"round {r + 1}/{rounds} {name.replace(',', ' ')}: {middle:.1f} ms", file=sys.stderr)
    return result


def summary(rounds):
    """Median and best step of all rounds, number of steps."""
    times = [t for r in rounds for t in r]
    return statistics.median(times), min(times), len(times)


def ratio(rounds, reference):
    """How many times as long a step takes as the reference's: the median of the rounds' ratios."""
    return statistics.median(statistics.median(a) / statistics.median(b) for a, b in zip(rounds, reference))


def cell(x):
    """Four digits, and no fraction beyond them."""
    return str(x) if not isinstance(x, float) else f"{x:.4g}" if x < 1000 else f"{x:.0f}"


def write_csv(o, header, rows):
    text = "\n".join(",".join(map(cell, row)) for row in [header, *rows]) + "\n"
    if o.csv:
        Path(o.csv).write_text(text)
    else:
        sys.stdout.write(text)
