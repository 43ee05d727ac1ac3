#!/usr/bin/env python3
"""Counts the machine instructions of kernels in a cubin or an object of nvcc's (16 bytes each, padding left out), for each
element that a thread of the quantize tile works on: dev/sass_count.py FILE [NAME LIMIT]...

Prints a line per kernel of name quantize_tile; with NAME LIMIT, kernels whose mangled name contains NAME
must have at most LIMIT instructions an element: the exit code is 1 when one has more, or none is found. A tile's loops are
all unrolled, so that the count is what a thread runs, less what it skips.
"""

import struct
import sys

ELEMENTS = 64  # of a thread: a tile of 128 x 128 by 256 threads
NOP = 0x918


def sections(data):
    """Name and bytes of the sections of an ELF file."""
    table, = struct.unpack_from('<Q', data, 40)
    size, count, names = struct.unpack_from('<HHH', data, 58)
    header = [struct.unpack_from('<IIQQQQ', data, table + i * size) for i in range(count)]
    for name, _, _, _, offset, length in header:
        at = header[names][4] + name
        yield data[at:data.index(b'\0', at)].decode(), data[offset:offset + length]


def kernels(path):
    """Mangled name and number of instructions of each."""
    with open(path, 'rb') as file:
        data = file.read()
    for name, text in sections(data):
        if not name.startswith('.text.'):
            continue
        opcodes = [struct.unpack_from('<Q', text, i)[0] & 0xfff for i in range(0, len(text), 16)]
        while opcodes and opcodes[-1] == NOP:
            opcodes.pop()
        yield name[len('.text.'):], len(opcodes)


def main():
    limits = list(zip(sys.argv[2::2], map(float, sys.argv[3::2])))
    found, bad = set(), False
    for name, count in sorted(kernels(sys.argv[1])):
        if 'quantize_tile' not in name:
            continue
        each, over = count / ELEMENTS, ''
        for part, limit in limits:
            if part in name:
                found.add(part)
                over = f'  OVER {limit:g}' if each > limit else ''
        bad = bad or over != ''
        print(f'{each:6.1f} {count:6d} {name}{over}')
    missing = [part for part, _ in limits if part not in found]
    if missing:
        print('no kernel:', ' '.join(missing))
    return 1 if bad or missing else 0


sys.exit(main())
