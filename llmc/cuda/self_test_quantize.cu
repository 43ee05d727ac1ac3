/* The quantizers' part of the self-test: their bits against the reference quantizer (nvfp4.h), the reciprocal they use
 * against division, and the law of the device's own stochastic rounding.
 */
#include "quantize.cuh"
#include "self_test.cuh"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 80, COLS = 96, ELEMENTS = ROWS * COLS, SEED = 7, LAYER = 3 };

typedef struct { /* one way to quantize */
    const char *name;
    Nvfp4Form form;
} Case;

static const Case CASES[] = {
    {"to nearest", {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}},
    {"stochastically", {ROUND_STOCHASTIC, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}},
    {"under power-of-two scales", {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_POW2, FOUR_OVER_SIX_OFF, 1}},
    {"stochastically under power-of-two scales",
     {ROUND_STOCHASTIC, SCALE_1X16, TENSOR_SCALE_POW2, FOUR_OVER_SIX_OFF, 1}},
    {"to nearest with headroom", {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 17.0f / 16.0f}},
    {"4/6", {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MAE, 1}},
    {"in 16 x 16 blocks", {ROUND_NEAREST, SCALE_16X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}},
};

/* ---- both sides of one operand ---- */

typedef struct {
    float value[2][ELEMENTS]; /* as each copy is quantized: by rows; transposed and transformed */
    uint8_t codes[2][ELEMENTS], scales[2][ELEMENTS / NVFP4_BLOCK]; /* expected */
    Nvfp4Scale scale[2];
    void *source, *memory[2]; /* on the device: the matrix, its views */
    Operand operand;
    char *host[2]; /* the views as they came back */
} Trial;

static void check(cudaError_t status) { cuda_check(status, "self-test of the quantizers"); }

/* Values that spread over 12 binary places, so that scales differ from block to block. */
static void fill(const Ops *ops, Trial *t)
{
    static uint16_t half[ELEMENTS];
    for (uint32_t i = 0; i < ELEMENTS; i++) {
        Philox draw = philox_draw(1, i, 0, 0, 0, 0, 9);
        float x = ldexpf((float)(int)(draw.word[0] % 512) / 256.0f - 1.0f, -(int)(i / 48 % 12));
        half[i] = bf16_from_f32(x);
        t->value[0][i] = bf16_to_f32(half[i]);
    }
    ops->copy_in(t->source, half, sizeof half);
}

static void transpose(Trial *t, bool rht)
{
    for (int c = 0; c < COLS; c++)
        for (int r0 = 0; r0 < ROWS; r0 += NVFP4_BLOCK) {
            float block[NVFP4_BLOCK];
            for (int i = 0; i < NVFP4_BLOCK; i++) block[i] = t->value[0][(r0 + i) * COLS + c];
            if (rht) nvfp4_rht16(block);
            memcpy(t->value[1] + c * ROWS + r0, block, sizeof block);
        }
}

static bool is_square(const Case *c) { return c->form.block == SCALE_16X16; }

static int64_t outers(int copy) { return copy ? COLS : ROWS; }
static int64_t depth(int copy) { return copy ? ROWS : COLS; }

static void expect(Trial *t, const Case *c, uint32_t step)
{
    transpose(t, !is_square(c));
    for (int copy = 0; copy < 2; copy++) {
        View *v = copy ? &t->operand.col : &t->operand.row;
        Nvfp4Place place = {SEED, step, LAYER, v->format.role, 0, 0};
        t->scale[copy] = nvfp4_quantize(t->codes[copy], t->scales[copy], t->value[copy], outers(copy), depth(copy),
                                        &c->form, &place);
    }
}

static void open_trial(const Ops *ops, Trial *t, const Case *c)
{
    View *view[2] = {&t->operand.row, &t->operand.col};
    t->operand.rows = ROWS, t->operand.cols = COLS, t->operand.layer = LAYER;
    for (int i = 0; i < 2; i++) {
        unsigned which = i ? VIEW_COL : VIEW_ROW;
        view[i]->format.format = FORMAT_NVFP4, view[i]->format.nvfp4 = c->form;
        view[i]->format.rht = i && !is_square(c);
        view[i]->format.role = (uint8_t)(ROLE_OPERAND + (is_square(c) ? COPY_W_ROW : i));
        size_t bytes = ops->view_bytes(&view[i]->format, which, ROWS, COLS);
        check(cudaMalloc(&t->memory[i], bytes));
        check(cudaMemsetAsync(t->memory[i], 0xff, bytes, cuda.stream));
        t->host[i] = (char *)xmalloc(bytes);
        ops->view_place(view[i], which, ROWS, COLS, t->memory[i == 1 && is_square(c) ? 0 : i]);
    }
}

static void close_trial(Trial *t)
{
    for (int i = 0; i < 2; i++) {
        check(cudaFree(t->memory[i]));
        free(t->host[i]);
    }
    t->operand = Operand{};
}

static void quantize(const Ops *ops, Trial *t, const Case *c, uint32_t step)
{
    Tensor x = {t->source, DTYPE_BF16, ROWS, COLS, COLS};
    if (is_square(c)) {
        Linear w = {};
        w.weight = t->operand;
        ops->weight_prepare(&w, x, SEED, step);
    } else {
        Step s = {};
        s.seed = SEED, s.step = step;
        ops->begin_step(&s);
        ops->begin_micro_step(0);
        ops->operand_from_tensor(&t->operand, x, VIEW_ROW | VIEW_COL);
    }
}

/* A copy as it came back: its codes, scale tiles and tensor scale. */
static Nvfp4Copy copy_back(const Ops *ops, Trial *t, int copy)
{
    View v = copy ? t->operand.col : t->operand.row;
    unsigned which = copy ? VIEW_COL : VIEW_ROW;
    ops->copy_out(t->host[copy], v.data, ops->view_bytes(&v.format, which, ROWS, COLS));
    ops->view_place(&v, which, ROWS, COLS, t->host[copy]);
    return nvfp4_copy(&v, copy, ROWS, COLS);
}

static uint8_t code_at(const Nvfp4Copy *c, int64_t outer, int64_t k)
{
    return c->codes[outer * c->ld / 2 + k / 2] >> 4 * (k % 2) & 15;
}

static uint8_t scale_at(const Nvfp4Copy *c, int64_t outer, int64_t block)
{
    return c->scales[nvfp4_tile_offset(outer, block, ceil_div(c->K, NVFP4_BLOCK))];
}

/* ---- bits ---- */

static void differ(const Case *c, int copy, const char *what, int64_t outer, int64_t k, unsigned is, unsigned expected)
{
    die("self-test: quantizing %s: %s [%d, %d] of the %s copy is 0x%x and should be 0x%x; this program was not "
        "compiled "
        "rightly for this GPU: make clean, then make again with GPU_ARCH set to its architecture and another nvcc",
        c->name, what, (int)outer, (int)k, copy ? "column" : "row", is, expected);
}

static void compare(const Ops *ops, Trial *t, const Case *c, int copy)
{
    Nvfp4Copy is = copy_back(ops, t, copy);
    int64_t K = depth(copy), blocks = K / NVFP4_BLOCK;
    if (f32_bits(*is.tensor_scale) != f32_bits(t->scale[copy].stored))
        differ(c, copy, "tensor scale", 0, 0, f32_bits(*is.tensor_scale), f32_bits(t->scale[copy].stored));
    for (int64_t i = 0; i < outers(copy); i++)
        for (int64_t k = 0; k < is.ld; k++) {
            uint8_t code = k < K ? t->codes[copy][i * K + k] : 0; /* zeros up to the leading dimension */
            if (code_at(&is, i, k) != code) differ(c, copy, "code", i, k, code_at(&is, i, k), code);
            if (k % NVFP4_BLOCK || k >= K) continue;
            uint8_t scale = t->scales[copy][i * blocks + k / NVFP4_BLOCK];
            if (scale_at(&is, i, k / NVFP4_BLOCK) != scale)
                differ(c, copy, "block scale", i, k / NVFP4_BLOCK, scale_at(&is, i, k / NVFP4_BLOCK), scale);
        }
}

/* ---- the reciprocal ---- */

enum { MANTISSAS = 1 << 23, THREAD_MANTISSAS = 128 };

/* A thread tries 128 mantissas under one exponent of those that reciprocal_normal is for. */
__global__ void __launch_bounds__(BLOCK) count_wrong_reciprocals(gmem<uint32_t> wrong)
{
    uint32_t i = blockIdx.x * BLOCK + threadIdx.x, exponent = 1 + i % 252, count = 0;
    for (uint32_t j = 0; j < THREAD_MANTISSAS; j++) {
        float x = f32_from_bits(exponent << 23 | (i * THREAD_MANTISSAS + j));
        count += f32_bits(reciprocal_normal(x)) != f32_bits(f32_div(1.0f, x));
    }
    if (count) wrong.atomic_add(0, count);
}

static void try_reciprocals(const Ops *ops)
{
    uint32_t wrong = 0;
    void *memory;
    check(cudaMalloc(&memory, sizeof wrong));
    ops->copy_in(memory, &wrong, sizeof wrong);
    count_wrong_reciprocals<<<MANTISSAS / THREAD_MANTISSAS / BLOCK, BLOCK, 0, cuda.stream>>>(gmem<uint32_t>(memory));
    check(cudaGetLastError());
    ops->copy_out(&wrong, memory, sizeof wrong);
    check(cudaFree(memory));
    if (wrong)
        die("self-test: %u of %d reciprocals are not what division gives; block scales would differ from the "
            "reference's: "
            "this GPU's rcp.approx is of a kind that this program does not know",
            wrong, (int)MANTISSAS);
}

void self_test_quantizers(const Ops *ops)
{
    Trial *t = (Trial *)xcalloc(1, sizeof *t);
    Need need = {};
    need.weight_rows = need.N = need.cols = COLS;
    void *workspace;
    check(cudaMalloc(&workspace, ops->workspace_bytes(&need)));
    ops->workspace_set(workspace, &need);
    check(cudaMalloc(&t->source, ELEMENTS * sizeof(uint16_t)));
    fill(ops, t);
    try_reciprocals(ops);
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) {
        open_trial(ops, t, &CASES[i]);
        expect(t, &CASES[i], 5);
        quantize(ops, t, &CASES[i], 5);
        compare(ops, t, &CASES[i], 0);
        compare(ops, t, &CASES[i], 1);
        close_trial(t);
    }
    check(cudaFree(t->source));
    check(cudaFree(workspace));
    free(t);
}

/* ---- the law of stochastic rounding: of ours, whose bits are known, or of the device's own ---- */

enum { DRAWS = 16, BINS = 8 };

typedef struct { /* values whose place between their neighbours is in one eighth */
    double count, up, expected, variance;
} Bin;

static const char *advice(void) { return cuda.native_rounding ? "run with --native_rounding false" : "this is a bug"; }

/* Code c of x under the block's factor: is it one of the two next to x encode, and which? */
static void look_at(Bin bin[BINS], double *together, double *last, float x, float encode, uint8_t code)
{
    static const double VALUES[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    double y = fmin(fabs((double)f32_mul(x, encode)), 6);
    int below = 0;
    while (below < 6 && VALUES[below + 1] <= y) below++;
    double place = (y - VALUES[below]) / (VALUES[below + 1] - VALUES[below]);
    int step = (code & 7) - below;
    if (step < 0 || step > 1 || (place == 0 && step) || (y != 0 && (code >> 3) != (x < 0)))
        die("self-test: stochastic rounding: %g became code %d, which is no neighbour; %s", (double)f32_mul(x, encode),
            code, advice());
    Bin *b = &bin[(int)fmin(place * BINS, BINS - 1)];
    b->count++;
    b->up += step;
    b->expected += place;
    b->variance += place * (1 - place);
    *together += *last * (step - place);
    *last = step - place;
}

/* Counts of steps up against their probabilities, six standard deviations and one 128th (a probability has 8 bits), and
 * neighbours' against each other: sharing random bits would show there. */
void self_test_rounding(const Ops *ops)
{
    const Case *c = &CASES[1];
    Trial *t = (Trial *)xcalloc(1, sizeof *t);
    Bin bin[BINS] = {};
    double together = 0, last = 0, pairs = 0;
    check(cudaMalloc(&t->source, ELEMENTS * sizeof(uint16_t)));
    fill(ops, t);
    open_trial(ops, t, c);
    expect(t, c, 0);
    for (uint32_t draw = 0; draw < DRAWS; draw++) {
        quantize(ops, t, c, draw);
        for (int copy = 0; copy < 2; copy++) {
            Nvfp4Copy is = copy_back(ops, t, copy);
            int64_t K = depth(copy);
            for (int64_t i = 0; i < ELEMENTS; i++) {
                uint8_t scale = t->scales[copy][i / NVFP4_BLOCK];
                look_at(bin, &together, &last, t->value[copy][i], nvfp4_encode_block(scale, t->scale[copy].decode),
                        code_at(&is, i / K, i % K));
            }
        }
    }
    for (int i = 0; i < BINS; i++) {
        pairs += bin[i].variance / 4; /* at most */
        if (fabs(bin[i].up - bin[i].expected) > 6 * sqrt(bin[i].variance) + bin[i].count / 128)
            die("self-test: stochastic rounding: of %.0f values %d to %d eighths up, %.0f went up and %.0f should; %s",
                bin[i].count, i, i + 1, bin[i].up, bin[i].expected, advice());
    }
    if (fabs(together) > 6 * sqrt(pairs))
        die("self-test: stochastic rounding: neighbours are not rounded independently; %s", advice());
    close_trial(t);
    check(cudaFree(t->source));
    free(t);
}
