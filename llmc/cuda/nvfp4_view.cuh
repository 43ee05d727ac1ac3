/* Where an NVFP4 view keeps its codes and scales on a GPU: as the tensor cores read them.
 *
 * cuBLASLt multiplies NVFP4 only with both operands stored with k contiguous, so a copy is a matrix [outer, K]:
 *
 *     row view of [rows, cols]       outer = rows, K = cols
 *     column view of [rows, cols]    outer = cols, K = rows: the transpose
 *
 *     codes     [outer] rows of round_up(K, 32) / 2 bytes, even k in the low nibble; beyond K zero
 *     scales    one E4M3 byte per 16 k, in tiles of 128 rows x 4 blocks (nvfp4.h); beyond the matrix zero
 *     scale     the tensor's, one float
 *
 * A weight in 16 x 16 blocks has both copies in one memory, with the same codes and scales in two orders, and between
 * ranks travels as what both are made from: the codes by rows and one scale per 16 x 16 block.
 *
 *     | codes by row | tile scales by row | [ codes by column | tile scales by column | block scales ] | tensor scale |
 *                                           16 x 16 only                       [rows / 16][cols / 16]
 * Every part begins at a multiple of 256 bytes. A column view alone has the two parts of its own. What ranks gather of
 * a weight in 1 x 16 blocks lies beside its views (quantize_weight.cu).
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_NVFP4_VIEW_CUH
#define LLMC_CUDA_NVFP4_VIEW_CUH

#include "cuda.cuh"

typedef struct { /* one copy */
    int64_t outer, K;
    int64_t ld; /* k of a row of codes with its padding: bytes = ld / 2 */
    uint8_t *codes, *scales;
    float *tensor_scale;
} Nvfp4Copy;

inline size_t nvfp4_aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }
inline size_t nvfp4_code_bytes(int64_t outer, int64_t K) { return (size_t)(outer * round_up(K, 32)) / 2; }

inline size_t nvfp4_copy_bytes(int64_t outer, int64_t K)
{
    return nvfp4_aligned(nvfp4_code_bytes(outer, K)) + nvfp4_aligned(nvfp4_tile_bytes(outer, ceil_div(K, 16)));
}

inline bool nvfp4_is_square(const ViewFormat *format) { return format->nvfp4.block == SCALE_16X16; }

/* Bytes before the tensor's scale. */
inline size_t nvfp4_before_tensor_scale(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols)
{
    size_t row = nvfp4_copy_bytes(rows, cols), col = nvfp4_copy_bytes(cols, rows);
    if (!nvfp4_is_square(format)) return view == VIEW_ROW ? row : col;
    return row + col + nvfp4_aligned((size_t)(ceil_div(rows, 16) * ceil_div(cols, 16)));
}

inline size_t nvfp4_view_bytes(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols)
{
    return nvfp4_before_tensor_scale(format, view, rows, cols) + nvfp4_aligned(sizeof(float));
}

/* The copy that a product reads: `col` says which of the operand's views v is. */
inline Nvfp4Copy nvfp4_copy(const View *v, bool col, int64_t rows, int64_t cols)
{
    Nvfp4Copy c;
    c.outer = col ? cols : rows, c.K = col ? rows : cols;
    c.ld = round_up(c.K, 32);
    c.codes = (uint8_t *)v->data;
    if (col && nvfp4_is_square(&v->format)) c.codes += nvfp4_copy_bytes(rows, cols);
    c.scales = c.codes + nvfp4_aligned(nvfp4_code_bytes(c.outer, c.K));
    c.tensor_scale = v->tensor_scale;
    return c;
}

/* Of a weight in 16 x 16 blocks: its block scales, [ceil(rows / 16)][ceil(cols / 16)]. */
inline uint8_t *nvfp4_square_scales(const View *v, int64_t rows, int64_t cols)
{
    return (uint8_t *)v->data + nvfp4_copy_bytes(rows, cols) + nvfp4_copy_bytes(cols, rows);
}

#endif
