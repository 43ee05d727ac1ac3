"""NVFP4 quantization in plain Python, one FP32 rounding at a time: what `train_gpt quantize` is compared with.

Written from the formulas at the head of llmc/nvfp4.h and the works cited there, on floating-point values and tables
where the C works on bits. Slow; needs nothing but Python.

    nvfp4.py --make KIND --rows R --cols C --seed S --output X.f32       an input of one of the KINDS below
    nvfp4.py --input X.f32 --rows R --cols C [options of the verb] --compare PREFIX

--compare reads what the verb wrote under PREFIX and ends with exit code 1 and a line for each thing that differs: codes,
packed codes, block scales, the bits of the three tensor scales; statistics beyond 1e-9.
"""

import argparse
import json
import math
import random
import struct
import sys
from pathlib import Path

INF = math.inf
FLT_MAX = (2 - 2.0**-23) * 2.0**127
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 codes 0 .. 7; 8 is the sign
E4M3 = [m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:0x7F]
NEGATIVE = (3, 5, 6, 7, 8, 9, 10, 12, 14, 15)  # signs of the Hadamard transform


# ---- FP32: Python's double holds a sum, product or quotient of two FP32 values so exactly that one more rounding gives
# the correctly rounded FP32 result


def fl(x: float) -> float:
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


def div(a: float, b: float) -> float:
    if b == 0:
        return math.nan if a == 0 or a != a else math.copysign(INF, a) * math.copysign(1, b)
    return fl(a / b)


def least(a: float, b: float) -> float:  # b when either is NaN
    return a if a < b else b


def bits(x: float) -> str:
    return "0x%08x" % struct.unpack("<I", struct.pack("<f", x))[0]


def bf16(x: float) -> float:
    if math.isnan(x) or math.isinf(x) or x == 0:
        return x
    unit = 2.0 ** (max(math.frexp(abs(x))[1] - 1, -126) - 7)
    y = round(x / unit) * unit  # Python rounds halves to even; both steps are exact
    return math.copysign(INF, x) if abs(y) >= 2.0**128 else math.copysign(y, x)


def amax_of(values: list[float]) -> float:
    return max((abs(v) for v in values if v == v), default=0.0)


# ---- the two small formats


def nearest(table: list[float] | tuple[float, ...], a: float) -> int:
    """The place of a >= 0 in an ascending table; a tie goes to the even place, beyond the end to the last."""
    if a >= table[-1]:
        return len(table) - 1
    above = next(i for i, v in enumerate(table) if v > a)
    low, high = a - table[above - 1], table[above] - a
    if low == high:
        return above - 1 + (above - 1) % 2
    return above - (low < high)


def e4m3(x: float) -> int:  # scales are never negative
    return nearest(E4M3, x)


def e2m1(x: float, random8: int | None = None) -> int:
    if x != x:
        return 7
    sign, a = 8 if math.copysign(1, x) < 0 else 0, abs(x)
    if random8 is None or a >= 6:
        return sign + nearest(MAGNITUDES, a)
    below = max(i for i in range(8) if MAGNITUDES[i] <= a)
    place = (a - MAGNITUDES[below]) / (MAGNITUDES[below + 1] - MAGNITUDES[below])
    return sign + below + (math.floor(256 * place) + random8 >= 256)


def decode(code: int) -> float:
    return -MAGNITUDES[code - 8] if code >= 8 else MAGNITUDES[code]


# ---- random numbers: Philox4x32 with 7 rounds (Salmon et al. 2011)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> list[int]:
    c, (k0, k1) = list(counter), key
    for _ in range(7):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [p1 >> 32 ^ c[1] ^ k0, p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ k1, p0 & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c


def random_bytes(seed: int, row: int, block: int, step: int = 0, place: int = 0) -> bytes:
    """One a value of a block of 16. place: layer << 16 | role << 8 | word."""
    return struct.pack("<4I", *philox((row, block, step, place), (seed & 0xFFFFFFFF, seed >> 32)))


# ---- the Hadamard transform of 16 values


def rht(x: list[float]) -> list[float]:
    x = [fl(v * (-0.25 if i in NEGATIVE else 0.25)) for i, v in enumerate(x)]
    for stride in (1, 2, 4, 8):
        x = [fl(x[i - stride] - x[i]) if i & stride else fl(x[i] + x[i + stride]) for i in range(16)]
    return [bf16(v) for v in x]


# ---- the quantizer


class Tensor:
    """Matrix [rows][cols] with its tensor scale, then codes and scales [rows][blocks]."""

    def __init__(self, x: list[list[float]], args: argparse.Namespace):
        self.x, self.args = x, args
        self.rows, self.cols = len(x), len(x[0])
        self.blocks, self.height = -(-self.cols // 16), 16 if args.blocks == "16x16" else 1
        self.pow2, self.bound = args.tensor_scale == "pow2", 448 if args.four_over_six == "off" else 256
        self.amax = amax_of([v for row in x for v in row])
        self.encode = least(div(6 * self.bound, self.amax), FLT_MAX)
        if self.pow2 and self.amax > 0:
            amax = min(self.amax, FLT_MAX)
            self.encode = 2.0 ** next(e for e in range(126, -200, -1) if 2.0**e * amax <= 2688)
        if self.amax == 0 or (self.amax == INF and not self.pow2):
            self.encode = 1.0
        self.decode = div(1, self.encode)
        self.codes = [[0] * self.cols for _ in range(self.rows)]
        self.scales = [[0] * self.blocks for _ in range(self.rows)]
        self.statistics = {"zeroed": 0, "saturated": 0, "zero_blocks": 0, "nan": 0, "inf": 0}
        self.histogram, self.error, self.power = [0] * 0x7F, 0.0, 0.0
        for r in range(0, self.rows, self.height):
            for b in range(self.blocks):
                self.quantize_block(r, b)

    def block_encode(self, byte: int) -> float:
        return least(div(1, fl(E4M3[byte] * self.decode)), FLT_MAX)

    def scale_of(self, amax: float) -> tuple[int, float]:
        """A block's scale and the factor on its values."""
        if not self.pow2:
            byte = e4m3(least(fl(amax * fl(self.encode * fl(1 / 6))), FLT_MAX))
            return byte, self.block_encode(byte)
        sixth = least(fl(amax * fl(1 / 6)), 1.875 * 2.0**127)
        unit = 2.0 ** (max(math.frexp(sixth)[1] - 1, -126) - 3)  # 4 significant bits
        rounded = round(sixth / unit) * unit
        return e4m3(fl(rounded * self.encode)), least(div(1, rounded), FLT_MAX)

    def error_4_6(self, block: list[list[float]], byte: int) -> float:
        encode, sums = self.block_encode(byte), []
        for row in block:
            total = 0.0
            for x in row:
                value = div(fl(fl(decode(e2m1(fl(x * encode))) * E4M3[byte]) * self.amax), 6 * 256)
                d = fl(value - x)
                total = fl(total + (fl(d * d) if self.args.four_over_six == "mse" else abs(d)))
            sums.append(total)
        while len(sums) > 1:
            half = len(sums) // 2
            sums = [fl(a + b) for a, b in zip(sums[:half], sums[half:])]
        return sums[0]

    def scale_4_6(self, block: list[list[float]], amax: float) -> tuple[int, float]:
        base = fl(fl(amax / 6) * self.encode)
        six, four = e4m3(least(base, 448)), e4m3(least(fl(base * 1.5), 448))
        best = four if self.error_4_6(block, four) < self.error_4_6(block, six) else six
        return best, self.block_encode(best)

    def value(self, code: int, byte: int) -> float:
        if self.pow2:
            return fl(decode(code) * fl(E4M3[byte] * self.decode))
        return fl(decode(code) * fl(fl(E4M3[byte] * self.amax) * fl(1 / (6 * self.bound))))

    def quantize_block(self, r0: int, b: int) -> None:
        inside = [r0 + i < self.rows for i in range(self.height)]
        block = [self.x[r0 + i][16 * b : 16 * b + 16] if inside[i] else [] for i in range(self.height)]
        block = [row + [0.0] * (16 - len(row)) for row in block]
        amax = amax_of([v for row in block for v in row])
        byte, encode = self.scale_of(amax) if self.args.four_over_six == "off" else self.scale_4_6(block, amax)
        self.statistics["zero_blocks"] += byte == 0
        self.histogram[byte] += 1
        for r in range(r0, min(r0 + self.height, self.rows)):
            draw = random_bytes(self.args.seed, self.args.row0 + r, b, self.args.step, self.args.place)
            self.scales[r][b] = byte
            for c in range(16 * b, min(16 * b + 16, self.cols)):
                x, y = self.x[r][c], fl(self.x[r][c] * encode)
                self.codes[r][c] = e2m1(y, draw[c % 16] if self.args.rounding == "stochastic" else None)
                self.count(x, y, self.value(self.codes[r][c], byte))

    def count(self, x: float, y: float, value: float) -> None:
        self.statistics["zeroed"] += math.isfinite(x) and x != 0 and value == 0
        self.statistics["saturated"] += abs(y) > 6
        self.statistics["nan"] += math.isnan(x)
        self.statistics["inf"] += math.isinf(x)
        if math.isfinite(x):
            self.error += (value - x) ** 2
            self.power += x * x

    def packed(self) -> bytes:
        rows = [row + [0] * (self.cols % 2) for row in self.codes]
        return bytes(row[c] | row[c + 1] << 4 for row in rows for c in range(0, len(row), 2))


def prepare(data: bytes, args: argparse.Namespace) -> list[list[float]]:
    flat = struct.unpack(f"<{args.rows * args.cols}f", data)
    x = [list(flat[r * args.cols : (r + 1) * args.cols]) for r in range(args.rows)]
    if args.transpose == "on":
        x = [list(column) for column in zip(*x)]
    if args.rht == "on":
        x = [[v for c in range(0, len(row), 16) for v in rht(row[c : c + 16])] for row in x]
    return x


# ---- comparing with what the verb wrote


def differences(t: Tensor, prefix: str) -> list[str]:
    found = []
    for suffix, ours in (
        ("codes", bytes(c for row in t.codes for c in row)),
        ("packed", t.packed()),
        ("scales", bytes(s for row in t.scales for s in row)),
    ):
        theirs = Path(f"{prefix}.{suffix}").read_bytes()
        if theirs != ours:
            place = next((i for i, (a, b) in enumerate(zip(theirs, ours)) if a != b), min(len(theirs), len(ours)))
            found.append(f"{suffix}: {len(theirs)} bytes, {len(ours)} expected; first difference at byte {place}")
    said = json.loads(Path(f"{prefix}.json").read_text())
    relative = t.error / t.power if t.error else 0.0
    elements, scale_blocks = t.rows * t.cols, sum(t.histogram)
    expected = {
        "rows": t.rows,
        "cols": t.cols,
        "amax_bits": bits(t.amax),
        "encode_scale_bits": bits(t.encode),
        "decode_scale_bits": bits(t.decode),
        "relative_mse": relative,
        "snr_db": -10 * math.log10(relative) if relative else INF,
        "scale_histogram": t.histogram,
    }
    for key, count in t.statistics.items():
        whole = {"nan": 1, "inf": 1, "zero_blocks": scale_blocks}.get(key, elements)
        expected[key] = count / whole
    for key, ours in expected.items():
        theirs = said.get(key)
        same = theirs == ours
        if isinstance(ours, float) and isinstance(theirs, (int, float)):
            same = math.isclose(theirs, ours, rel_tol=1e-9)
        elif isinstance(ours, float) and isinstance(theirs, str):
            same = theirs == str(ours)
        if not same:
            found.append(f"{key}: {theirs}, {ours} expected")
    for key in ("amax", "encode_scale", "decode_scale"):
        if bits(float(said[key])) != said[f"{key}_bits"]:
            found.append(f"{key}: {said[key]} is not {said[f'{key}_bits']}")
    return found


# ---- inputs


def special(draw: random.Random) -> float:
    return draw.choice([0.0, -0.0, 2.0**-149, -(2.0**-130), 1e-40, FLT_MAX, -FLT_MAX, 1e30, 6.0, -6.0, draw.gauss(0, 1)])


KINDS = {
    "normal": lambda draw: draw.gauss(0, 1),
    "wide": lambda draw: draw.gauss(0, 1) * 10 ** draw.uniform(-9, 9),
    "rare": lambda draw: draw.gauss(0, 1) * (1e5 if draw.random() < 0.01 else 1),  # most scales are E4M3 denormals
    "ties": lambda draw: draw.choice([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0]) * draw.choice([-1, 1]),
    "zeros": lambda draw: draw.choice([0.0, -0.0]),
    "tiny": lambda draw: draw.choice([-1, 1]) * draw.randrange(1 << 20) * 2.0**-149,
    "special": special,
    "infinite": lambda draw: draw.choice([INF, -INF, 1.0, draw.gauss(0, 1), 0.0]),
    "nan": lambda draw: draw.choice([math.nan, draw.gauss(0, 1), draw.gauss(0, 100), -0.0]),
}


def make(args: argparse.Namespace) -> None:
    draw = random.Random(args.seed)
    values = [fl(KINDS[args.make](draw)) for _ in range(args.rows * args.cols)]
    for i in range(0, len(values) - 16, 112):  # here and there a whole block of zeros
        values[i : i + 16] = [0.0] * 16
    Path(args.output).write_bytes(struct.pack(f"<{len(values)}f", *values))


def main() -> int:
    parser = argparse.ArgumentParser()
    for key in ("input", "output", "compare"):
        parser.add_argument(f"--{key}")
    for key, fallback in (("rows", 1), ("cols", 1), ("seed", 1), ("row0", 0), ("step", 0), ("place", 0)):
        parser.add_argument(f"--{key}", type=int, default=fallback)
    for key, choices in (
        ("blocks", ["1x16", "16x16"]),
        ("rounding", ["nearest", "stochastic"]),
        ("rht", ["off", "on"]),
        ("transpose", ["off", "on"]),
        ("tensor_scale", ["amax", "pow2"]),
        ("four_over_six", ["off", "mae", "mse"]),
    ):
        parser.add_argument(f"--{key}", choices=choices, default=choices[0])
    parser.add_argument("--make", choices=KINDS)
    args = parser.parse_args()
    if args.make:
        make(args)
        return 0
    found = differences(Tensor(prepare(Path(args.input).read_bytes(), args), args), args.compare)
    for line in found:
        print(line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
