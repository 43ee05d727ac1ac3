/* The fast quantizers of the CPU backend against the reference of nvfp4.h: codes, block scales and the tensor's scale bit
 * by bit, on every instruction set with 1, 2 and 3 threads, for every form a recipe can ask for, on ordinary and on
 * hostile data and around every tile edge. A column view is checked as the row view of the transposed matrix.
 */
#include <math.h>

#include "cpu/backend.h"
#include "cpu/cpu.h"
#include "mathfn.h"
#include "test.h"

static const char *const ISAS[] = {"portable", "avx2", "avx512", "amx"};

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static float normal(void) { return (float)f64_inverse_normal(((double)(random_bits() >> 11) + 0.5) * 0x1p-53); }

/* ---- sources ---- */

typedef enum {
    NORMAL,
    WIDE,
    GRID,
    SPARSE,
    FLUSHED,
    ZEROS,
    DENORMAL,
    HUGE_VALUES,
    NOT_FINITE,
    INF_TOGETHER,
    ANY_BITS,
    CLASSES
} Class;
static const char *const CLASS_NAME[CLASSES] = {"normal",
                                                "wide range",
                                                "on the grid and its ties",
                                                "sparse",
                                                "block scales around 0",
                                                "zeros",
                                                "denormal",
                                                "huge",
                                                "NaN and Inf",
                                                "any bits"};

/* Column and row make neighbours of blocks differ in size. */
static float draw(Class class, int64_t r, int64_t c)
{
    uint64_t bits = random_bits();
    switch (class) {
    case WIDE:
        return ldexpf(normal(), (int)((r / 16 * 7 + c / 16 * 5) % 60) - 30);
    case GRID: /* a multiple of 1/4 up to 6: after scaling by a power of two many are midpoints */
        return (float)((int)(bits % 49) - 24) * 0.25f;
    case SPARSE:
        return bits % 23 ? (bits & 1 ? 0.0f : -0.0f) : normal();
    case FLUSHED: /* one block of 1, the rest around 2^-10 / 448 of it */
        return c < 16 && r < 16 ? 1.0f : normal() * 0x1p-10f / 448.0f;
    case ZEROS:
        return bits & 1 ? 0.0f : -0.0f;
    case DENORMAL:
        return ldexpf(normal(), -126 - (int)(bits % 8));
    case HUGE_VALUES:
        return ldexpf(normal(), 124 + (int)(bits % 3));
    case NOT_FINITE:
        return bits % 40 ? normal() : bits & 64 ? NAN : bits & 128 ? -NAN : bits & 256 ? INFINITY : -INFINITY;
    case INF_TOGETHER: /* they meet in one block of the transform */
        return c % 7 == 3 && r % 32 < 16 ? (bits & 1 ? INFINITY : -INFINITY) : normal();
    case ANY_BITS:
        return bf16_to_f32((uint16_t)bits);
    default:
        return normal();
    }
}

static Tensor source_of(DType dtype, int64_t rows, int64_t cols, int64_t ld, Class class)
{
    Tensor t = {xcalloc((size_t)(rows * ld), dtype_bytes(dtype)), dtype, rows, cols, ld};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) {
            float x = draw(class, r, c);
            if (dtype == DTYPE_BF16)
                ((uint16_t *)t.data)[r * ld + c] = bf16_from_f32(x);
            else
                ((float *)t.data)[r * ld + c] = x;
        }
    return t;
}

static float element(Tensor t, int64_t r, int64_t c)
{
    if (t.dtype == DTYPE_BF16) return bf16_to_f32(((uint16_t *)t.data)[r * t.ld + c]);
    return bf16_to_f32(bf16_from_f32(((float *)t.data)[r * t.ld + c]));
}

/* ---- what one view must be ---- */

typedef struct {
    uint8_t *codes, *scales;
    float *x; /* what was quantized, [rows, cols] as the view sees it */
    int64_t rows, cols;
    Nvfp4Scale tensor;
} Expected;

static Expected expect(Tensor src, const ViewFormat *f, bool col, int layer, int64_t row0, uint64_t seed, uint32_t step)
{
    Expected e = {.rows = col ? src.cols : src.rows, .cols = col ? src.rows : src.cols};
    size_t n = (size_t)(e.rows * e.cols);
    e.x = xmalloc(n * sizeof *e.x);
    for (int64_t r = 0; r < e.rows; r++)
        for (int64_t c = 0; c < e.cols; c++) e.x[r * e.cols + c] = col ? element(src, c, r) : element(src, r, c);
    for (int64_t r = 0; f->rht && r < e.rows; r++)
        for (int64_t c = 0; c < e.cols; c += 16) nvfp4_rht16(e.x + r * e.cols + c);
    Nvfp4Place place = {.seed = seed, .step = step, .layer = (uint32_t)layer, .role = f->role};
    place.row0 = col ? 0 : (uint32_t)row0;
    place.block0 = col ? (uint32_t)(row0 / 16) : 0;
    e.codes = xmalloc(n);
    e.scales = xmalloc((size_t)(e.rows * ceil_div(e.cols, 16)));
    e.tensor = nvfp4_quantize(e.codes, e.scales, e.x, e.rows, e.cols, &f->nvfp4, &place);
    return e;
}

static void compare_view(const View *v, bool col, const Expected *e, const char *where)
{
    int64_t blocks = ceil_div(e->cols, 16);
    bool square = v->format.nvfp4.block == SCALE_16X16; /* one scale for 16 rows */
    for (int64_t r = 0; r < e->rows; r++)
        for (int64_t b = 0; b < blocks; b++) {
            int64_t at = col ? b * e->rows + r : r * blocks + b;
            const uint8_t *codes = (const uint8_t *)v->data + 8 * at;
            uint8_t scale = v->block_scale[square ? r / 16 * blocks + b : at];
            if (!CHECK(scale == e->scales[r * blocks + b], "%s: scale [%ld,%ld] %02x not %02x", where, (long)r, (long)b,
                       scale, e->scales[r * blocks + b]))
                return;
            for (int64_t i = 0; i < 16; i++) {
                int code = codes[i / 2] >> 4 * (i % 2) & 15, c = (int)(16 * b + i);
                int want = c < e->cols ? e->codes[r * e->cols + c] : 0;
                if (!CHECK(code == want, "%s: code [%ld,%d] %x not %x, of %a", where, (long)r, c, code, want,
                           c < e->cols ? (double)e->x[r * e->cols + c] : 0.0))
                    return;
            }
        }
    CHECK(f32_bits(*v->tensor_scale) == f32_bits(e->tensor.stored) ||
              (isnan(*v->tensor_scale) && isnan(e->tensor.stored)),
          "%s: tensor scale %a not %a", where, (double)*v->tensor_scale, (double)e->tensor.stored);
}

/* ---- one problem ---- */

typedef struct {
    int64_t rows, cols;
    DType dtype;
    Class class;
    ViewFormat row, col;
    unsigned views;
} Problem;

static char *memory;

static const Ops *open_isa(const char *isa, int threads, int64_t rows, int64_t cols)
{
    const Ops *ops;
    Need need = {.N = rows, .T = 64, .cols = cols, .V = 64, .head_dim = 16, .group = 1, .weight_rows = rows};
    if (cpu_open(&ops, isa, threads, NULL)) return NULL;
    free(memory);
    size_t bytes = (ops->workspace_bytes(&need) + 4095) / 4096 * 4096;
    memory = aligned_alloc(4096, bytes);
    memset(memory, 0xA5, bytes);
    ops->workspace_set(memory, &need);
    return ops;
}

static void run_problem(const Problem *p)
{
    uint64_t seed = random_bits();
    uint32_t step = (uint32_t)(random_bits() % 1000);
    int64_t row0 = 16 * (int64_t)(random_bits() % 100);
    int layer = (int)(random_bits() % 30);
    Tensor src = source_of(p->dtype, p->rows, p->cols, p->cols + 3, p->class);
    Expected row = expect(src, &p->row, false, layer, row0, seed, step);
    Expected col = expect(src, &p->col, true, layer, row0, seed, step);

    for (int s = 0; s < 4; s++)
        for (int threads = 1; threads <= 3; threads++) {
            char where[200];
            const Ops *ops = open_isa(ISAS[s], threads, p->rows, p->cols);
            if (!ops) continue;
            Operand o = {.rows = p->rows, .cols = p->cols, .layer = layer, .row.format = p->row, .col.format = p->col};
            size_t bytes[2] = {ops->view_bytes(&p->row, VIEW_ROW, p->rows, p->cols),
                               ops->view_bytes(&p->col, VIEW_COL, p->rows, p->cols)};
            char *place[2] = {xmalloc(bytes[0] + 64), xmalloc(bytes[1] + 64)};
            for (int v = 0; v < 2; v++) memset(place[v], 0xA5, bytes[v] + 64);
            ops->view_place(&o.row, VIEW_ROW, p->rows, p->cols, place[0]);
            ops->view_place(&o.col, VIEW_COL, p->rows, p->cols, place[1]);
            snprintf(where, sizeof where,
                     "%s, %d threads, %s %s, %ld x %ld, %s %s sr %d/%d 4/6 %d headroom %g views %u", ISAS[s], threads,
                     CLASS_NAME[p->class], p->dtype == DTYPE_BF16 ? "bf16" : "fp32", (long)p->rows, (long)p->cols,
                     p->row.nvfp4.tensor_scale ? "pow2" : "amax", p->row.nvfp4.block == SCALE_16X16 ? "16x16" : "1x16",
                     p->row.nvfp4.rounding, p->col.nvfp4.rounding, p->row.nvfp4.four_over_six,
                     (double)p->row.nvfp4.headroom, p->views);
            o.row0 = row0 ? 16 : 0; /* the global row is the micro-batch's and the operand's together */
            ops->begin_step(&(Step){.seed = seed, .step = step});
            ops->begin_micro_step(row0 - o.row0);
            if (p->dtype == DTYPE_BF16) {
                ops->operand_from_tensor(&o, src, p->views);
            } else { /* FP32: a weight's master; it has no place of its own among tokens */
                Linear w = {.weight = o};
                w.weight.row.format.nvfp4.rounding = w.weight.col.format.nvfp4.rounding = ROUND_NEAREST;
                ops->weight_prepare(&w, src, seed, step);
            }
            if (p->views & VIEW_ROW) compare_view(&o.row, false, &row, where);
            if (p->views & VIEW_COL && !views_are_one(&p->row, &p->col)) compare_view(&o.col, true, &col, where);
            for (int v = 0; v < 2; v++)
                for (size_t i = bytes[v]; i < bytes[v] + 64; i++)
                    if (!CHECK((uint8_t)place[v][i] == 0xA5, "%s: wrote behind view %d", where, v)) break;
            free(place[0]), free(place[1]);
        }
    free(src.data);
    free(row.codes), free(row.scales), free(row.x);
    free(col.codes), free(col.scales), free(col.x);
}

static ViewFormat view_format(Rounding rounding, ScaleBlock block, TensorScaleMode scale, FourOverSix four_over_six,
                              float headroom, bool rht, uint8_t role)
{
    return (ViewFormat){FORMAT_NVFP4, {rounding, block, scale, four_over_six, headroom}, rht, role};
}

/* Every form that a recipe can ask for, by number. */
enum { FORMS = 12 };
static void set_form(Problem *p, int form)
{
    static const float H = 17.0f / 16.0f;
    TensorScaleMode scale = form % 2 ? TENSOR_SCALE_POW2 : TENSOR_SCALE_AMAX;
    Rounding sr = ROUND_STOCHASTIC, rn = ROUND_NEAREST;
    p->views = VIEW_ROW | VIEW_COL;
    switch (form / 2) {
    case 0: /* activations */
        p->row = view_format(rn, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, 1, false, 70);
        p->col = view_format(rn, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, 1, true, 71);
        break;
    case 1: /* gradients */
        p->row = view_format(sr, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, 1, false, 72);
        p->col = view_format(sr, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, 1, true, 73);
        break;
    case 2: /* gradients with headroom, no transform */
        p->row = view_format(sr, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, H, false, 72);
        p->col = view_format(sr, SCALE_1X16, scale, FOUR_OVER_SIX_OFF, H, false, 73);
        break;
    case 3: /* weights, 16 x 16 */
        p->row = p->col = view_format(rn, SCALE_16X16, scale, FOUR_OVER_SIX_OFF, 1, false, 74);
        break;
    case 4: /* weights rounded stochastically */
        p->row = p->col = view_format(sr, SCALE_16X16, scale, FOUR_OVER_SIX_OFF, 1, false, 74);
        break;
    default: /* 4/6, amax scales only */
        p->row = view_format(rn, form % 2 ? SCALE_16X16 : SCALE_1X16, TENSOR_SCALE_AMAX,
                             random_bits() & 1 ? FOUR_OVER_SIX_MSE : FOUR_OVER_SIX_MAE, 1, false, 70);
        p->col = form % 2 ? p->row : view_format(rn, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1, true, 71);
    }
}

/* A weight whose rows are packed by parts, as ranks do it, is the weight prepared at once; the pieces that ranks gather are
 * all of its memory but the tensor's scales. */
static void test_parts(void)
{
    static const int64_t SHAPE[][2] = {{48, 80}, {33, 50}, {16, 16}, {7, 33}, {129, 40}};
    test_case("a weight by parts");
    for (int round = 0; round < 60; round++) {
        int64_t rows = SHAPE[round % 5][0], cols = SHAPE[round % 5][1];
        const Ops *ops = open_isa(ISAS[round % 4], 1 + round % 3, rows, cols);
        if (!ops) continue;
        Problem p = {0};
        set_form(&p, round % FORMS);
        if (p.col.rht) p.col.rht = false; /* of tokens only */
        if (round % 7 == 0) p.col = (ViewFormat){.format = FORMAT_BF16};
        Tensor master = source_of(round % 2 ? DTYPE_FP32 : DTYPE_BF16, rows, cols, cols, (Class)(round % FLUSHED));
        size_t bytes[2] = {ops->view_bytes(&p.row, VIEW_ROW, rows, cols),
                           ops->view_bytes(&p.col, VIEW_COL, rows, cols)};
        Linear w[2];
        char *place[2][2];
        for (int i = 0; i < 2; i++) {
            w[i] = (Linear){.weight = {.rows = rows, .cols = cols, .row.format = p.row, .col.format = p.col}};
            for (int v = 0; v < 2; v++) memset(place[i][v] = xmalloc(bytes[v] + 1), 0x11, bytes[v]);
            ops->view_place(&w[i].weight.row, VIEW_ROW, rows, cols, place[i][0]);
            ops->view_place(&w[i].weight.col, VIEW_COL, rows, cols, place[i][1]);
        }
        float amax;
        int64_t units = ceil_div(rows, 16), ranks = 1 + round % 4;
        ops->weight_prepare(&w[0], master, 3, 4);
        ops->weight_amax(&amax, master);
        for (int64_t r = 0; r < ranks; r++) {
            int64_t first = min_i64(rows, 16 * (units * r / ranks)),
                    end = min_i64(rows, 16 * (units * (r + 1) / ranks));
            ops->weight_pack(&w[1], tensor_rows(master, first, end - first), first, &amax, 3, 4);
        }
        for (int v = 0; v < 2; v++)
            CHECK(!memcmp(place[0][v], place[1][v], bytes[v]), "%s, form %d, %ld x %ld, %ld ranks: view %d", ops->name,
                  round % FORMS, (long)rows, (long)cols, (long)ranks, v);

        WeightPiece piece[WEIGHT_PIECES];
        size_t sum = 0, all = bytes[0];
        int count = ops->weight_pieces(&w[0], piece), scales = p.row.format == FORMAT_NVFP4;
        for (int k = 0; k < count; k++) {
            CHECK(ceil_div((int64_t)piece[k].bytes, (int64_t)piece[k].unit) == units, "piece %d has other units", k);
            memset(piece[k].data, 0, piece[k].bytes);
            sum += piece[k].bytes;
        }
        if (!views_are_one(&p.row, &p.col)) {
            all += bytes[1];
            scales += p.col.format == FORMAT_NVFP4;
        }
        CHECK(sum + (size_t)scales * sizeof(float) == all, "pieces of %zu bytes, views of %zu", sum, all);
        free(master.data);
        for (int i = 0; i < 2; i++) free(place[i][0]), free(place[i][1]);
    }
}

static void test_measure(void)
{
    QuantStats *stats = xcalloc(3 * OPERAND_ROLES, sizeof *stats);
    Problem p = {.rows = 48, .cols = 56};
    test_case("telemetry counts what a plain loop counts, whatever the threads");
    for (int form = 0; form < FORMS; form++) {
        set_form(&p, form);
        p.row.role = p.col.role = (uint8_t)(ROLE_OPERAND + 5);
        Tensor src = source_of(DTYPE_BF16, p.rows, p.cols, p.cols, form / 2 == 2 ? NORMAL : form % 3 ? FLUSHED : WIDE);
        Expected e = expect(src, &p.row, false, 2, 0, 1, 0);
        QuantStats want = {.elements = p.rows * p.cols, .blocks = p.rows * ceil_div(p.cols, 16)};
        float *back = xmalloc((size_t)(p.rows * p.cols) * sizeof *back);
        nvfp4_dequantize(back, e.codes, e.scales, e.tensor.stored, p.rows, p.cols, &p.row.nvfp4);
        for (int64_t i = 0; i < p.rows * p.cols; i++) {
            want.zeroed += e.x[i] != 0 && back[i] == 0;
            want.error2 += pow((double)back[i] - (double)e.x[i], 2);
            want.signal2 += pow((double)e.x[i], 2);
        }
        for (int64_t i = 0; i < want.blocks; i++) want.zero_blocks += e.scales[i] == 0;
        for (int threads = 1; threads <= 3; threads++) {
            const Ops *ops = open_isa("auto", threads, p.rows, p.cols);
            Operand o = {.rows = p.rows, .cols = p.cols, .layer = 2, .row.format = p.row, .col.format = p.col};
            char *place = xmalloc(ops->view_bytes(&p.row, VIEW_ROW, p.rows, p.cols));
            QuantStats *s = &stats[2 * OPERAND_ROLES + 5];
            *s = (QuantStats){0};
            ops->view_place(&o.row, VIEW_ROW, p.rows, p.cols, place);
            ops->begin_step(&(Step){.seed = 1});
            ops->begin_micro_step(0);
            ops->measure(stats);
            ops->operand_from_tensor(&o, src, VIEW_ROW);
            ops->measure(NULL);
            ops->operand_from_tensor(&o, src, VIEW_ROW); /* no longer counted */
            CHECK(s->elements == want.elements && s->blocks == want.blocks && s->zeroed == want.zeroed &&
                      s->zero_blocks == want.zero_blocks,
                  "form %d: %ld elements, %ld blocks, %ld zeroed, %ld zero blocks", form, (long)s->elements,
                  (long)s->blocks, (long)s->zeroed, (long)s->zero_blocks);
            CHECK(fabs(s->error2 - want.error2) <= 1e-12 * want.error2, "form %d: error %g not %g", form, s->error2,
                  want.error2);
            CHECK(fabs(s->signal2 - want.signal2) <= 1e-12 * want.signal2, "form %d: signal", form);
            CHECK(form / 2 != 2 || s->clipped == 0, "form %d: headroom leaves nothing to clip, %ld", form,
                  (long)s->clipped);
            CHECK(form / 2 == 2 || form % 3 || s->clipped > 0, "form %d: some clip without headroom", form);
            free(place);
        }
        free(src.data), free(back);
        free(e.codes), free(e.scales), free(e.x);
    }
    free(stats);
}

int main(void)
{
    test_case("every instruction set of this machine is tried");
    for (int s = 0; s < 4; s++)
        if (!open_isa(ISAS[s], 1, 16, 16)) printf("skipped %s: not on this machine\n", ISAS[s]);
    CHECK(open_isa("portable", 1, 16, 16) != NULL, "portable is everywhere");

    for (int class = 0; class < CLASSES; class ++) {
        test_case(CLASS_NAME[class]);
        for (int form = 0; form < FORMS; form++) {
            Problem p = {.rows = 48, .cols = 80, .dtype = DTYPE_BF16, .class = class};
            set_form(&p, form);
            run_problem(&p);
        }
    }
    test_case("sizes that are not multiples of 16 or 128; one view only");
    for (int round = 0; round < (test_long() ? 2000 : 150); round++) {
        static const int64_t EDGE[] = {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 96, 127, 128, 129, 145};
        Problem p = {.dtype = DTYPE_BF16, .class = (Class)(random_bits() % CLASSES)};
        set_form(&p, round % FORMS);
        p.rows = EDGE[random_bits() % 16];
        p.cols = EDGE[random_bits() % 16];
        if (p.col.rht) p.rows = round_up(p.rows, 16); /* the transform is over 16 whole tokens */
        p.views = 1 + (unsigned)(random_bits() % 3);
        run_problem(&p);
    }
    test_case("FP32 masters are rounded to BF16 first");
    for (int form = 0; form < FORMS; form++) {
        Problem p = {.rows = 33, .cols = 50, .dtype = DTYPE_FP32, .class = (Class)(form % CLASSES)};
        set_form(&p, form);
        if (p.row.nvfp4.rounding == ROUND_STOCHASTIC || p.col.rht) continue;
        run_problem(&p);
    }
    test_parts();
    test_measure();
    free(memory);
    return test_done();
}
