/* Quantizing an operand's views to NVFP4, 256 values at a time: the bits of the reference quantizer (nvfp4.h).
 *
 * A tile is 16 rows x 16 columns of the source in 16 registers. Lanes are columns when it is loaded, which is what a
 * column view wants: a block is 16 rows of one column, so 16 blocks are quantized at once, one a lane, and the Hadamard
 * transform is adds and subtracts between registers. Transposed, lanes are rows, and the same code makes 16 blocks of
 * the row view. So one read of the source serves both.
 *
 * The tensor's scale must be known first: with amax scales a first pass over the source takes the largest magnitude
 * (after the transform, for a column view). With pow2 scales codes do not depend on it, so one pass over the source does
 * everything but the block scales, which wait in 16 bits each (4 significant bits and an exponent) and are turned into
 * E4M3 at the end.
 *
 * Blocks of a row view stand by rows; those of a column view by groups of 16 rows, so that a tile is written to 128
 * consecutive bytes.
 */
#include "cpu.h"
#include "simd_int.h"

typedef struct {
    View *view;
    const ViewFormat *format;
    bool col;
    int64_t rows, cols; /* of the source */
    int64_t row_blocks; /* blocks of one row (row view), or of one group of 16 rows (column view) */
    int64_t scales;     /* of the whole view */
    Nvfp4Scale scale;
    uint64_t seed;
    int64_t row0;         /* of the first row, in the global batch */
    uint32_t step, place; /* Philox: step, layer and role */
    uint16_t *pending;    /* block scales that wait for the tensor's; NULL: it is known */
} Quantizer;

/* ---- 16 numbers at once ---- */

/* E4M3 of non-negative values, saturating: the byte, and its value in *value. A value is rounded where its unit is: adding
 * 1.5 x 2^(e + 20) leaves 3 bits below the leading one; below 2^-6 the unit stays 2^-9. */
static inline v16u e4m3_nearest(v16 x, v16 *value)
{
    x = v16_min(x, v16_set1(448.0f));
    v16u exponent = v16u_max(v16u_and(v16u_bits(x), v16u_set1(0x7f800000)), v16u_set1(121u << 23));
    v16u magic = v16u_add(exponent, v16u_set1((20u << 23) + 0x400000));
    v16 sum = v16_add(x, v16_of_bits(magic));
    *value = v16_sub(sum, v16_of_bits(magic));
    v16u units = v16u_sub(v16u_bits(sum), magic);
    return v16u_add(units, v16u_sub(v16u_right(exponent, 20), v16u_set1(121u << 3)));
}

/* y within [-6, 6], its sign kept; NaN is +6. */
static inline v16 saturate(v16 y) { return v16_max(v16_min(y, v16_set1(6.0f)), v16_set1(-6.0f)); }

static inline v16u e2m1_exponent(v16 magnitude)
{
    return v16u_max(v16u_and(v16u_bits(magnitude), v16u_set1(0x7f800000)), v16u_set1(127u << 23));
}

static inline v16u e2m1_code(v16u units, v16u exponent, v16 sign)
{
    v16u code = v16u_add(units, v16u_sub(v16u_right(exponent, 22), v16u_set1(254)));
    return v16u_or(code, v16u_and(v16u_right(v16u_bits(sign), 28), v16u_set1(8)));
}

static inline v16u e2m1_nearest(v16 y, v16 *value)
{
    y = saturate(y);
    v16 a = v16_abs(y);
    v16u exponent = e2m1_exponent(a), magic = v16u_add(exponent, v16u_set1((22u << 23) + 0x400000));
    v16 sum = v16_add(a, v16_of_bits(magic));
    if (value) *value = v16_copysign(v16_sub(sum, v16_of_bits(magic)), y);
    return e2m1_code(v16u_sub(v16u_bits(sum), magic), exponent, y);
}

static inline v16u e2m1_stochastic(v16 y, v16u random8)
{
    y = saturate(y);
    v16 a = v16_abs(y);
    v16u exponent = e2m1_exponent(a);
    v16 to_256ths = v16_of_bits(v16u_sub(v16u_set1((254u + 9u) << 23), exponent)); /* 2^(9 - e): 256 a unit */
    v16u units = v16u_right(v16u_add(v16u_truncate(v16_mul(a, to_256ths)), random8), 8);
    return e2m1_code(units, exponent, y);
}

/* ---- 16 blocks at once: x[i] holds element i of each ---- */

typedef struct {
    v16u low, high; /* codes of elements 0..7 and 8..15, 4 bits each */
    v16u scale;     /* E4M3 bytes, or the upper halves of scales that wait */
} Blocks;

static inline v16 encode_scale(v16 block_scale, float decode)
{
    v16 inverse = v16_div(v16_set1(1), v16_mul(block_scale, v16_set1(decode)));
    return v16_min(inverse, v16_set1(NVFP4_FLT_MAX));
}

static inline v16 block_scale(const Quantizer *q, v16 amax, v16u *scale)
{
    v16 value;
    amax = v16_mul(amax, v16_set1(q->format->nvfp4.headroom));
    if (q->format->nvfp4.tensor_scale == TENSOR_SCALE_AMAX) {
        *scale = e4m3_nearest(v16_mul(amax, v16_set1(q->scale.multiplier)), &value);
        return encode_scale(value, q->scale.decode);
    }
    v16u bits = v16u_bits(v16_min(v16_mul(amax, v16_set1(1.0f / 6.0f)), v16_set1(0x1.ep127f)));
    bits = v16u_add(v16u_add(bits, v16u_set1(0x7ffff)), v16u_and(v16u_right(bits, 20), v16u_set1(1)));
    v16 rounded = v16_of_bits(v16u_and(bits, v16u_set1(0xfff00000)));
    *scale = q->pending ? v16u_right(v16u_bits(rounded), 16)
                        : e4m3_nearest(v16_mul(rounded, v16_set1(q->scale.encode)), &value);
    return encode_scale(rounded, 1.0f);
}

/* Code i of every block. */
static inline void put_code(Blocks *b, int i, v16u code)
{
    v16u *half = i < 8 ? &b->low : &b->high, shifted = v16u_left(code, 4 * (i % 8));
    *half = i % 8 ? v16u_or(*half, shifted) : shifted;
}

static inline void encode_nearest(Blocks *b, const v16 x[16], v16 encode)
{
    UNROLL for (int i = 0; i < 16; i++) put_code(b, i, e2m1_nearest(v16_mul(x[i], encode), NULL));
}

static inline void encode_stochastic(Blocks *b, const v16 x[16], v16 encode, const v16u random[4])
{
    UNROLL for (int i = 0; i < 16; i++)
    {
        v16u random8 = v16u_and(v16u_right(random[i / 4], 8 * (i % 4)), v16u_set1(0xff));
        put_code(b, i, e2m1_stochastic(v16_mul(x[i], encode), random8));
    }
}

/* 4/6: codes under one scale and the sums of their errors, from element 0 to 15. */
static v16 try_4_6(const Quantizer *q, Blocks *b, const v16 x[16], v16 scale_to)
{
    v16 value, scale, sum = v16_set1(0);
    b->scale = e4m3_nearest(scale_to, &scale);
    v16 encode = encode_scale(scale, q->scale.decode), amax = v16_set1(q->scale.amax), unit = v16_set1(6.0f * 256.0f);
    UNROLL for (int i = 0; i < 16; i++)
    {
        put_code(b, i, e2m1_nearest(v16_mul(x[i], encode), &value));
        v16 error = v16_sub(v16_div(v16_mul(v16_mul(value, scale), amax), unit), x[i]);
        sum = v16_add(sum,
                      q->format->nvfp4.four_over_six == FOUR_OVER_SIX_MSE ? v16_mul(error, error) : v16_abs(error));
    }
    return sum;
}

static inline v16u select_less(v16 a, v16 b, v16u yes, v16u no)
{
    return v16u_bits(v16_less_select(a, b, v16_of_bits(yes), v16_of_bits(no)));
}

static void quantize_4_6(const Quantizer *q, Blocks *six, const v16 x[16], v16 amax)
{
    Blocks four;
    v16 base = v16_mul(v16_div(amax, v16_set1(6)), v16_set1(q->scale.encode));
    v16 error6 = try_4_6(q, six, x, base), error4 = try_4_6(q, &four, x, v16_mul(base, v16_set1(1.5f)));
    if (q->format->nvfp4.block == SCALE_16X16) { /* one choice for 16 rows */
        error6 = v16_set1(v16_sum(error6));
        error4 = v16_set1(v16_sum(error4));
    }
    six->low = select_less(error4, error6, four.low, six->low);
    six->high = select_less(error4, error6, four.high, six->high);
    six->scale = select_less(error4, error6, four.scale, six->scale);
}

/* row: Philox row of lane 0; the other lanes follow. */
static inline void quantize_blocks(const Quantizer *q, Blocks *b, const v16 x[16], v16 amax, uint32_t row,
                                   uint32_t block)
{
    static const uint32_t LANES[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    if (q->format->nvfp4.four_over_six) {
        quantize_4_6(q, b, x, amax);
        return;
    }
    v16 encode = block_scale(q, amax, &b->scale);
    if (q->format->nvfp4.rounding == ROUND_NEAREST) {
        encode_nearest(b, x, encode);
        return;
    }
    v16u draw[4] = {v16u_add(v16u_load(LANES), v16u_set1(row)), v16u_set1(block), v16u_set1(q->step),
                    v16u_set1(q->place)};
    v16u_philox(draw, q->seed);
    encode_stochastic(b, x, encode, draw);
}

/* ---- tiles ---- */

/* Rows r0.., columns c0.. of the source in BF16; zeros outside. */
static inline void load_tile(v16 x[16], Tensor src, int64_t r0, int64_t c0)
{
    for (int64_t r = 0; r < 16; r++) {
        x[r] = v16_set1(0);
        if (r0 + r < src.rows) x[r] = v16_load_row(row_of(src, r0 + r), src.dtype, c0, src.cols, 0);
        if (src.dtype != DTYPE_BF16) x[r] = v16_round_to(DTYPE_BF16, x[r]);
    }
}

/* Largest magnitude of each lane; NaN is passed over. */
static inline v16 tile_amax(const v16 x[16])
{
    v16 amax = v16_set1(0);
    UNROLL for (int i = 0; i < 16; i++) amax = v16_max(v16_abs(x[i]), amax);
    return amax;
}

static inline void tile_rht(v16 x[16])
{
    UNROLL for (int i = 0; i < 16; i++) x[i] = v16_mul(x[i], v16_set1(NVFP4_RHT_SIGNS >> i & 1 ? -0.25f : 0.25f));
    UNROLL for (int stage = 0; stage < 4; stage++) UNROLL for (int i = 0; i < 16; i++)
    {
        int stride = 1 << stage;
        if (i & stride) continue;
        v16 a = x[i], b = x[i + stride];
        x[i] = v16_add(a, b);
        x[i + stride] = v16_sub(a, b);
    }
    UNROLL for (int i = 0; i < 16; i++) x[i] = v16_round_bf16(x[i]);
}

static inline void store_scales(const Quantizer *q, int64_t at, const uint32_t scale[16], int64_t stride, int64_t count)
{
    for (int64_t i = 0; i < count; i++, at += stride) {
        if (q->pending)
            q->pending[at] = (uint16_t)scale[i];
        else
            q->view->block_scale[at] = (uint8_t)scale[i];
    }
}

/* A tile's blocks at rows r0.., columns c0..: one after the other in a column view, one a row in a row view, where 16 x 16
 * blocks have one scale. */
static inline void store_blocks(const Quantizer *q, const Blocks *b, int64_t r0, int64_t c0)
{
    int64_t block = q->col ? r0 / 16 * q->row_blocks + c0 : r0 * q->row_blocks + c0 / 16;
    int64_t stride = q->col ? 1 : q->row_blocks, count = min_i64(16, q->col ? q->cols - c0 : q->rows - r0);
    uint8_t *codes = q->view->data;
    uint32_t scale[16];
    char pairs[128];
    if (q->col && count == 16 && !q->pending) {
        v16u_store_pairs(codes + 8 * block, b->low, b->high);
        v16u_store_bytes(q->view->block_scale + block, b->scale);
        return;
    }
    v16u_store_pairs(pairs, b->low, b->high);
    for (int64_t i = 0; i < count; i++) memcpy(codes + 8 * (block + i * stride), pairs + 8 * i, 8);
    v16u_store(scale, b->scale);
    if (q->format->nvfp4.block == SCALE_16X16)
        store_scales(q, r0 / 16 * q->row_blocks + c0 / 16, scale, 1, 1);
    else
        store_scales(q, block, scale, stride, count);
}

/* What a thread has seen of one view: in each lane the largest magnitude, NaN passed over, and the largest bits of any. */
typedef struct {
    v16 amax;
    v16u bits;
} Seen;

/* Returns the largest magnitude of each lane. */
static inline v16 look(Seen *seen, const v16 x[16])
{
    v16 amax = tile_amax(x);
    seen->amax = v16_max(amax, seen->amax);
    UNROLL for (int i = 0; i < 16; i++) seen->bits = v16u_max(v16u_bits(v16_abs(x[i])), seen->bits);
    return amax;
}

/* One view's part of a tile: looks at it, and with `encode` quantizes it. */
static inline void do_tile(const Quantizer *q, Seen *seen, const v16 tile[16], int64_t r0, int64_t c0, bool encode)
{
    v16 x[16];
    Blocks b;
    memcpy(x, tile, sizeof x);
    if (q->format->rht) tile_rht(x);
    if (encode && !q->col) v16_transpose(x);
    v16 amax = look(seen, x);
    if (!encode) return;
    if (q->format->nvfp4.block == SCALE_16X16) amax = v16_set1(v16_largest(amax));
    if (q->col)
        quantize_blocks(q, &b, x, amax, (uint32_t)c0, (uint32_t)((q->row0 + r0) / 16));
    else
        quantize_blocks(q, &b, x, amax, (uint32_t)(q->row0 + r0), (uint32_t)(c0 / 16));
    store_blocks(q, &b, r0, c0);
}

/* ---- a whole operand ---- */

typedef struct { /* of one view, after its transform */
    float amax;  /* NaN passed over */
    int has_nan;
} Magnitude;

static void add_seen(Magnitude *m, const Seen *seen)
{
    uint32_t bits[16];
    float amax = v16_largest(seen->amax);
    v16u_store(bits, seen->bits);
    m->amax = amax > m->amax ? amax : m->amax;
    for (int i = 0; i < 16; i++) m->has_nan |= bits[i] > 0x7f800000u;
}

/* One pass over the source: the magnitudes of every view, and with `encode` its codes and block scales. */
static void do_source(const Quantizer *q, int count, Tensor src, bool encode, Magnitude m[2])
{
    Magnitude all[2] = {{0, 0}, {0, 0}};
#pragma omp parallel num_threads(cpu.threads)
    {
        Magnitude own[2] = {{0, 0}, {0, 0}};
#pragma omp for schedule(static)
        for (int64_t r0 = 0; r0 < src.rows; r0 += 16) {
            v16 tile[16];
            Seen seen[2] = {{v16_set1(0), v16u_set1(0)}, {v16_set1(0), v16u_set1(0)}};
            for (int64_t c0 = 0; c0 < src.cols; c0 += 16) {
                load_tile(tile, src, r0, c0);
                for (int i = 0; i < count; i++) do_tile(&q[i], &seen[i], tile, r0, c0, encode);
            }
            for (int i = 0; i < count; i++) add_seen(&own[i], &seen[i]);
        }
#pragma omp critical
        for (int i = 0; i < count; i++) {
            all[i].amax = own[i].amax > all[i].amax ? own[i].amax : all[i].amax;
            all[i].has_nan |= own[i].has_nan;
        }
    }
    memcpy(m, all, sizeof all);
}

/* The block scales that waited, in E4M3. */
static void finish_pending(const Quantizer *q)
{
    int64_t blocks = q->scales;
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t b = 0; b < blocks; b += 16) {
        v16 value, rounded = v16_load_row(q->pending, DTYPE_BF16, b, blocks, 0);
        uint32_t scale[16];
        v16u_store(scale, e4m3_nearest(v16_mul(rounded, v16_set1(q->scale.encode)), &value));
        for (int64_t i = 0; i < min_i64(16, blocks - b); i++) q->view->block_scale[b + i] = (uint8_t)scale[i];
    }
}

/* ---- what quantization did, for telemetry: plain loops over the reference ---- */

static void measure_block(QuantStats *s, const Quantizer *q, int64_t block, uint8_t scale, const float x[16], int64_t n,
                          float amax)
{
    const Nvfp4Form *form = &q->format->nvfp4;
    const uint8_t *codes = (const uint8_t *)q->view->data + 8 * block;
    float encode, decode = nvfp4_decode_scale(scale, q->scale.stored, form);
    nvfp4_block_scale(amax, &q->scale, form, &encode);
    if (form->four_over_six) encode = nvfp4_encode_block(scale, q->scale.decode);
    s->blocks++;
    s->zero_blocks += scale == 0;
    for (int64_t i = 0; i < n; i++) {
        float after = f32_mul(e2m1_to_f32(codes[i / 2] >> 4 * (i % 2) & 15), decode);
        double d = (double)after - (double)x[i];
        s->elements++;
        s->zeroed += x[i] != 0 && after == 0;
        s->clipped += f32_abs(f32_mul(x[i], encode)) > 6.0f;
        s->error2 += d * d;
        s->signal2 += (double)x[i] * (double)x[i];
    }
}

static void measure_tile(QuantStats *s, const Quantizer *q, Tensor src, int64_t r0, int64_t c0)
{
    float x[16][16], amax[16], most;
    v16 tile[16];
    int64_t rows = min_i64(16, src.rows - r0), cols = min_i64(16, src.cols - c0);
    load_tile(tile, src, r0, c0);
    if (q->format->rht) tile_rht(tile);
    if (!q->col) v16_transpose(tile);
    v16_store(amax, tile_amax(tile));
    most = v16_largest(tile_amax(tile));
    v16_transpose(tile); /* now x[block][element] */
    for (int i = 0; i < 16; i++) v16_store(x[i], tile[i]);
    int64_t blocks = q->col ? cols : rows, elements = q->col ? rows : cols;
    bool square = q->format->nvfp4.block == SCALE_16X16;
    for (int64_t i = 0; i < blocks; i++) {
        int64_t block = q->col ? r0 / 16 * q->row_blocks + c0 + i : (r0 + i) * q->row_blocks + c0 / 16;
        uint8_t scale = q->view->block_scale[square ? r0 / 16 * q->row_blocks + c0 / 16 : block];
        measure_block(s, q, block, scale, x[i], elements, square ? most : amax[i]);
    }
}

static void measure(const Quantizer *q, Tensor src, int layer)
{
    QuantStats *sum = &cpu.measure[layer * OPERAND_ROLES + q->format->role - ROLE_OPERAND];
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r0 = 0; r0 < src.rows; r0 += 16) {
        QuantStats *s = &cpu.tile_stats[r0 / 16];
        *s = (QuantStats){0};
        for (int64_t c0 = 0; c0 < src.cols; c0 += 16) measure_tile(s, q, src, r0, c0);
    }
    for (int64_t t = 0; t < ceil_div(src.rows, 16); t++) quant_stats_add(sum, &cpu.tile_stats[t]);
}

/* The views to make, as quantizers; returns their count. */
static int quantizers(Quantizer q[2], Operand *o, unsigned views)
{
    int count = 0;
    uint16_t *pending = cpu.pending_scales;
    if (views & VIEW_COL && views_are_one(&o->row.format, &o->col.format)) views = VIEW_ROW; /* which is both */
    for (int col = 0; col < 2; col++) {
        View *view = col ? &o->col : &o->row;
        if (!(views & (col ? VIEW_COL : VIEW_ROW)) || view->format.format != FORMAT_NVFP4) continue;
        Quantizer *next = &q[count++];
        *next = (Quantizer){.view = view,
                            .format = &view->format,
                            .col = col,
                            .rows = o->rows,
                            .cols = o->cols,
                            .row_blocks = col ? o->cols : ceil_div(o->cols, 16),
                            .place = (uint32_t)o->layer << 16 | (uint32_t)view->format.role << 8};
        bool by_group = col || view->format.nvfp4.block == SCALE_16X16;
        next->scales = next->row_blocks * (by_group ? ceil_div(o->rows, 16) : o->rows);
        if (view->format.nvfp4.tensor_scale == TENSOR_SCALE_POW2) next->pending = pending;
        pending += next->scales;
    }
    return count;
}

void quantize_operand(Operand *o, unsigned views, Tensor src, const float *amax, uint64_t seed, uint32_t step,
                      int64_t row0)
{
    Quantizer q[2];
    Magnitude m[2] = {{0, 0}, {0, 0}};
    int count = quantizers(q, o, views);
    if (!count) return;
    bool pending = q[0].pending && !amax; /* the scale mode is one for all */
    if (amax)
        m[0] = m[1] = (Magnitude){isnan(*amax) ? 0 : *amax, isnan(*amax)};
    else if (!pending)
        do_source(q, count, src, false, m);
    for (int i = 0; i < count; i++) {
        q[i].seed = seed;
        q[i].step = step;
        q[i].row0 = row0;
        q[i].scale = nvfp4_scale(m[i].amax, m[i].has_nan, &q[i].format->nvfp4);
        if (!pending) q[i].pending = NULL;
    }
    Magnitude seen[2];
    do_source(q, count, src, true, seen);
    for (int i = 0; i < count; i++) {
        if (pending) {
            q[i].scale = nvfp4_scale(seen[i].amax, seen[i].has_nan, &q[i].format->nvfp4);
            finish_pending(&q[i]);
        }
        *q[i].view->tensor_scale = q[i].scale.stored;
        if (cpu.measure) measure(&q[i], src, o->layer);
    }
}

void cpu_weight_amax(float *amax, Tensor rows)
{
    Quantizer q = {.format = &(ViewFormat){0}};
    Magnitude m[2];
    do_source(&q, 1, rows, false, m);
    *amax = m[0].has_nan ? NAN : m[0].amax;
}
