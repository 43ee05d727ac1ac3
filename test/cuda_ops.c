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

int cuda_open(const Ops **ops, Error *error); /* llmc/cuda/backend.cu */

/* ---- one case on CUDA, and on the CPU where the bits are the same ---- */

static Run run_of(int round)
{
    Run run = {.act = round % 2 ? DTYPE_BF16 : DTYPE_FP32, .hostile = round / 2 % 3 == 2, .round = round};
    run.random = 0x9E3779B97F4A7C15u * (uint64_t)(round + 1);
    run.cols_multiple = round / 2 % 2 ? 16 : 1;
    run.cols_factor = round % 8 >= 6 ? 20 : 1;
    return run;
}

/* In hostile rounds: what is not a number on one is not on the other. */
static void check_nan(const Run *first, const Run *run)
{
    for (int i = 0; i < run->blocks; i++) {
        const HarnessBlock *a = &first->block[i], *b = &run->block[i];
        for (int64_t k = 0; b->name && k < b->t.rows * b->t.cols; k++) {
            double x = get(a->t, k / b->t.cols, k % b->t.cols), y = get(b->t, k / b->t.cols, k % b->t.cols);
            if (!CHECK(isnan(x) == isnan(y), "round %d, %s: %s [%ld,%ld] is %g, not %g", run->round,
                       run->act == DTYPE_BF16 ? "bf16" : "fp32", b->name, (long)(k / b->t.cols), (long)(k % b->t.cols),
                       y, x))
                break;
        }
    }
}

static void on_cuda(void (*one)(Run *), int rounds, bool exact)
{
    for (int round = 0; round < rounds; round++) {
        Run first = run_of(round), run = first;
        if (exact || run.hostile) {
            harness_open(&first, "portable", 1);
            one(&first);
            check_memory(&first);
        }
        harness_open(&run, "cuda", 1);
        run.reference = true;
        one(&run);
        check_memory(&run);
        check_expected(&run);
        if (exact) check_bits(&first, &run);
        if (run.hostile && !exact) check_nan(&first, &run);
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

/* ---- all of them ---- */

typedef struct {
    const char *name;
    void (*one)(Run *);
    int rounds;
    bool exact;
} CudaCase;

static const CudaCase MORE_CASES[] = {{"sums over many tiles", case_many_tiles, 4, true},
                                      {"embeddings of a large vocabulary", case_large_vocabulary, 4, false},
                                      {"embeddings of many sequences", case_many_sequences, 6, false},
                                      {"softmax of long rows", case_long_rows, 6, false},
                                      {"sum of many losses", case_many_losses, 4, true},
                                      {"finish_step", case_finish_step, 18, true},
                                      {"adamw after a step that is not finite", case_not_finite, 4, false},
                                      {"adamw after an earlier step that was not finite", case_never_again, 4, false},
                                      {"qk_norm_rope_forward", case_rope_forward, 18, false},
                                      {"qk_norm_rope_backward", case_rope_backward, 18, false},
                                      {"attention_forward", case_attention_forward, 12, false},
                                      {"attention_backward", case_attention_backward, 10, false}};

static char **asked;

static bool wanted(const char *name)
{
    for (int i = 0; asked[i]; i++)
        if (strstr(name, asked[i])) return true;
    return !asked[0];
}

static void one_case(const char *name, void (*one)(Run *), int rounds, bool exact)
{
    if (!wanted(name)) return;
    test_case(name);
    on_cuda(one, rounds * (test_long() ? 4 : 1), exact);
}

int main(int argc, char **argv)
{
    asked = argv + (argc > 0);
    harness.open = cuda_open;
#ifndef CUDA_ON_CPU
    harness.guard = HARNESS_GUARD; /* cuda_on_cpu knows where every block ends */
#endif
    for (int i = 0; i < OPS_CASE_COUNT; i++)
        one_case(OPS_CASES[i].name, OPS_CASES[i].one, OPS_CASES[i].rounds, OPS_CASES[i].exact);
    for (size_t i = 0; i < sizeof MORE_CASES / sizeof *MORE_CASES; i++)
        one_case(MORE_CASES[i].name, MORE_CASES[i].one, MORE_CASES[i].rounds, MORE_CASES[i].exact);
    for (int act = 0; act < 2; act++) {
        const char *name = act ? "bf16: documents alone, NaN" : "fp32: documents alone, NaN";
        if (!wanted(name)) continue;
        test_case(name);
        test_document_alone("cuda", (DType)act);
        test_nan("cuda", (DType)act);
    }
    harness_report();
    return test_done();
}
