/* The verb quantize: one tensor to NVFP4 by the reference quantizer (nvfp4.h), written out with its statistics, for
 * people who study the format.
 *
 *     input     X.f32: raw little-endian FP32 [rows, cols];  F.safetensors: one 2-D (or 1-D) tensor, F32 or BF16
 *     order     transpose, then RHT on each 16 columns (rounded to BF16), then amax, then quantization
 *     output    PREFIX.codes    one byte an element, row-major        PREFIX.scales  E4M3, a row and 16 columns each
 *               PREFIX.packed   two codes a byte, even column low     PREFIX.json    amax, scales, statistics
 *
 * FP32 input is quantized as it is, without a rounding to BF16. All outputs have the shape after transposing. Random
 * bits: the seed, rows counted from row0, block column = column / 16; step, layer, role and word are 0. Floor 4.
 */
#ifndef LLMC_QUANTIZE_H
#define LLMC_QUANTIZE_H

#include "options.h"

C_BEGIN

/* Prints the statistics. 0, or -1 with the reason; outputs are complete or not there. */
int quantize_file(const Options *options, Error *error);

C_END
#endif
