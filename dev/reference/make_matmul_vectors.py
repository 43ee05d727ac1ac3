#!/usr/bin/env python3
"""Writes test/fixtures/nvfp4_matmul.bin: NVFP4 products as cuBLASLt is given and gives them, for its double.

    python3 dev/reference/make_matmul_vectors.py ORACLE.py

The oracle is the independent plain-Python quantizer of make_nvfp4_vectors.py; here it needs quantize(values, rows, cols,
twod), packed(q), swizzled_scale_offset(row, block, blocks) and block_dot_exact(qa, row_a, qb, row_b), the sum of the
products of codes and scales in units of 2^-20. The file, little-endian:

    8 bytes  "NVFP4MM1"
    u32      number of products, each:
        u32 x 3  m, n, k
        f32      alpha: amax_a x amax_b / 2688^2
        u8       codes of A [m][k / 2], scales of A: whole tiles of 128 rows x 4 blocks
        u8       codes of B [n][k / 2], scales of B
        f64      D: n columns of m, each alpha x the exact sum
"""

import argparse
import importlib.util
import math
import random
import struct
from pathlib import Path
from types import ModuleType
from typing import Any

SHAPES = [(8, 5, 32), (48, 40, 96), (144, 9, 160)]  # one tile of scales; two along k; two along m


def f32(x: float) -> float:
    return struct.unpack("<f", struct.pack("<f", x))[0]


def swizzled(oracle: ModuleType, q: dict[str, Any]) -> bytes:
    rows, blocks = q["rows"], len(q["scales"][0])
    out = bytearray(-(-rows // 128) * 128 * (-(-blocks // 4) * 4))
    for r in range(rows):
        for b in range(blocks):
            out[oracle.swizzled_scale_offset(r, b, blocks)] = q["scales"][r][b]
    return bytes(out)


def product(oracle: ModuleType, rng: random.Random, m: int, n: int, k: int) -> bytes:
    values = lambda rows: [f32(rng.gauss(0, 1) * math.exp(rng.gauss(0, 1))) for _ in range(rows * k)]
    a, b = oracle.quantize(values(m), m, k, twod=True), oracle.quantize(values(n), n, k)
    alpha = f32(a["amax"] * b["amax"] / 2688.0**2)
    out = struct.pack("<3If", m, n, k, alpha)
    for q in (a, b):
        out += b"".join(bytes(row) for row in oracle.packed(q)) + swizzled(oracle, q)
    exact = [alpha * math.ldexp(oracle.block_dot_exact(a, i, b, j), -20) for j in range(n) for i in range(m)]
    return out + struct.pack(f"<{m * n}d", *exact)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("oracle", type=Path, help="the module that quantizes")
    parser.add_argument("--output", type=Path,
                        default=Path(__file__).resolve().parents[2] / "test" / "fixtures" / "nvfp4_matmul.bin")
    arguments = parser.parse_args()
    spec = importlib.util.spec_from_file_location("oracle", arguments.oracle)
    assert spec and spec.loader
    oracle = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(oracle)

    rng = random.Random(16)
    out = b"NVFP4MM1" + struct.pack("<I", len(SHAPES))
    for m, n, k in SHAPES:
        out += product(oracle, rng, m, n, k)
    arguments.output.write_bytes(out)
    print(f"{arguments.output}: {len(SHAPES)} products, {len(out)} bytes")


if __name__ == "__main__":
    main()
