"""Reads a folder that `train_gpt export --format nvfp4` wrote, as a program that serves models does, and checks it.

    read_export.py FOLDER --weights BF16-FOLDER [--blocks B --rounding R --tensor_scale T --four_over_six F --seed S --step N]

BF16-FOLDER is the same checkpoint exported with --format bf16. Checked against the layout of ModelOpt
(https://github.com/NVIDIA/Model-Optimizer, modelopt/torch/export) and its loader in vLLM (model_executor/layers/
quantization/modelopt.py): the config files agree with the tensors; every packed module has weight, weight_scale and
weight_scale_2 of the right dtype and shape; q, k and v share weight_scale_2, and so do gate and up; what is not packed is
the BF16 folder's; codes and scales are those of nvfp4.py for the fused matrix, so every weight decodes to what training
read. The last line counts; exit code 1 on a difference. Plain Python.
"""

import argparse
import json
import struct
import sys
from pathlib import Path

import nvfp4

BYTES = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
FUSED = (  # in the order of the projections that count in a rounding's place
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
ROLE_WEIGHT_ROWS = 67 + 4  # philox.h: ROLE_OPERAND + COPY_W_ROW; 6 copies a projection

found: list[str] = []
checks = 0


def check(holds: bool, message: str) -> None:
    global checks
    checks += 1
    if not holds:
        found.append(message)


def read(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """name -> dtype, shape, data; every tensor must be aligned to its elements."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name == "__metadata__":
            check(entry == {"format": "pt"}, f"{path}: metadata {entry}")
            continue
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        check(begin % BYTES[entry["dtype"]] == 0, f"{name}: not aligned")
        tensors[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return tensors


def floats(tensor: tuple[str, list[int], bytes]) -> list[list[float]]:
    """BF16 [rows, cols]."""
    dtype, (rows, cols), data = tensor
    assert dtype == "BF16"
    halves = struct.unpack(f"<{rows * cols}H", data)
    flat = [struct.unpack("<f", struct.pack("<I", h << 16))[0] for h in halves]
    return [flat[r * cols : (r + 1) * cols] for r in range(rows)]


def unpack(data: bytes) -> list[int]:
    return [nibble for byte in data for nibble in (byte & 15, byte >> 4)]


def check_group(packed: dict, plain: dict, layer: int, projection: int, args: argparse.Namespace) -> None:
    names = [f"model.layers.{layer}.{part}" for part in FUSED[projection]]
    args.place = layer << 16 | (ROLE_WEIGHT_ROWS + 6 * projection) << 8
    matrices = [floats(plain[f"{name}.weight"]) for name in names]
    fused = nvfp4.Tensor([row for matrix in matrices for row in matrix], args)
    factor = fused.decode if fused.pow2 else nvfp4.div(fused.amax, 6 * fused.bound)
    row0, blocks, one = 0, fused.cols // 16, nvfp4.E4M3.index(1.0)
    for name, matrix in zip(names, matrices):
        rows, cols = len(matrix), fused.cols
        for suffix, dtype, shape in (
            ("weight", "U8", [rows, cols // 2]),
            ("weight_scale", "F8_E4M3", [rows, blocks]),
            ("weight_scale_2", "F32", []),
        ):
            check(packed[f"{name}.{suffix}"][:2] == (dtype, shape), f"{name}.{suffix}: dtype or shape")
        scales = list(packed[f"{name}.weight_scale"][2])
        codes = unpack(packed[f"{name}.weight"][2])
        (scale_2,) = struct.unpack("<f", packed[f"{name}.weight_scale_2"][2])
        check(scale_2 == (factor or 1.0), f"{name}: weight_scale_2 {scale_2}, {factor} expected")
        check(all(0 < s < 0x7F for s in scales), f"{name}: a block scale is 0, negative or NaN")
        for r in range(rows):
            for b in range(blocks):
                ours, scale = fused.codes[row0 + r][16 * b : 16 * b + 16], fused.scales[row0 + r][b]
                if scale == 0:
                    ours, scale = [0] * 16, one
                place = f"{name}: row {r}, block {b}"
                check(scales[r * blocks + b] == scale, f"{place}: scale {scales[r * blocks + b]}, {scale} expected")
                check(codes[r * cols + 16 * b :][:16] == ours, f"{place}: codes")
                for i, code in enumerate(ours):  # as a reader decodes, against what training decodes to
                    read_back = nvfp4.fl(nvfp4.decode(code) * nvfp4.fl(nvfp4.E4M3[scale] * scale_2))
                    trained = fused.value(fused.codes[row0 + r][16 * b + i], fused.scales[row0 + r][b])
                    check(abs(read_back - trained) <= 2.0**-22 * abs(trained), f"{place}: {read_back}, not {trained}")
                    check(not fused.pow2 or read_back == trained, f"{place}: not exact")
        row0 += rows


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    for key, fallback in (("blocks", "16x16"), ("rounding", "nearest"), ("tensor_scale", "amax"), ("four_over_six", "off")):
        parser.add_argument(f"--{key}", default=fallback)
    for key, fallback in (("seed", 1), ("step", 0)):
        parser.add_argument(f"--{key}", type=int, default=fallback)
    args = parser.parse_args()
    args.row0 = 0

    packed, plain = read(args.folder / "model.safetensors"), read(args.weights / "model.safetensors")
    config = json.loads((args.folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    check(config == json.loads((args.weights / "config.json").read_text()), "config.json differs beyond quantization")
    file = json.loads((args.folder / "hf_quant_config.json").read_text())["quantization"]
    modules = {name.removesuffix(".weight_scale_2") for name in packed if name.endswith(".weight_scale_2")}
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    check(quantization["quant_method"] == "modelopt", "quant_method")
    check(quantization["quant_algo"] == file["quant_algo"] == "W4A16_NVFP4", "quant_algo")
    check(quantization["config_groups"] == {"group_0": {"weights": weights, "targets": ["Linear"]}}, "config_groups")
    check(file["group_size"] == 16 and file["kv_cache_quant_algo"] is None, "hf_quant_config.json")
    linears = {f"model.layers.{i}.{part}" for i in range(config["num_hidden_layers"]) for g in FUSED for part in g}
    for ignored in (quantization["ignore"], file["exclude_modules"]):
        check(len(ignored) == len(set(ignored)), "a module is ignored twice")
        check(set(ignored) == linears - modules | {"lm_head"}, "the ignored modules are not those in BF16")

    names = set(plain)
    for name in modules:
        names |= {f"{name}.weight_scale", f"{name}.weight_scale_2"}
    check(set(packed) == names, f"other tensors: {sorted(set(packed) ^ names)}")
    for name, tensor in plain.items():
        if name.removesuffix(".weight") not in modules:
            check(packed.get(name) == tensor, f"{name}: not as in the BF16 folder")
    for layer in range(config["num_hidden_layers"]):
        for projection, parts in enumerate(FUSED):
            inside = [f"model.layers.{layer}.{part}" in modules for part in parts]
            check(all(inside) or not any(inside), f"layer {layer}: only some of {parts} are packed")
            if all(inside):
                check_group(packed, plain, layer, projection, args)
    for line in found[:20]:
        print(line)
    print(f"{len(modules)} packed modules, {checks} checks, {len(found)} failed")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
