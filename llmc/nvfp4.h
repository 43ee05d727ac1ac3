/* NVFP4: 4-bit values with scales on two levels, and the quantizer that defines them bit by bit.
 *
 * A number is e2m1 x block scale x tensor scale:
 *
 *     one row, 32 values      | x0 x1 x2 ............ x15 | x16 x17 ............. x31 |
 *     E2M1 codes, 4 bits      | c1c0 c3c2 ...  8 bytes    | ...           8 bytes    |   even column: low nibble
 *     E4M3 block scale        |        s0, 1 byte         |        s1, 1 byte         |   one per 16 values
 *     FP32 tensor scale       |              one for the whole tensor                 |
 *
 * That is 4.5 bits a value. E2M1 has the 8 magnitudes 0 .5 1 1.5 2 3 4 6, so a block is scaled to put its largest value
 * near 6; the E4M3 scale that says how much reaches 448, so the tensor is scaled to put the largest block at 448: the
 * largest value of the tensor lands on 6 x 448 = 2688. With amax the largest magnitude of the tensor, amax_b of a block,
 * and fl() one rounding to FP32:
 *
 *     S_enc = min(fl(2688 / amax), FLT_MAX)            tensor encode scale; 1 when amax is 0 or Inf
 *     S_dec = fl(1 / S_enc)
 *     s_b   = e4m3(fl(amax_b x fl(S_enc x fl(1/6))))   block scale
 *     enc_b = min(fl(1 / fl(s_b x S_dec)), FLT_MAX)    what the block's values are multiplied with
 *     code  = e2m1(fl(x enc_b))                        to nearest even, or stochastically
 *     value = fl(fl(s_b x amax) x fl(1/2688)) x e2m1   going back
 *
 * Worked: a tensor of amax 2 and a block with amax_b 0.5. S_enc = 1344. s_b = e4m3(0.5 x 224) = 112 (exact). enc_b = 1344 /
 * 112 = 12: 0.5 becomes 6 (code 7), 0.3 becomes 3.6, between 3 and 4, nearest 4 (code 6). Going back, 0.3 is
 * 112 x 2/2688 x 4 = 0.333.
 *
 * Consequences, each tested: a block of zeros has scale 0 and codes of value 0, without a special case. A block below
 * 2^-10/448 of the tensor's amax has scale 0: its value is 0 whatever its codes. Rounding s_b down by up to 1/17 makes
 * x enc_b reach 6.375, which saturates (`headroom` 17/16 makes room, in blocks of normal scale). -0 keeps its sign. Short
 * last blocks are padded with zeros, which reach no amax. NaN reaches no amax either and becomes code +6; so that it does
 * not vanish, what is stored as the tensor's scale is then NaN, and with it every product. Inf makes the stored amax Inf;
 * with power-of-two scales, where it would hide as FLT_MAX, NaN too. An amax below 2688 / FLT_MAX = 7.9e-36 cuts S_enc off
 * and values come back too small; one above FLT_MAX / 448 = 7.6e35 comes back as Inf. No tensor of a training run is near
 * either.
 *
 * Variants: blocks of 16 x 16 for weights, so that the transposed matrix has the same codes and scales; 4/6 (Cook et al.
 * 2512.02010), which scales a block to 6 or to 4, whichever errs less; power-of-two tensor scales, S_enc = 2^e, where
 * enc_b comes from amax_b / 6 rounded to 4 significant bits, so that codes do not depend on the rest of the tensor; the
 * random Hadamard transform before quantization.
 *
 * Sources: the format and the order of roundings are those of NVIDIA's TransformerEngine (reference_nvfp4.py and its
 * CUDA kernels at commit d0067d0) for arXiv 2509.25149; stochastic rounding and the transform's order are ours.
 * Floor 0; the functions for one block run on the device too.
 */
#ifndef LLMC_NVFP4_H
#define LLMC_NVFP4_H

#include "common.h"
#include "numerics.h"
#include "philox.h"

typedef enum { ROUND_NEAREST, ROUND_STOCHASTIC } Rounding;
typedef enum { SCALE_1X16, SCALE_16X16 } ScaleBlock;
typedef enum { TENSOR_SCALE_AMAX, TENSOR_SCALE_POW2 } TensorScaleMode;
typedef enum { FOUR_OVER_SIX_OFF, FOUR_OVER_SIX_MAE, FOUR_OVER_SIX_MSE } FourOverSix; /* and how errors are summed */

typedef struct { /* how a tensor is quantized */
    Rounding rounding;
    ScaleBlock block;
    TensorScaleMode tensor_scale;
    FourOverSix four_over_six; /* with nearest rounding and amax scales only */
    float headroom;            /* 1, or 17/16: every amax is taken as so much larger */
} Nvfp4Form;

enum { NVFP4_BLOCK = 16 };
#define NVFP4_FLT_MAX 0x1.fffffep127f

/* ---- the tensor's scale ---- */

/* Largest block scale aimed at. 4/6 leaves room for a factor 1.5 above it. */
LLMC_INLINE float nvfp4_bound(const Nvfp4Form *form) { return form->four_over_six ? 256.0f : 448.0f; }

typedef struct {      /* what is the same for all blocks of a tensor */
    float amax;       /* after headroom */
    float encode;     /* S_enc */
    float decode;     /* S_dec */
    float multiplier; /* fl(S_enc x fl(1/6)) */
    float stored;     /* what is kept beside the codes and makes alpha: amax, or S_dec in pow2 mode; NaN when the tensor
                         holds NaN (or, in pow2 mode, Inf, which amax shows by itself) */
} Nvfp4Scale;

/* S_enc = 2^e, the largest e with 2^e amax <= 2688; e <= 126, so that S_dec is normal. Inf is taken as FLT_MAX: then
 * blocks far below the largest have scale 0 whatever the rest of the tensor holds, and a pass that learns of Inf late
 * can keep few bits of scales. */
LLMC_INLINE float nvfp4_pow2_encode(float amax)
{
    amax = f32_min(amax, NVFP4_FLT_MAX);
    int exponent = (int)(f32_bits(amax) >> 23) - 127, mantissa_fits = (f32_bits(amax) & 0x7fffff) <= 0x280000;
    int e = 10 + mantissa_fits - exponent; /* 2688 = 1.3125 x 2^11 */
    return f32_from_bits((uint32_t)((e < 126 ? e : 126) + 127) << 23);
}

/* amax of the whole tensor, before headroom, NaN passed over; has_nan: there was one. */
LLMC_INLINE Nvfp4Scale nvfp4_scale(float amax, bool has_nan, const Nvfp4Form *form)
{
    Nvfp4Scale s;
    s.amax = f32_mul(amax, form->headroom);
    s.encode = f32_min(f32_div(f32_mul(6.0f, nvfp4_bound(form)), s.amax), NVFP4_FLT_MAX);
    if (s.amax > NVFP4_FLT_MAX) s.encode = 1.0f;
    if (form->tensor_scale == TENSOR_SCALE_POW2) s.encode = nvfp4_pow2_encode(s.amax);
    if (s.amax == 0) s.encode = 1.0f;
    s.decode = f32_div(1.0f, s.encode);
    s.multiplier = f32_mul(s.encode, f32_div(1.0f, 6.0f));
    s.stored = form->tensor_scale == TENSOR_SCALE_POW2 ? s.decode : s.amax;
    if (has_nan || (form->tensor_scale == TENSOR_SCALE_POW2 && s.amax > NVFP4_FLT_MAX))
        s.stored = f32_from_bits(0x7fc00000u);
    return s;
}

/* The factor on a sum of code x block scale products of two operands, from what is stored beside each. */
LLMC_INLINE float nvfp4_alpha(float stored_a, const Nvfp4Form *a, float stored_b, const Nvfp4Form *b)
{
    float product = f32_mul(stored_a, stored_b);
    if (a->tensor_scale == TENSOR_SCALE_POW2) return product;
    return f32_mul(product, f32_div(1.0f, f32_mul(f32_mul(36.0f, nvfp4_bound(a)), nvfp4_bound(b))));
}

/* The factor on e2m1 of one block. */
LLMC_INLINE float nvfp4_decode_scale(uint8_t block_scale, float stored, const Nvfp4Form *form)
{
    float scaled = f32_mul(e4m3_to_f32(block_scale), stored);
    if (form->tensor_scale == TENSOR_SCALE_POW2) return scaled;
    return f32_mul(scaled, f32_div(1.0f, f32_mul(6.0f, nvfp4_bound(form))));
}

/* ---- one block ---- */

LLMC_INLINE float nvfp4_encode_block(uint8_t block_scale, float decode)
{
    return f32_min(f32_div(1.0f, f32_mul(e4m3_to_f32(block_scale), decode)), NVFP4_FLT_MAX);
}

/* The block's scale, and in *encode the factor on its values. In pow2 mode the factor comes from the scale rounded to 4
 * significant bits, before the tensor's scale: so the codes need no second look at the values. */
LLMC_INLINE uint8_t nvfp4_block_scale(float block_amax, const Nvfp4Scale *tensor, const Nvfp4Form *form, float *encode)
{
    float amax = f32_mul(block_amax, form->headroom);
    if (form->tensor_scale == TENSOR_SCALE_POW2) {
        uint32_t bits = f32_bits(f32_min(f32_mul(amax, f32_div(1.0f, 6.0f)), 0x1.ep127f));
        float rounded = f32_from_bits((bits + 0x7ffffu + (bits >> 20 & 1)) & 0xfff00000u);
        *encode = f32_min(f32_div(1.0f, rounded), NVFP4_FLT_MAX);
        return e4m3_from_f32(f32_mul(rounded, tensor->encode));
    }
    uint8_t scale = e4m3_from_f32(f32_min(f32_mul(amax, tensor->multiplier), NVFP4_FLT_MAX));
    *encode = nvfp4_encode_block(scale, tensor->decode);
    return scale;
}

/* 4/6: the scales that map the block's amax to 6 and to 4. Another order than nvfp4_block_scale: TransformerEngine's. */
LLMC_INLINE void nvfp4_scales_4_6(float block_amax, const Nvfp4Scale *tensor, uint8_t *six, uint8_t *four)
{
    float base = f32_mul(f32_div(block_amax, 6.0f), tensor->encode);
    *six = e4m3_from_f32(f32_min(base, 448.0f));
    *four = e4m3_from_f32(f32_min(f32_mul(base, 1.5f), 448.0f));
}

/* 4/6: the error of one value under one of the two scales. */
LLMC_INLINE float nvfp4_error_4_6(float x, uint8_t code, uint8_t block_scale, const Nvfp4Scale *tensor,
                                  FourOverSix kind)
{
    float value = f32_div(f32_mul(f32_mul(e2m1_to_f32(code), e4m3_to_f32(block_scale)), tensor->amax), 6.0f * 256.0f);
    float d = f32_sub(value, x);
    return kind == FOUR_OVER_SIX_MSE ? f32_mul(d, d) : f32_abs(d);
}

/* The random byte of element i of a block: one Philox call is one block. */
LLMC_INLINE uint32_t nvfp4_random8(const Philox *draw, int i) { return draw->word[i / 4] >> 8 * (i % 4) & 0xff; }

/* ---- the random Hadamard transform over 16 values ---- */

/* Bit i set: sign i is negative. The signs of TransformerEngine, the same for every layer and step. */
enum { NVFP4_RHT_SIGNS = 0xD7E8 };

/* x = x diag(signs) H16 / 4, rounded to BF16. The factor comes first, so that values below FLT_MAX / 4 stay finite; then
 * the butterfly in stages 1, 2, 4, 8, each (a + b, a - b). Orthogonal: applied to both operands of a product it changes the
 * product by roundings only. */
LLMC_INLINE void nvfp4_rht16(float x[16])
{
    for (int i = 0; i < 16; i++) x[i] = f32_mul(x[i], NVFP4_RHT_SIGNS >> i & 1 ? -0.25f : 0.25f);
    for (int stride = 1; stride < 16; stride *= 2)
        for (int i = 0; i < 16; i++) {
            if (i & stride) continue;
            float a = x[i], b = x[i + stride];
            x[i] = f32_add(a, b);
            x[i + stride] = f32_sub(a, b);
        }
    for (int i = 0; i < 16; i++) x[i] = bf16_to_f32(bf16_from_f32(x[i]));
}

/* ---- block scales as the tensor cores read them ---- */

/* Tiles of 128 rows x 4 block columns, 512 bytes each, along a row first; within a tile row r, block column c is byte
 * (r % 32) x 16 + (r / 32) x 4 + c (cuBLAS documentation, "1D block scaling factors layout"). */
LLMC_INLINE size_t nvfp4_tile_offset(int64_t row, int64_t block, int64_t blocks)
{
    int64_t tile = row / 128 * ((blocks + 3) / 4) + block / 4, r = row % 128;
    return (size_t)(tile * 512 + r % 32 * 16 + r / 32 * 4 + block % 4);
}

LLMC_INLINE size_t nvfp4_tile_bytes(int64_t rows, int64_t blocks)
{
    return (size_t)((rows + 127) / 128 * ((blocks + 3) / 4) * 512);
}

/* tiles [nvfp4_tile_bytes] from scales [rows][blocks]; bytes beyond the matrix are zero. Host. */
static inline void nvfp4_tile_scales(uint8_t *tiles, const uint8_t *scales, int64_t rows, int64_t blocks)
{
    memset(tiles, 0, nvfp4_tile_bytes(rows, blocks));
    for (int64_t r = 0; r < rows; r++)
        for (int64_t b = 0; b < blocks; b++) tiles[nvfp4_tile_offset(r, b, blocks)] = scales[r * blocks + b];
}

/* ---- the reference quantizer: one tensor, plain loops. Host. ---- */

typedef struct { /* where rounding bits come from: Philox fields; row and block column count from row0, block0 */
    uint64_t seed;
    uint32_t step, layer, role, row0, block0;
} Nvfp4Place;

/* Rows r0 .. r0 + height - 1 of one block column, as 16 x 16 with zeros outside. */
static inline void nvfp4_load_block(float x[16][16], const float *data, int64_t rows, int64_t cols, int64_t r0,
                                    int64_t height, int64_t c0)
{
    for (int64_t r = 0; r < 16; r++)
        for (int64_t c = 0; c < 16; c++)
            x[r][c] = r < height && r0 + r < rows && c0 + c < cols ? data[(r0 + r) * cols + c0 + c] : 0.0f;
}

/* Codes under one scale, and the sum of their errors: each row from left to right, rows as a tree. */
static inline float nvfp4_try_4_6(uint8_t code[16][16], const float x[16][16], int64_t height, uint8_t scale,
                                  const Nvfp4Scale *tensor, FourOverSix kind)
{
    float encode = nvfp4_encode_block(scale, tensor->decode), sum[16] = {0};
    for (int64_t r = 0; r < height; r++)
        for (int c = 0; c < 16; c++) {
            code[r][c] = e2m1_from_f32(f32_mul(x[r][c], encode));
            sum[r] = f32_add(sum[r], nvfp4_error_4_6(x[r][c], code[r][c], scale, tensor, kind));
        }
    if (height == 1) return sum[0];
    for (int width = 8; width; width /= 2)
        for (int r = 0; r < width; r++) sum[r] = f32_add(sum[r], sum[r + width]);
    return sum[0];
}

/* One block of 1 or 16 rows. Returns its scale. */
static inline uint8_t nvfp4_quantize_block(uint8_t code[16][16], const float x[16][16], int64_t height,
                                           const Nvfp4Scale *tensor, const Nvfp4Form *form, const Nvfp4Place *place,
                                           int64_t row, int64_t block)
{
    float amax = 0, encode;
    uint8_t scale, other_code[16][16], four;
    for (int64_t r = 0; r < height; r++)
        for (int c = 0; c < 16; c++) amax = f32_max(f32_abs(x[r][c]), amax);

    if (form->four_over_six) {
        nvfp4_scales_4_6(amax, tensor, &scale, &four);
        float error = nvfp4_try_4_6(code, x, height, scale, tensor, form->four_over_six);
        if (!(nvfp4_try_4_6(other_code, x, height, four, tensor, form->four_over_six) < error)) return scale;
        memcpy(code, other_code, (size_t)height * 16);
        return four;
    }
    scale = nvfp4_block_scale(amax, tensor, form, &encode);
    for (int64_t r = 0; r < height; r++) {
        Philox draw = {{0}};
        if (form->rounding == ROUND_STOCHASTIC)
            draw = philox_draw(place->seed, place->row0 + (uint32_t)(row + r), place->block0 + (uint32_t)block,
                               place->step, place->layer, place->role, 0);
        for (int c = 0; c < 16; c++) {
            float y = f32_mul(x[r][c], encode);
            code[r][c] = form->rounding == ROUND_STOCHASTIC ? e2m1_from_f32_stochastic(y, nvfp4_random8(&draw, c))
                                                            : e2m1_from_f32(y);
        }
    }
    return scale;
}

/* Largest magnitude; NaN is passed over, and told in *has_nan where that is asked for. */
static inline float nvfp4_amax(const float *x, int64_t n, bool *has_nan)
{
    float amax = 0;
    bool nan = false;
    for (int64_t i = 0; i < n; i++) {
        amax = f32_max(f32_abs(x[i]), amax);
        nan |= x[i] != x[i];
    }
    if (has_nan) *has_nan = nan;
    return amax;
}

/* x [rows, cols] -> codes [rows, cols], one a byte, and block scales [rows, ceil(cols / 16)]; with 16 x 16 blocks the
 * scale is repeated on its 16 rows. place may be NULL when rounding to nearest. Returns the tensor's scale. */
static inline Nvfp4Scale nvfp4_quantize(uint8_t *codes, uint8_t *scales, const float *x, int64_t rows, int64_t cols,
                                        const Nvfp4Form *form, const Nvfp4Place *place)
{
    int64_t blocks = ceil_div(cols, 16), height = form->block == SCALE_16X16 ? 16 : 1;
    bool has_nan;
    float amax = nvfp4_amax(x, rows * cols, &has_nan);
    Nvfp4Scale tensor = nvfp4_scale(amax, has_nan, form);
    for (int64_t r0 = 0; r0 < rows; r0 += height)
        for (int64_t b = 0; b < blocks; b++) {
            float block[16][16];
            uint8_t code[16][16];
            nvfp4_load_block(block, x, rows, cols, r0, height, 16 * b);
            uint8_t scale = nvfp4_quantize_block(code, (const float(*)[16])block, height, &tensor, form, place, r0, b);
            for (int64_t r = 0; r < min_i64(height, rows - r0); r++) {
                scales[(r0 + r) * blocks + b] = scale;
                memcpy(codes + (r0 + r) * cols + 16 * b, code[r], (size_t)min_i64(16, cols - 16 * b));
            }
        }
    return tensor;
}

/* Two codes a byte, even column in the low nibble: packed [rows, ceil(cols / 2)]. */
static inline void nvfp4_pack(uint8_t *packed, const uint8_t *codes, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c += 2)
            packed[r * ceil_div(cols, 2) + c / 2] = (uint8_t)(codes[r * cols + c] |
                                                              (c + 1 < cols ? codes[r * cols + c + 1] << 4 : 0));
}

static inline void nvfp4_dequantize(float *x, const uint8_t *codes, const uint8_t *scales, float stored, int64_t rows,
                                    int64_t cols, const Nvfp4Form *form)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            x[r * cols + c] = f32_mul(e2m1_to_f32(codes[r * cols + c]),
                                      nvfp4_decode_scale(scales[r * ceil_div(cols, 16) + c / 16], stored, form));
}

#endif
