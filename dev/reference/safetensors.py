"""The safetensors container, F32 and I32 only: written and read without the package of that name.

    u64       N, little-endian
    N bytes   JSON: {"__metadata__": {string: string}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...},
              padded with spaces to a multiple of 8
    the rest  the tensors, row-major and little-endian, without holes; the offsets count from here

https://github.com/huggingface/safetensors, "Format".
"""

import json
import struct
from pathlib import Path

import numpy as np

DTYPES = {"F32": np.dtype("<f4"), "I32": np.dtype("<i4")}


def write(path: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Tensors in the order of their names, so that equal contents give equal bytes."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    chunks: list[bytes] = []
    offset = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        dtype = {"f": "F32", "i": "I32"}[tensor.dtype.kind]
        if tensor.dtype.itemsize != 4:
            raise ValueError(f"{name}: {tensor.dtype} is neither float32 nor int32")
        data = tensor.astype(DTYPES[dtype]).tobytes(order="C")
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + len(data)]}
        chunks.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(chunks))


def read(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = memoryview(data)[8 + length :]
    tensors: dict[str, np.ndarray] = {}
    used = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, end = entry["data_offsets"]
        if begin != used:
            raise ValueError(f"{path}: {name} starts at {begin}, not at {used}")
        used = end
        tensors[name] = np.frombuffer(body[begin:end], DTYPES[entry["dtype"]]).reshape(entry["shape"]).copy()
    if used != len(body):
        raise ValueError(f"{path}: {len(body)} bytes of tensors, {used} described")
    return tensors, metadata
