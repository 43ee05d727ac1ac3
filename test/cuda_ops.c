/* The CUDA backend's operations: the cases of the CPU's (ops_cases.h, attention_cases.h) within the same bounds, and
 * the CPU's bits where the order of every sum is one. Built and run by test_cuda_ops.sh, on a CPU that plays the GPU
 * or on a GPU.
 *
 *     cuda_ops [NAME...]      only cases whose names contain one of these
 *
 * Shapes come in three kinds, one after the other: any; multiples of 16 columns, which kernels read 16 bytes at a
 * time; and rows longer than a warp keeps in registers. Then shapes that the CPU has no need of: many tiles of tokens,
 * large vocabularies.
 */
#include "attention_cases.h"
#include "ops_cases.h"
#include "quantize_cases.h"

#include "cuda/backend.h"

/* ---- one case on CUDA, and on the CPU where the bits are the same ---- */

typedef struct {
    const char *name;
    void (*one)(Run *);
    int rounds;
    bool exact;
    bool nan_spills; /* on the CPU a NaN reaches others of its block, here not all of those */
} CudaCase;

static Run run_of(int round)
{
    Run run = {.act = round % 2 ? DTYPE_BF16 : DTYPE_FP32, .hostile = round / 2 % 3 == 2, .round = round};
    run.random = 0x9E3779B97F4A7C15u * (uint64_t)(round + 1);
    run.cols_multiple = round / 2 % 2 ? 16 : 1;
    run.cols_factor = round % 8 >= 6 ? 20 : 1;
    return run;
}

static uint64_t all_bits; /* of all results but NaN's: threads in another order must come to the same */

static void add_bits(const Run *run)
{
    for (int i = 0; i < run->blocks && !run->hostile; i++)
        if (run->block[i].name) all_bits = hash64(on_host(run->block[i].t.data), run->block[i].bytes, all_bits);
}

/* In hostile rounds: what is not finite on one is not on the other, but where it is near overflow. */
static void check_finite(const Run *first, const Run *run, bool spills)
{
    for (int i = 0; i < run->blocks; i++) {
        const HarnessBlock *a = &first->block[i], *b = &run->block[i];
        for (int64_t k = 0; b->name && k < b->t.rows * b->t.cols; k++) {
            double x = get(a->t, k / b->t.cols, k % b->t.cols), y = get(b->t, k / b->t.cols, k % b->t.cols);
            bool same = isfinite(x) ? isfinite(y) || fabs(x) > 1e37 : !isfinite(y) || fabs(y) > 1e37 || spills;
            if (!CHECK(same, "round %d, %s: %s [%ld,%ld] is %g, not %g", run->round,
                       run->act == DTYPE_BF16 ? "bf16" : "fp32", b->name, (long)(k / b->t.cols), (long)(k % b->t.cols),
                       y, x))
                break;
        }
    }
}

static void on_cuda(const CudaCase *c, int rounds)
{
    for (int round = 0; round < rounds; round++) {
        Run first = run_of(round), run = first;
        if (c->exact || run.hostile) {
            harness_open(&first, "portable", 1);
            c->one(&first);
            check_memory(&first);
        }
        harness_open(&run, "cuda", 1);
        run.reference = true;
        c->one(&run);
        check_memory(&run);
        check_expected(&run);
        add_bits(&run);
        if (c->exact) check_bits(&first, &run);
        if (run.hostile && !c->exact) check_finite(&first, &run, c->nan_spills);
        run_free(&run);
        run_free(&first);
    }
}

/* ---- cases of its own ---- */

/* More tiles of tokens than are read at once when their sums are added. */
static void case_many_tiles(Run *run) { gradient_case(run, pick(run, 2100, 2600), pick(run, 1, 20), true); }

/* More vocabulary rows than one round of the scan takes. */
static void case_large_vocabulary(Run *run) { embedding_case(run, pick(run, 1, 3), 20096, 8); }
/* More tokens of one row, and of one position, than are read at once. */
static void case_many_sequences(Run *run) { embedding_case(run, pick(run, 20, 60), 128, pick(run, 1, 2) * 8); }
static void case_long_rows(Run *run) { softmax_case(run, 3, pick(run, 8000, 20000)); }
static void case_many_losses(Run *run) { loss_sum_case(run, pick(run, 4000, 10000)); }

static void case_finish_step(Run *run)
{
    Step step = {.grad_clip = coin(run) ? 1.0f : 0};
    int64_t pieces = coin(run) ? pick(run, 1, 40) : pick(run, 1000, 5000), micro_batches = pick(run, 1, 4);
    double *piece = values(pieces), loss[4];
    for (int64_t i = 0; i < pieces; i++) piece[i] = exp(normal(run)) * (run->round % 4 < 2 ? 1e-6 : 1);
    for (int j = 0; j < 4; j++) loss[j] = 1000 * normal(run);
    if (run->hostile) *(coin(run) ? &piece[pieces - 1] : &loss[0]) = coin(run) ? (double)INFINITY : (double)NAN;
    Tensor out = output(run, "result", DTYPE_INT32, 3, 2);
    double *pieces_there = constant(run, piece, (size_t)pieces * sizeof *piece);
    double *loss_there = constant(run, loss, sizeof loss);
    ops(run)->begin_step(&step);
    ops(run)->finish_step((StepResult *)out.data, pieces_there, pieces, loss_there, micro_batches, 8192);
    get_double(out, 0);
    get_double(out, 1);
    free(piece);
}

static void case_not_finite(Run *run) /* adamw does nothing */
{
    Step step = {11, 3, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.5f, 2.5f, 1, 1};
    StepResult result = {.loss = NAN, .clip = 1, .finite = 0};
    Tensor t[4];
    for (int i = 0; i < 4; i++) t[i] = input(run, i ? DTYPE_FP32 : run->act, 5, 48, 1);
    ParamSlice p = {.master = t[0], .grad = t[1], .m = t[2], .v = t[3], .role = 40};
    StepResult *of_step = constant(run, &result, sizeof result);
    ops(run)->begin_step(&step);
    ops(run)->adamw(&p, of_step);
}

/* After a step that was not finite no later one changes a weight, whatever it came to. */
static void case_never_again(Run *run)
{
    Step step = {11, 3, 1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1.5f, 2.5f, 1, 1};
    StepResult finite = {.loss = 1, .clip = 1, .finite = 1};
    double piece = 1, loss = run->round % 2 ? (double)NAN : (double)INFINITY;
    Tensor out = output(run, "result", DTYPE_INT32, 3, 2), t[4];
    double *piece_there = constant(run, &piece, sizeof piece), *loss_there = constant(run, &loss, sizeof loss);
    for (int i = 0; i < 4; i++) t[i] = input(run, i ? DTYPE_FP32 : run->act, 5, 48, 1);
    ParamSlice p = {.master = t[0], .grad = t[1], .m = t[2], .v = t[3], .role = 40};
    StepResult *of_step = constant(run, &finite, sizeof finite);
    ops(run)->begin_step(&step);
    ops(run)->finish_step((StepResult *)out.data, piece_there, 1, loss_there, 1, 1);
    ops(run)->begin_step(&step);
    ops(run)->adamw(&p, of_step);
}

/* Attention of tiles in shared memory: every head size with every length, at the edges of blocks and of fragments; with
 * one, two and four query heads a key head, with documents and within a cache. */
static Attention tiles_attention(Run *run)
{
    static const int64_t LENGTH[] = {1, 7, 64, 65, 130};
    int64_t i = run->round / 2;
    run->hostile = false;
    Attention a = {.B = 1 + i / 2 % 2, .Tq = LENGTH[i % 5], .NKV = 1 + i / 4 % 2, .HD = 16 + 16 * (i % 8)};
    if (run->act == DTYPE_FP32) a.Tq = LENGTH[i % 4];
    a.NH = a.NKV << i / 3 % 3;
    a.Tk = a.Tq;
    return a;
}

static void case_tiles_forward(Run *run)
{
    Attention a = tiles_attention(run);
    if (run->round / 2 % 4 < 2) {
        a.position0 = pick(run, 0, 150);
        a.Tk = a.position0 + a.Tq + pick(run, 0, 70);
    }
    add_documents(run, &a);
    attention_forward_case(run, a, 8);
}

static void case_tiles_backward(Run *run)
{
    Attention a = tiles_attention(run);
    add_documents(run, &a);
    attention_backward_case(run, a);
}

/* ---- all of them ---- */

static const CudaCase MORE_CASES[] = {
    {"sums over many tiles", case_many_tiles, 4, true, false},
    {"embeddings of a large vocabulary", case_large_vocabulary, 4, false, false},
    {"embeddings of many sequences", case_many_sequences, 6, false, false},
    {"softmax of long rows", case_long_rows, 6, false, false},
    {"sum of many losses", case_many_losses, 4, true, false},
    {"finish_step", case_finish_step, 18, true, false},
    {"adamw after a step that is not finite", case_not_finite, 4, false, false},
    {"adamw after an earlier step that was not finite", case_never_again, 4, false, false},
    {"quantize a tensor", case_quantize_tensor, 60, true, false},
    {"quantize a norm", case_quantize_norm, 40, true, false},
    {"quantize an activation", case_quantize_activation, 40, true, false},
    {"quantize a gradient", case_quantize_gradient, 40, true, false},
    {"quantize a gradient of an activation", case_quantize_activation_backward, 60, true, false},
    {"quantize a weight", case_quantize_weight, 60, true, false},
    {"quantize a weight by parts", case_pack_weight, 30, true, false},
    {"qk_norm_rope_forward", case_rope_forward, 18, false, false},
    {"qk_norm_rope_backward", case_rope_backward, 18, false, false},
    {"attention_forward", case_attention_forward, 12, false, true},
    {"attention_backward", case_attention_backward, 10, false, true},
    {"attention_forward of tiles", case_tiles_forward, 80, false, true},
    {"attention_backward of tiles", case_tiles_backward, 80, false, true}};

static char **asked;

static bool wanted(const char *name)
{
    for (int i = 0; asked[i]; i++)
        if (strstr(name, asked[i])) return true;
    return !asked[0];
}

static void one_case(CudaCase c)
{
    if (!wanted(c.name)) return;
    test_case(c.name);
    on_cuda(&c, c.rounds * (test_long() ? 4 : 1));
}

static int open_once(const Ops **ops, Error *error)
{
    static const Ops *opened;
    if (!opened && cuda_open(&opened, "auto", 1, error)) return -1;
    *ops = opened;
    return 0;
}

int main(int argc, char **argv)
{
    asked = argv + (argc > 0);
    harness.open = open_once;
    quantize_unpack = cuda_weight_unpack;
#ifndef CUDA_ON_CPU
    harness.guard = HARNESS_GUARD; /* cuda_on_cpu knows where every block ends */
#endif
    for (int i = 0; i < OPS_CASE_COUNT; i++)
        one_case((CudaCase){OPS_CASES[i].name, OPS_CASES[i].one, OPS_CASES[i].rounds, OPS_CASES[i].exact, false});
    for (size_t i = 0; i < sizeof MORE_CASES / sizeof *MORE_CASES; i++) one_case(MORE_CASES[i]);
    for (int act = 0; act < 2; act++) {
        const char *name = act ? "bf16: documents alone, NaN" : "fp32: documents alone, NaN";
        if (!wanted(name)) continue;
        test_case(name);
        test_document_alone("cuda", (DType)act, 20);
        test_document_alone("cuda", (DType)act, 64);
        test_nan("cuda", (DType)act, act ? 16 : 10);
    }
    harness_report();
    printf("measured bits: %016llx\n", (unsigned long long)all_bits);
    return test_done();
}
