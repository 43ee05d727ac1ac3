/* Nanoseconds an element for quantizing an operand, on one thread, against reading it once (the largest magnitude of a
 * plain loop over BF16), for every instruction set here.
 *
 *     make bench && build/bench/bench_quantize [repetitions]     CSV: isa,form,ns per element and copy,ratio to reading
 *
 * Medians of interleaved repetitions; the operand is 1024 x 3072 BF16.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cpu/backend.h"
#include "cpu/cpu.h"

static const char *const ISAS[] = {"portable", "avx2", "avx512"};
enum { ROWS = 1024, COLS = 3072, MAX_REPETITIONS = 64, FORMS = 6 };

typedef struct {
    const char *name;
    unsigned views;
    Nvfp4Form form;
    bool rht;
} Form;
static const Form FORM[FORMS] = {
    {"row nearest", VIEW_ROW, {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}, false},
    {"row stochastic", VIEW_ROW, {ROUND_STOCHASTIC, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}, false},
    {"row and column nearest", 3, {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}, true},
    {"row and column stochastic", 3, {ROUND_STOCHASTIC, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1}, true},
    {"row and column pow2", 3, {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_POW2, FOUR_OVER_SIX_OFF, 1}, true},
    {"row 4/6", VIEW_ROW, {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_MAE, 1}, false}};

static int smaller(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static uint16_t read_once(const uint16_t *x, size_t n)
{
    uint16_t most = 0;
    for (size_t i = 0; i < n; i++) most = (x[i] & 0x7fff) > most ? x[i] & 0x7fff : most;
    return most;
}

int main(int argc, char **argv)
{
    int repetitions = argc > 1 ? atoi(argv[1]) : 7;
    if (repetitions < 1 || repetitions > MAX_REPETITIONS) die_usage("repetitions: 1 to %d", MAX_REPETITIONS);
    Need need = {.N = ROWS, .T = 64, .cols = COLS, .V = 64, .head_dim = 16, .group = 1, .weight_rows = ROWS};
    size_t elements = (size_t)ROWS * COLS;
    uint16_t *x = xmalloc(elements * sizeof *x);
    for (size_t i = 0; i < elements; i++) x[i] = (uint16_t)(0x3f00 + i * 7919 % 256 + (i * 104729 % 2 << 15));
    volatile uint16_t sink;
    printf("isa,form,ns,ratio\n");
    for (int s = 0; s < 3; s++) {
        static double ns[FORMS][MAX_REPETITIONS], reading[MAX_REPETITIONS];
        const Ops *ops;
        if (cpu_open(&ops, ISAS[s], 1, NULL)) continue;
        void *workspace = aligned_alloc(4096, (ops->workspace_bytes(&need) + 4095) / 4096 * 4096);
        ops->workspace_set(workspace, &need);
        ops->begin_step(&(Step){.seed = 1});
        ops->begin_micro_step(0);
        for (int r = -1; r < repetitions; r++) {
            int at = r < 0 ? 0 : r; /* the first touches memory */
            double start = now_seconds();
            sink = read_once(x, elements);
            reading[at] = (now_seconds() - start) * 1e9 / (double)elements;
            for (int f = 0; f < FORMS; f++) {
                Operand o = {.rows = ROWS, .cols = COLS};
                o.row.format = o.col.format = (ViewFormat){.format = FORMAT_NVFP4, .nvfp4 = FORM[f].form, .role = 70};
                o.col.format.rht = FORM[f].rht;
                static char *row, *col;
                if (!row) row = xmalloc(elements), col = xmalloc(elements);
                ops->view_place(&o.row, VIEW_ROW, ROWS, COLS, row);
                ops->view_place(&o.col, VIEW_COL, ROWS, COLS, col);
                start = now_seconds();
                ops->operand_from_tensor(&o, (Tensor){x, DTYPE_BF16, ROWS, COLS, COLS}, FORM[f].views);
                ns[f][at] = (now_seconds() - start) * 1e9 / (double)elements / (FORM[f].views == 3 ? 2 : 1);
            }
        }
        qsort(reading, (size_t)repetitions, sizeof *reading, smaller);
        for (int f = 0; f < FORMS; f++) {
            qsort(ns[f], (size_t)repetitions, sizeof *ns[f], smaller);
            printf("%s,%s,%.3f,%.1f\n", ISAS[s], FORM[f].name, ns[f][repetitions / 2],
                   ns[f][repetitions / 2] / reading[repetitions / 2]);
        }
        free(workspace);
    }
    (void)sink;
    free(x);
    return 0;
}
