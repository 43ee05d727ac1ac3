/* nvfp4.h: the quantizer against committed vectors of an independent implementation (test/fixtures/nvfp4.bin, made by
 * dev/reference/make_nvfp4_vectors.py, which describes the file), and what the vectors do not hold against definitions
 * written out here: power-of-two tensor scales, headroom, alpha, transposed 16 x 16 blocks, special values, padding. The
 * tiles of scales and the Hadamard transform are in test_nvfp4_layout.c, randomness in test_nvfp4_random.c, the code
 * that nvcc makes in test_nvfp4_cuda.sh.
 *
 * Known mistakes of other implementations that have a case here: another order of the scales' roundings (vectors
 * scale_ties), a reciprocal for a division (ties, nvfp4_already), errors of 4/6 summed in another order (undecided),
 * zero blocks and zero rows that become NaN, padding that is seen by an amax or an error of 4/6, an alpha of the wrong
 * tensor or bound, a tensor's scale put into E4M3, reads and writes beyond odd shapes, NaN that poisons an amax. Not
 * possible here: shapes of more than two dimensions (all are matrices), and a minimum over padded scales (nothing takes
 * one).
 */
#include <math.h>

#include "nvfp4.h"
#include "test.h"

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static float random_value(void) { return (float)((double)(int64_t)random_bits() * 0x1p-63); }

static const Nvfp4Form PLAIN = {.headroom = 1};
static const Nvfp4Form POW2 = {.tensor_scale = TENSOR_SCALE_POW2, .headroom = 1};

/* ---- the vectors ---- */

typedef struct {
    const uint8_t *at, *end;
} Reader;

static const uint8_t *take(Reader *r, int64_t bytes)
{
    if (bytes < 0 || r->end - r->at < bytes) die("test/fixtures/nvfp4.bin is cut short");
    const uint8_t *at = r->at;
    r->at += bytes;
    return at;
}

static uint32_t take_u32(Reader *r)
{
    uint32_t x;
    memcpy(&x, take(r, 4), 4);
    return x;
}

static uint64_t fnv1a(const float *x, int64_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < n; i++) {
        uint32_t bits = isnan(x[i]) ? 0x7fc00000u : f32_bits(x[i]);
        for (int b = 0; b < 4; b++) h = (h ^ (bits >> 8 * b & 0xff)) * 0x100000001b3u;
    }
    return h;
}

static void same(const char *name, const char *what, const uint8_t *got, const uint8_t *expected, int64_t rows,
                 int64_t width)
{
    for (int64_t i = 0; i < rows * width; i++)
        if (!CHECK(got[i] == expected[i], "%s: %s, row %d, byte %d: %02x, not %02x", name, what, (int)(i / width),
                   (int)(i % width), got[i], expected[i]))
            return;
}

static void one_variant(Reader *r, const char *name, const float *x, int64_t rows, int64_t cols, const Nvfp4Form *form,
                        const Nvfp4Place *place)
{
    int64_t blocks = ceil_div(cols, 16), width = ceil_div(cols, 2);
    uint8_t *codes = xmalloc((size_t)(rows * cols)), *scales = xmalloc((size_t)(rows * blocks));
    uint8_t *packed = xmalloc((size_t)(rows * width));
    float *back = xmalloc((size_t)(rows * cols) * sizeof *back);
    char what[96];
    snprintf(what, sizeof what, "%s, %s%s%s", name, form->block == SCALE_16X16 ? "16 x 16" : "1 x 16",
             (const char *[]){"", ", 4/6 MAE", ", 4/6 MSE"}[form->four_over_six],
             form->rounding == ROUND_STOCHASTIC ? ", stochastic" : "");

    uint32_t amax = take_u32(r), encode = take_u32(r), decode = take_u32(r);
    Nvfp4Scale tensor = nvfp4_quantize(codes, scales, x, rows, cols, form, place);
    nvfp4_pack(packed, codes, rows, cols);
    nvfp4_dequantize(back, codes, scales, tensor.amax, rows, cols, form); /* the vectors hide NaN here */
    bool has_nan = false;
    for (int64_t i = 0; i < rows * cols; i++) has_nan |= isnan(x[i]);
    CHECK(has_nan ? isnan(tensor.stored) : f32_bits(tensor.stored) == amax, "%s: stored %g", what,
          (double)tensor.stored);
    CHECK(f32_bits(tensor.amax) == amax && f32_bits(tensor.encode) == encode && f32_bits(tensor.decode) == decode,
          "%s: amax %08x encode %08x decode %08x, not %08x %08x %08x", what, f32_bits(tensor.amax),
          f32_bits(tensor.encode), f32_bits(tensor.decode), amax, encode, decode);
    uint64_t hash;
    memcpy(&hash, take(r, 8), 8);
    CHECK(fnv1a(back, rows * cols) == hash, "%s: dequantized values differ", what);
    same(what, "packed codes", packed, take(r, rows * width), rows, width);
    same(what, "block scales", scales, take(r, rows * blocks), rows, blocks);
    free(codes);
    free(scales);
    free(packed);
    free(back);
}

static void test_vectors(void)
{
    static const Nvfp4Form VARIANTS[8] = {
        {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1},
        {ROUND_NEAREST, SCALE_16X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1},
        {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MAE, 1},
        {ROUND_NEAREST, SCALE_16X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MAE, 1},
        {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MSE, 1},
        {ROUND_NEAREST, SCALE_16X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MSE, 1},
        {ROUND_STOCHASTIC, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1},
        {ROUND_STOCHASTIC, SCALE_16X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1},
    };
    static uint8_t file[400000];
    FILE *f = fopen("test/fixtures/nvfp4.bin", "rb");
    if (!f) die("cannot open test/fixtures/nvfp4.bin");
    Reader r = {file, file + fread(file, 1, sizeof file, f)};
    fclose(f);
    test_case("vectors: the file is what it should be");
    if (!CHECK(!memcmp(take(&r, 8), "NVFP4V1", 8), "magic")) return;
    uint32_t sets = take_u32(&r);
    CHECK(sets >= 41, "%u data sets", sets);
    for (uint32_t s = 0; s < sets; s++) {
        char name[64];
        snprintf(name, sizeof name, "vectors: %.24s", (const char *)take(&r, 24));
        test_case(name);
        int64_t rows = take_u32(&r), cols = take_u32(&r);
        uint64_t seed = take_u32(&r);
        seed |= (uint64_t)take_u32(&r) << 32;
        Nvfp4Place place = {.seed = seed, .step = take_u32(&r)};
        place.layer = take_u32(&r);
        place.role = take_u32(&r);
        place.row0 = take_u32(&r);
        place.block0 = take_u32(&r);
        float *x = xmalloc((size_t)(rows * cols) * sizeof *x);
        memcpy(x, take(&r, rows * cols * 4), (size_t)(rows * cols) * 4);
        for (int v = 0; v < 8; v++) one_variant(&r, name + 9, x, rows, cols, &VARIANTS[v], &place);
        free(x);
    }
    CHECK(r.at == r.end, "%d bytes are left", (int)(r.end - r.at));
}

/* ---- tensor scales ---- */

static void one_pow2_scale(float amax)
{
    Nvfp4Scale s = nvfp4_scale(amax, false, &POW2);
    int exponent;
    bool power = frexp((double)s.encode, &exponent) == 0.5;
    CHECK(power && s.encode * s.decode == 1 && s.stored == s.decode && s.decode >= 0x1p-126f, "amax %a: %a and %a",
          (double)amax, (double)s.encode, (double)s.decode);
    CHECK((double)amax * s.encode <= 2688, "amax %a: encode scale %a is too large", (double)amax, (double)s.encode);
    CHECK(s.encode == 0x1p126f || (double)amax * s.encode * 2 > 2688, "amax %a: encode scale %a is too small",
          (double)amax, (double)s.encode);
}

static void test_pow2_scale(void)
{
    test_case("power-of-two tensor scale: the largest 2^e with 2^e amax <= 2688, and its inverse is exact");
    for (int e = -149; e < 128; e++) {
        float edge[] = {(float)ldexp(1, e), (float)ldexp(1.3125, e)};
        for (int i = 0; i < 2; i++)
            for (int ulps = -1; ulps <= 1; ulps++) {
                uint32_t bits = f32_bits(edge[i]) + (uint32_t)ulps;
                if (bits && bits < 0x7f800000) one_pow2_scale(f32_from_bits(bits));
            }
    }
    one_pow2_scale(NVFP4_FLT_MAX);
    for (int i = 0; i < 100000; i++) one_pow2_scale(f32_from_bits(1 + (uint32_t)(random_bits() % 0x7f7fffff)));
    for (int mode = 0; mode < 2; mode++) {
        Nvfp4Form form = {.tensor_scale = (TensorScaleMode)mode, .headroom = 1};
        CHECK(nvfp4_scale(0, false, &form).encode == 1, "amax 0");
    }
}

/* y to `bits` significant bits in FP64, to nearest even; `unit` is the spacing of denormals. */
static double round_significant(double y, int bits, double unit)
{
    int exponent;
    frexp(y, &exponent);
    double step = fmax(ldexp(1, exponent - bits), unit);
    return rint(y / step) * step;
}

/* Steps 1-3 of the pow2 quantizer from their words: amax / 6 to 4 significant bits; codes from that; then E4M3. */
static void one_pow2_block(float amax, float tensor_amax)
{
    Nvfp4Scale tensor = nvfp4_scale(tensor_amax, false, &POW2);
    float encode, sixth = amax * (1.0f / 6.0f);
    uint8_t scale = nvfp4_block_scale(amax, &tensor, &POW2, &encode);
    double rounded = fmin(round_significant(sixth, 4, 0x1p-129), 0x1.ep127);
    float inverse = (float)(1 / rounded);
    if (!(inverse < INFINITY)) inverse = NVFP4_FLT_MAX;
    CHECK(encode == inverse, "block amax %a: factor %a, not %a", (double)amax, (double)encode, (double)inverse);
    CHECK(scale == e4m3_from_f32((float)(rounded * tensor.encode)), "block amax %a: scale %02x", (double)amax, scale);
    if (rounded * tensor.encode >= 0x1p-6 && rounded * tensor.encode < INFINITY)
        CHECK((double)nvfp4_decode_scale(scale, tensor.stored, &POW2) == rounded, "block amax %a decodes with %a",
              (double)amax, (double)nvfp4_decode_scale(scale, tensor.stored, &POW2));
}

static void test_pow2_block(void)
{
    test_case("power-of-two mode: the block scale has 4 significant bits before codes are made, and E4M3 keeps them");
    for (int i = 0; i < 100000; i++) {
        float tensor_amax = f32_from_bits((uint32_t)(random_bits() % 0x7e000000)), share = fabsf(random_value());
        if (tensor_amax > 0) one_pow2_block(tensor_amax * share * share * share, tensor_amax);
    }
    for (int m = 0; m < 64; m++)
        for (int e = -20; e <= 0; e++) one_pow2_block((float)(6 * ldexp(64 + m, e - 6)), 2688);
    one_pow2_block(NVFP4_FLT_MAX, NVFP4_FLT_MAX);
    one_pow2_block(0, 1);
    one_pow2_block(0x1p-149f, 0x1p-140f);
}

enum { ROWS = 32, COLS = 64, COUNT = ROWS * COLS, BLOCKS = COLS / 16 };

typedef struct {
    uint8_t codes[COUNT], scales[ROWS * BLOCKS];
    Nvfp4Scale tensor;
} Quantized;

static Quantized quantize(const float *x, const Nvfp4Form *form)
{
    Quantized q;
    q.tensor = nvfp4_quantize(q.codes, q.scales, x, ROWS, COLS, form, &(Nvfp4Place){.seed = 7, .role = ROLE_OPERAND});
    return q;
}

static void test_scaling(void)
{
    float x[COUNT], y[COUNT];
    for (int i = 0; i < COUNT; i++) x[i] = random_value() * ldexpf(1, (int)(random_bits() % 8));
    test_case("scaling a tensor by a power of two changes neither codes nor block scales, in both modes");
    for (int mode = 0; mode < 4; mode++) {
        Nvfp4Form form = {
            .tensor_scale = (TensorScaleMode)(mode & 1), .rounding = (Rounding)(mode >> 1), .headroom = 1};
        Quantized a = quantize(x, &form);
        for (int e = -60; e <= 60; e += 15) {
            for (int i = 0; i < COUNT; i++) y[i] = ldexpf(x[i], e);
            Quantized b = quantize(y, &form);
            CHECK(!memcmp(a.codes, b.codes, COUNT) && !memcmp(a.scales, b.scales, sizeof a.scales), "mode %d, 2^%d",
                  mode, e);
            CHECK(b.tensor.stored == ldexpf(a.tensor.stored, e), "mode %d, 2^%d: what is stored", mode, e);
        }
    }
    test_case("power-of-two mode: a block's codes do not depend on the rest of the tensor");
    memcpy(y, x, sizeof x);
    y[COUNT - 1] = 3.0e7f;
    Quantized a = quantize(x, &POW2), b = quantize(y, &POW2);
    CHECK(!memcmp(a.codes, b.codes, COUNT - 16) && memcmp(a.scales, b.scales, sizeof a.scales), "codes moved");
}

/* The largest |x encode| over blocks of normal scale, before it saturates. */
static float largest_encoded(float headroom, TensorScaleMode mode)
{
    Nvfp4Form form = {.tensor_scale = mode, .headroom = headroom};
    float largest = 0;
    for (int i = 0; i < 200000; i++) {
        float tensor_amax = 1 + fabsf(random_value()), amax = tensor_amax * (i % 8 ? fabsf(random_value()) : 1), encode;
        Nvfp4Scale tensor = nvfp4_scale(tensor_amax, false, &form);
        uint8_t scale = nvfp4_block_scale(amax, &tensor, &form, &encode);
        if (scale >= 8) largest = f32_max(amax * encode, largest);
    }
    return largest;
}

static void test_headroom(void)
{
    test_case("headroom 17/16: no value of a block of normal scale goes beyond 6; without it some do");
    for (int mode = 0; mode < 2; mode++) {
        float with = largest_encoded(17.0f / 16, (TensorScaleMode)mode),
              without = largest_encoded(1, (TensorScaleMode)mode);
        CHECK(with <= 6 * (1 + 0x1p-21f) && with > 5.9f, "mode %d: %a", mode, (double)with); /* 5 FP32 roundings */
        CHECK(without > 6.3f && without <= 6.375f * (1 + 0x1p-21f), "mode %d: %a without", mode, (double)without);
    }
    Nvfp4Form form = {.headroom = 17.0f / 16};
    CHECK(nvfp4_scale(16, false, &form).amax == 17 && nvfp4_scale(16, false, &form).stored == 17,
          "the tensor's amax has it too");
}

/* ---- back again, and alpha ---- */

/* The dot products of rows of two operands: codes x block scales x alpha against the dequantized values, in FP64. */
static void one_alpha(const Nvfp4Form *fa, const Nvfp4Form *fb, float size_a, float size_b)
{
    static float a[COUNT], b[COUNT], back_a[COUNT], back_b[COUNT];
    for (int i = 0; i < COUNT; i++) a[i] = random_value() * size_a, b[i] = random_value() * size_b;
    Quantized qa = quantize(a, fa), qb = quantize(b, fb);
    nvfp4_dequantize(back_a, qa.codes, qa.scales, qa.tensor.stored, ROWS, COLS, fa);
    nvfp4_dequantize(back_b, qb.codes, qb.scales, qb.tensor.stored, ROWS, COLS, fb);
    double sum = 0, truth = 0, size = 0;
    for (int c = 0; c < COLS; c++) {
        sum += (double)e2m1_to_f32(qa.codes[c]) * e4m3_to_f32(qa.scales[c / 16]) * e2m1_to_f32(qb.codes[c]) *
               e4m3_to_f32(qb.scales[c / 16]);
        truth += (double)back_a[c] * back_b[c];
        size += fabs((double)back_a[c] * back_b[c]);
    }
    double alpha = nvfp4_alpha(qa.tensor.stored, fa, qb.tensor.stored, fb);
    CHECK(fabs(sum * alpha - truth) <= 12 * 0x1p-24 * size, "alpha %g: %.9g, not %.9g", alpha, sum * alpha, truth);
}

static void test_alpha(void)
{
    Nvfp4Form mae = {.four_over_six = FOUR_OVER_SIX_MAE, .headroom = 1}, room = {.headroom = 17.0f / 16};
    test_case("alpha: sums of code x scale become sums of dequantized values; operands of one and of both bounds");
    one_alpha(&PLAIN, &PLAIN, 1, 1);
    one_alpha(&PLAIN, &PLAIN, 3e-4f, 77);
    one_alpha(&PLAIN, &mae, 5, 0.01f);
    one_alpha(&mae, &PLAIN, 5, 0.01f);
    one_alpha(&mae, &mae, 0.3f, 2);
    one_alpha(&room, &mae, 0.3f, 2);
    one_alpha(&POW2, &POW2, 0.3f, 200);
    CHECK(nvfp4_alpha(1, &PLAIN, 1, &PLAIN) == 1.0f / (36 * 448 * 448) &&
              nvfp4_alpha(3, &mae, 5, &PLAIN) == 15.0f * (1.0f / (36 * 256 * 448)) &&
              nvfp4_alpha(3, &mae, 5, &mae) == 15.0f * (1.0f / (36 * 256 * 256)),
          "the formula");
    CHECK(nvfp4_alpha(0x1p-20f, &POW2, 0x1p30f, &POW2) == 0x1p10f, "power of two");
}

/* ---- special values and shapes ---- */

static void test_special(void)
{
    float x[COUNT] = {0}, back[COUNT];
    test_case("NaN reaches no amax and becomes +6; -0 keeps its sign; a zero block has scale 0 and codes 0");
    for (int mode = 0; mode < 4; mode++) {
        Nvfp4Form form = {
            .tensor_scale = (TensorScaleMode)(mode & 1), .rounding = (Rounding)(mode >> 1), .headroom = 1};
        memset(x, 0, sizeof x);
        Quantized q = quantize(x, &form);
        nvfp4_dequantize(back, q.codes, q.scales, q.tensor.stored, ROWS, COLS, &form);
        for (int i = 0; i < COUNT; i++) CHECK(!q.codes[i] && !q.scales[i / 16] && back[i] == 0, "zero tensor");
        for (int i = 16; i < 32; i++) x[i] = 0.25f * (float)(i - 24);
        x[16] = NAN;
        x[17] = -NAN;
        x[18] = -0.0f;
        x[31] = -6;
        q = quantize(x, &form);
        CHECK(q.tensor.amax == 6, "mode %d: amax %g", mode, (double)q.tensor.amax);
        CHECK(q.codes[16] == 7 && q.codes[17] == 7 && q.codes[18] == 8 && q.codes[31] == 15,
              "mode %d: codes %x %x %x %x", mode, q.codes[16], q.codes[17], q.codes[18], q.codes[31]);
        for (int i = 0; i < COUNT; i++)
            if (i / 16 != 1) CHECK(!q.codes[i] && !q.scales[i / 16], "mode %d: zero block at %d", mode, i);
    }
}

static void test_worked_example(void)
{
    float x[32] = {2, 0}, back[32];
    uint8_t codes[32], scales[2];
    test_case("the example worked in nvfp4.h");
    x[16] = 0.5f;
    x[17] = 0.3f;
    Nvfp4Scale tensor = nvfp4_quantize(codes, scales, x, 1, 32, &PLAIN, NULL);
    CHECK(tensor.encode == 1344 && e4m3_to_f32(scales[1]) == 112, "%g %g", (double)tensor.encode,
          (double)e4m3_to_f32(scales[1]));
    CHECK(nvfp4_encode_block(scales[1], tensor.decode) == 12 && codes[16] == 7 && codes[17] == 6, "%x %x", codes[16],
          codes[17]);
    nvfp4_dequantize(back, codes, scales, tensor.stored, 1, 32, &PLAIN);
    CHECK(fabsf(back[17] - 1.0f / 3) < 1e-7f && fabsf(back[16] - 0.5f) < 1e-7f, "%a", (double)back[17]);
}

/* At amax 448 the scale is amax_b itself, and its rounding to zero starts at 2^-10. */
static void test_flush(void)
{
    float x[32] = {448, 0}, back[32];
    uint8_t codes[32], scales[2];
    test_case("a block of at most 2^-10/448 of the tensor's amax has scale 0, saturated codes and value 0; above not");
    for (int above = 0; above < 2; above++) {
        x[16] = f32_from_bits(f32_bits(0x1p-10f) + (uint32_t)above);
        x[17] = -x[16] / 1024;
        Nvfp4Scale tensor = nvfp4_quantize(codes, scales, x, 1, 32, &PLAIN, NULL);
        nvfp4_dequantize(back, codes, scales, tensor.stored, 1, 32, &PLAIN);
        if (above)
            CHECK(scales[1] == 1 && codes[16] == 5 && codes[17] == 8 && back[16] > 0, "%02x %x", scales[1], codes[16]);
        else
            CHECK(scales[1] == 0 && codes[16] == 7 && codes[17] == 15 && back[16] == 0, "%02x %x", scales[1],
                  codes[16]);
    }
}

static void test_infinity(void)
{
    float x[32] = {1, INFINITY, [16] = 3}, back[32];
    uint8_t codes[32], scales[2];
    test_case("Inf is seen in every value of the tensor, in both modes of its scale");
    for (int mode = 0; mode < 2; mode++) {
        Nvfp4Form form = {.tensor_scale = (TensorScaleMode)mode, .headroom = 1};
        Nvfp4Scale tensor = nvfp4_quantize(codes, scales, x, 1, 32, &form, NULL);
        nvfp4_dequantize(back, codes, scales, tensor.stored, 1, 32, &form);
        CHECK(codes[1] == 7 && scales[0] == 0x7e, "mode %d: %x %02x", mode, codes[1], scales[0]);
        for (int i = 0; i < 32; i++) CHECK(!isfinite(back[i]), "value %d is %g", i, (double)back[i]);
    }
}

static void test_transpose(void)
{
    enum { R = 37, C = 53 };
    static float x[R * C], t[C * R];
    static uint8_t codes[R * C], scales[R * 4], codes_t[C * R], scales_t[C * 3];
    test_case("16 x 16 blocks: the quantized transpose is the transposed quantized matrix");
    for (int mode = 0; mode < 2; mode++) {
        Nvfp4Form form = {.block = SCALE_16X16, .tensor_scale = (TensorScaleMode)mode, .headroom = 1};
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                t[c * R + r] = x[r * C + c] = random_value() * ldexpf(1, -(r / 16 + c / 16) * 2);
        nvfp4_quantize(codes, scales, x, R, C, &form, NULL);
        nvfp4_quantize(codes_t, scales_t, t, C, R, &form, NULL);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++)
                CHECK(codes[r * C + c] == codes_t[c * R + r] && scales[r * 4 + c / 16] == scales_t[c * 3 + r / 16],
                      "row %d, column %d", r, c);
    }
}

/* Short rows and columns: what lies beyond the matrix is zero to it, and no byte beyond the results is touched. */
static void test_padding(void)
{
    static const int SIZES[][2] = {{1, 1}, {1, 15}, {3, 17}, {16, 16}, {15, 33}, {17, 31}, {31, 64}};
    static float x[COUNT], padded[COUNT], back[COUNT + 1], back_padded[COUNT];
    uint8_t codes[COUNT + 1], scales[ROWS * BLOCKS + 1], packed[COUNT / 2 + 1];
    test_case("padding is zero: short blocks are quantized as if zeros followed, nothing beyond is read or written");
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++)
        for (int v = 0; v < 4; v++) {
            int rows = SIZES[s][0], cols = SIZES[s][1], blocks = (cols + 15) / 16, width = (cols + 1) / 2;
            Nvfp4Form form = {.block = (ScaleBlock)(v & 1),
                              .four_over_six = v & 2 ? FOUR_OVER_SIX_MAE : FOUR_OVER_SIX_OFF,
                              .headroom = 1};
            memset(padded, 0, sizeof padded);
            for (int i = 0; i < COUNT; i++) x[i] = 1e30f; /* behind the end */
            for (int i = 0; i < rows * cols; i++) padded[i / cols * COLS + i % cols] = x[i] = random_value();
            memset(codes, 0xee, sizeof codes);
            memset(scales, 0xee, sizeof scales);
            memset(packed, 0xee, sizeof packed);
            nvfp4_quantize(codes, scales, x, rows, cols, &form, NULL);
            nvfp4_pack(packed, codes, rows, cols);
            Quantized q = quantize(padded, &form);
            nvfp4_dequantize(back_padded, q.codes, q.scales, q.tensor.stored, ROWS, COLS, &form);
            back[rows * cols] = -99;
            nvfp4_dequantize(back, codes, scales, q.tensor.stored, rows, cols, &form);
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < cols; c++) {
                    int nibble = packed[r * width + c / 2] >> (c % 2 * 4) & 15;
                    CHECK(codes[r * cols + c] == q.codes[r * COLS + c] && codes[r * cols + c] == nibble &&
                              scales[r * blocks + c / 16] == q.scales[r * BLOCKS + c / 16] &&
                              back[r * cols + c] == back_padded[r * COLS + c],
                          "%d x %d, variant %d: row %d, column %d", rows, cols, v, r, c);
                }
            CHECK(cols % 2 == 0 || packed[width - 1] >> 4 == 0, "%d x %d: the odd nibble", rows, cols);
            CHECK(codes[rows * cols] == 0xee && scales[rows * blocks] == 0xee && packed[rows * width] == 0xee &&
                      back[rows * cols] == -99,
                  "%d x %d: written beyond the end", rows, cols);
        }
}

int main(void)
{
    test_vectors();
    test_pow2_scale();
    test_pow2_block();
    test_scaling();
    test_headroom();
    test_alpha();
    test_special();
    test_worked_example();
    test_flush();
    test_infinity();
    test_transpose();
    test_padding();
    return test_done();
}
