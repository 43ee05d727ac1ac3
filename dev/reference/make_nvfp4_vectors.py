#!/usr/bin/env python3
"""Writes test/fixtures/nvfp4.bin: what the quantizer of llmc/nvfp4.h must give, bit by bit.

    python3 dev/reference/make_nvfp4_vectors.py ORACLE.py

The vectors were made with an independent plain-Python implementation which follows TransformerEngine's reference
quantizer (and its kernels where the two differ: the sign of zero, NaN). It is kept outside of this repository; any
module with these functions will do:

    quantize(values, rows, cols, twod, fouroversix, sr_bytes, mode="kernel", amax=None)
                      a dict: codes and scales as lists of rows; amax, encode_scale, decode_scale
    dequantize(q), packed(q), encode_e4m3(x)

The random bytes of stochastic rounding are made here, with a Philox4x32-7 of our own. The file, little-endian:

    8 bytes  "NVFP4V1\\0"
    u32      number of data sets, each:
        24 bytes  name, padded with zeros
        u32 x 9   rows, cols, seed low, seed high, step, layer, role, row0, block0
        u32       x [rows][cols], bits of FP32
        8 times, in the order of VARIANTS:
            u32 x 3   bits of amax, encode scale, decode scale
            u64       FNV-1a of the dequantized values' bits, each 4 bytes, every NaN as 0x7fc00000
            u8        packed codes [rows][ceil(cols / 2)], even column in the low nibble
            u8        block scales [rows][ceil(cols / 16)]
"""

import argparse
import importlib.util
import math
import random
import struct
from pathlib import Path
from types import ModuleType

VARIANTS = [  # 16 x 16 blocks, 4/6, stochastic
    (False, None, False), (True, None, False), (False, "MAE", False), (True, "MAE", False),
    (False, "MSE", False), (True, "MSE", False), (False, None, True), (True, None, True),
]
Data = tuple[str, int, int, list[float]]  # name, rows, cols, values


def f32(x: float) -> float:
    if abs(x) > 3.4028235e38 and not math.isinf(x):
        return math.copysign(math.inf, x)
    return struct.unpack("<f", struct.pack("<f", x))[0]


def bits(x: float) -> int:
    return struct.unpack("<I", struct.pack("<f", x))[0]


def from_bits(b: int) -> float:
    return struct.unpack("<f", struct.pack("<I", b))[0]


def bf16(x: float) -> float:
    """The BF16 value below in magnitude: any one will do."""
    return from_bits(bits(f32(x)) & 0xFFFF0000)


def neighbour(x: float, ulps: int) -> float:
    return from_bits(bits(x) + ulps)


def philox4x32_7(counter: list[int], key: list[int]) -> list[int]:
    c, k = list(counter), list(key)
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(b >> 32) ^ c[1] ^ k[0], b & 0xFFFFFFFF, (a >> 32) ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def random_bytes(rows: int, cols: int, place: list[int]) -> list[int]:
    """Element i of a block takes byte i % 4 of word i // 4 of the block's one draw."""
    seed_low, seed_high, step, layer, role, row0, block0 = place
    out = []
    for r in range(rows):
        for c in range(cols):
            word = philox4x32_7([row0 + r, block0 + c // 16, step, layer << 16 | role << 8], [seed_low, seed_high])
            out.append(word[c % 16 // 4] >> 8 * (c % 4) & 0xFF)
    return out


def e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3, byte & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = [e4m3(b) for b in range(127)]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
TIES = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]


def ordinary(rng: random.Random) -> list[Data]:
    """Sizes that are and are not multiples of 16 and 128, smooth and heavy tails."""
    gauss = lambda n, scale=1.0: [f32(rng.gauss(0, scale)) for _ in range(n)]
    heavy = lambda n: [f32(rng.gauss(0, 1) * math.exp(3 * rng.gauss(0, 1))) for _ in range(n)]
    rounded = lambda values: [bf16(v) for v in values]
    return [
        ("gauss", 16, 64, gauss(1024)), ("gauss_bf16", 32, 48, rounded(gauss(1536))),
        ("gauss_21x37", 21, 37, gauss(777)), ("gauss_bf16_37x21", 37, 21, rounded(gauss(777, 0.02))),
        ("heavy_17x50", 17, 50, heavy(850)), ("heavy_bf16_33x31", 33, 31, rounded(heavy(1023))),
        ("tall_130x18", 130, 18, gauss(2340)), ("one", 1, 1, [-0.7]), ("row_1x17", 1, 17, gauss(17)),
        ("column_19x1", 19, 1, gauss(19)),
    ]


def extremes(rng: random.Random) -> list[Data]:
    """Denormals, zeros of both signs, huge values, Inf, NaN."""
    n = 16 * 32
    denormal = [from_bits(rng.getrandbits(31) % 0x800000 | rng.getrandbits(1) << 31) for _ in range(n)]
    mixed = [v if rng.random() < 0.5 else f32(rng.gauss(0, 1e-37)) for v in denormal]
    huge = [bf16(f32(rng.uniform(-3.3e38, 3.3e38))) for _ in range(n)]
    largest = [v if i % 7 else math.copysign(from_bits(0x7F7FFFFF), v) for i, v in enumerate(huge)]
    zeros = [rng.choice([0.0, -0.0]) for _ in range(n)]
    sparse = [f32(rng.gauss(0, 1)) if rng.random() < 0.05 else rng.choice([0.0, -0.0]) for _ in range(20 * 40)]
    spread = [f32(rng.gauss(0, 1) * 10.0 ** rng.uniform(-4, 5)) for _ in range(n)]
    inf = [math.copysign(math.inf, v) if i % 97 == 5 else v for i, v in enumerate(spread)]  # scales reach 448 and stay
    nan_bits = [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF]
    nan = [from_bits(rng.choice(nan_bits)) if i % 13 == 3 or 64 <= i < 80 else bf16(v) for i, v in enumerate(spread)]
    return [
        ("denormal", 16, 32, denormal), ("denormal_mixed", 16, 32, mixed), ("smallest", 2, 16, [from_bits(1)] * 32),
        ("huge_bf16", 16, 32, huge), ("largest", 16, 32, largest), ("zeros", 16, 32, zeros), ("sparse", 20, 40, sparse),
        ("inf", 16, 32, inf), ("nan", 16, 32, nan), ("nan_only", 3, 5, [from_bits(b) for b in (nan_bits * 4)[:15]]),
        ("nan_and_inf", 16, 32, [a if a != a else b for a, b in zip(nan, inf)]),
    ]


def scales(rng: random.Random) -> list[Data]:
    """Block maxima over all of E4M3, at its ties, and where the scale becomes zero."""
    out: list[Data] = []
    for name, amax, rounding in (("scale_range", 2688.0, f32), ("scale_range_bf16", bf16(1.37), bf16)):
        values = [rounding(rng.uniform(-1, 1) * amax * 2.0 ** (-24 * (i // 16) / 128)) for i in range(8 * 256)]
        values[0] = amax
        out.append((name, 8, 256, values))
    for name, amax in (("scale_ties", 2688.0), ("scale_ties_4_6", 1536.0), ("scale_ties_bf16", bf16(3.3))):
        values = []
        for b in range(126):  # 6 x the middle between two scales, in units of the tensor's scale
            top = 6 * (E4M3[b] + E4M3[b + 1]) / 2 * amax / 2688.0
            top = bf16(top) if name.endswith("bf16") else f32(top)
            values += [top] + [f32(top * rng.choice([-1, 1]) * rng.choice(TIES) / 6) for _ in range(15)]
        out.append((name, 9, 14 * 16, values[:-16] + [amax] * 16))
    values = []
    for amax in (1.0, 448.0, f32(0.3), from_bits(0x501502F9)):
        limit = f32(amax * 2.0**-10 / 448)
        values += [amax] + [0.0] * 15
        for ulps in (-3, -2, -1, 0, 1, 2, 3):
            values += [neighbour(limit, ulps) * rng.choice([-1, 1]), f32(limit / 2)] + [0.0] * 14
    for row in range(4):  # one tensor each, as every limit belongs to its amax
        out.append((f"flush_{row}", 1, 128, values[128 * row : 128 * row + 128]))
    return out


def orders(rng: random.Random, oracle: ModuleType) -> list[Data]:
    """Block maxima whose scale is another one under (amax_b / 6) x S_enc than under amax_b x (S_enc x 1/6): the two
    kinds of quantizer differ in just this, and other data hardly ever shows it."""
    out: list[Data] = []
    sixth = f32(1.0 / 6.0)
    for name, bound in (("orders", 448), ("orders_4_6", 256)):
        values: list[float] = []
        amax = 0.0
        while len(values) < 1024 - 16:
            if not values:
                amax = f32(rng.uniform(1, 2))
            encode = f32(6 * bound / amax)
            byte, factor = rng.randrange(16, 110), rng.choice([1.0, 1.5]) if bound == 256 else 1.0
            top = f32(6 * (E4M3[byte] + E4M3[byte + 1]) / 2 / factor / encode)
            for ulps in (-1, 0, 1):
                b = neighbour(top, ulps)
                a = [f32(f32(f32(b / 6) * encode) * factor), f32(f32(b * f32(encode * sixth)) * factor)]
                if b < amax and oracle.encode_e4m3(a[0]) != oracle.encode_e4m3(a[1]):
                    values += [b] + [f32(b * rng.choice([-1, 1]) * rng.choice(E2M1) / 6 / rng.choice([1, 1.5]))
                                     for _ in range(15)]
                    break
        out.append((name, 16, 64, values + [amax] + [0.0] * 15))
    return out


def ties(rng: random.Random, oracle: ModuleType) -> list[Data]:
    """Values on and beside the middles of the grid; values that are NVFP4 already."""
    out: list[Data] = []
    for name, amax in (("ties", 2688.0), ("ties_4_6", 1536.0), ("ties_third", f32(2688.0 / 3))):
        values = []
        for block in range(64):
            scale = rng.choice(E4M3[40:119]) * amax / 2688.0
            row = [f32(6 * scale)] + [f32(scale * rng.choice(TIES) * rng.choice([-1, 1])) for _ in range(15)]
            values += [neighbour(v, rng.choice([0, 0, -1, 1])) if v != row[0] else v for v in row]
        values[0] = amax
        out.append((name, 16, 64, values))
    quantized = oracle.quantize([f32(rng.gauss(0, 1)) for _ in range(1024)], 16, 64, mode="kernel")
    out.append(("nvfp4_already", 16, 64, oracle.dequantize(quantized)))
    # 4/6: 6, 3 and 0 are exact under both scales, so the errors are equal: all zero, or as large.
    units = [E4M3[8 * (c // 16 % 4) + 64] for _ in range(16) for c in range(64)]
    values = [unit * rng.choice([6.0, 3.0, 0.0, -6.0]) for unit in units]
    for c in range(0, 16 * 64, 16):
        values[c] = 6 * units[c]
    return out + [("equal_4_6", 16, 64, [1536.0] + values[1:])]


def undecided(rng: random.Random, oracle: ModuleType, kind: str, twod: bool, pairs: int) -> Data:
    """4/6 blocks whose two errors are equal but for roundings: one value is moved until the choice turns, and the
    blocks on both sides of the turn are kept. Another order or form of the sum decides some of them otherwise."""
    rows, blocks, amax = 16 if twod else 1, [], 4.0

    def chosen(block: list[float], value: float) -> int:
        q = oracle.quantize(block[:-1] + [value], rows, 16, twod=twod, fouroversix=kind, mode="kernel", amax=amax)
        return q["scales"][0][0]

    while len(blocks) < 2 * pairs:
        block = [f32(rng.gauss(0, 0.5)) for _ in range(16 * rows)]
        top = max(map(abs, block))
        points = [f32(top * i / 16) for i in range(16)]
        choices = [chosen(block, p) for p in points]
        turn = next((i for i in range(15) if choices[i] != choices[i + 1]), None)
        if turn is None:
            continue
        low, high = bits(points[turn]), bits(points[turn + 1])
        while high - low > 1:
            middle = (low + high) // 2
            if chosen(block, from_bits(middle)) == choices[turn]:
                low = middle
            else:
                high = middle
        blocks += [block[:-1] + [from_bits(low)], block[:-1] + [from_bits(high)]]
    blocks.append([amax] * (16 * rows))
    values = [v for r in range(rows) for block in blocks for v in block[16 * r : 16 * r + 16]]
    return (f"undecided_{kind}_{'2d' if twod else '1d'}", rows, 16 * len(blocks), values)


def fnv1a(values: list[float]) -> int:
    h = 0xCBF29CE484222325
    for v in values:
        for byte in struct.pack("<I", bits(v) if v == v else 0x7FC00000):
            h = (h ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return h


def encode(oracle: ModuleType, data: Data, place: list[int]) -> bytes:
    name, rows, cols, values = data
    assert len(values) == rows * cols, name
    out = name.encode().ljust(24, b"\0") + struct.pack("<9I", rows, cols, *place)
    out += struct.pack(f"<{len(values)}I", *map(bits, values))
    draws = random_bytes(rows, cols, place)
    for twod, fouroversix, stochastic in VARIANTS:
        q = oracle.quantize(values, rows, cols, twod=twod, fouroversix=fouroversix, mode="kernel",
                            sr_bytes=draws if stochastic else None)
        out += struct.pack("<3I", *(bits(q[key]) for key in ("amax", "encode_scale", "decode_scale")))
        out += struct.pack("<Q", fnv1a(oracle.dequantize(q)))
        out += b"".join(bytes(row) for row in oracle.packed(q)) + b"".join(bytes(row) for row in q["scales"])
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path, help="the module that quantizes")
    parser.add_argument("--output", type=Path,
                        default=Path(__file__).resolve().parents[2] / "test" / "fixtures" / "nvfp4.bin")
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("oracle", arguments.oracle)
    assert spec and spec.loader
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)

    rng = random.Random(4)
    data = ordinary(rng) + extremes(rng) + scales(rng) + orders(rng, oracle) + ties(rng, oracle)
    for kind in ("MAE", "MSE"):
        data += [undecided(rng, oracle, kind, False, 24), undecided(rng, oracle, kind, True, 6)]
    out = b"NVFP4V1\0" + struct.pack("<I", len(data))
    for d in data:
        place = [rng.getrandbits(32), rng.getrandbits(32), rng.getrandbits(20), rng.getrandbits(7),
                 67 + rng.getrandbits(4), rng.getrandbits(16), rng.getrandbits(8)]
        out += encode(oracle, d, place)
    arguments.output.write_bytes(out)
    print(f"{arguments.output}: {len(data)} data sets, {len(out)} bytes")


if __name__ == "__main__":
    main()
