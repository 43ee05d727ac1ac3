/* Matrix-product rate of every instruction set here at the shapes of GPT-2 124M, against the FP32 peak of the machine
 * measured beside it (a loop of independent fma in registers).
 *
 *     make bench && build/bench/bench_gemm [repetitions]          CSV: isa,dtype,M,K,N,median,best,share of peak
 *
 * GFLOP/s, packing included, all cores, medians of interleaved repetitions.
 */
#include <stdio.h>
#include <stdlib.h>

#include "cpu/backend.h"
#include "cpu/cpu.h"
#include "numerics.h"

static const char *const ISAS[] = {"portable", "avx2", "avx512", "amx"};
static const int64_t SHAPES[][3] = {
    {1024, 768, 3072}, {1024, 768, 768}, {1024, 3072, 768}, {4096, 768, 3072}, {4096, 3072, 768}};
enum { VARIANTS = 7, MAX_REPETITIONS = 64 };

#ifdef __x86_64__
/* Twelve independent chains in registers: enough for two units of latency four. What they hold does not matter. */
#define CHAIN(n) "vfmadd231ps %%zmm31, %%zmm31, %%zmm" #n "\n"
__attribute__((target("avx512f"))) static double peak_thread(void)
{
    double start = now_seconds();
    int64_t rounds = 0;
    __asm__ volatile("vpxorq %%zmm31, %%zmm31, %%zmm31" ::: "xmm31");
    for (; now_seconds() - start < 0.1; rounds++)
        for (int n = 0; n < 10000; n++)
            __asm__ volatile(CHAIN(16) CHAIN(17) CHAIN(18) CHAIN(19) CHAIN(20) CHAIN(21) CHAIN(22) CHAIN(23) CHAIN(24)
                                 CHAIN(25) CHAIN(26) CHAIN(27)::
                                     : "xmm16", "xmm17", "xmm18", "xmm19", "xmm20", "xmm21", "xmm22", "xmm23", "xmm24",
                                       "xmm25", "xmm26", "xmm27");
    return (double)rounds * 10000 * 12 * 32 / (now_seconds() - start) * 1e-9;
}
#else
static double peak_thread(void) { return 0; }
#endif

static double peak(void)
{
    double total = 0;
#pragma omp parallel reduction(+ : total)
    total += peak_thread();
    return total;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int repetitions = argc > 1 ? atoi(argv[1]) : 7;
    if (repetitions < 1 || repetitions > MAX_REPETITIONS) die_usage("repetitions: 1 to %d", MAX_REPETITIONS);
    Need need = {.N = 64, .T = 64, .cols = 64, .V = 64, .head_dim = 16, .group = 1};
    size_t elements = 4096 * 3072;
    float *a = xcalloc(elements, 4), *b = xcalloc(elements, 4), *c = xcalloc(elements, 4);
    printf("isa,dtype,M,K,N,median_gflops,best_gflops,share_of_fp32_peak\n");

    for (size_t shape = 0; shape < sizeof SHAPES / sizeof *SHAPES; shape++) {
        int64_t M = SHAPES[shape][0], K = SHAPES[shape][1], N = SHAPES[shape][2];
        double rate[VARIANTS][MAX_REPETITIONS], peaks[MAX_REPETITIONS];
        for (int r = 0; r < repetitions; r++) {
            peaks[r] = peak();
            for (int variant = 0; variant < VARIANTS; variant++) {
                const char *isa = ISAS[variant / 2];
                DType dtype = variant == 6 ? DTYPE_BF16 : (DType)(variant % 2);
                const Ops *ops;
                rate[variant][r] = 0;
                if (variant < 2 || cpu_open(&ops, isa, 0, NULL)) continue; /* portable: seconds a product */
                size_t bytes = ops->workspace_bytes(&need);
                void *memory = ops->alloc(bytes);
                ops->workspace_set(memory, &need);
                for (size_t i = 0; i < elements; i++) { /* BF16 reads the lower half: finite too */
                    uint32_t bits = (uint32_t)(i * 2654435761u);
                    uint16_t low = (uint16_t)(0x3f00 | (bits >> 24 & 0x7f)),
                             high = (uint16_t)(0x3f00 | (bits >> 16 & 0x7f));
                    ((uint32_t *)a)[i] = ((uint32_t *)b)[i] = (uint32_t)high << 16 | low;
                }
                GemmInput in_a = {.data = a, .dtype = dtype, .ld = K, .k_contiguous = true}, in_b = in_a;
                in_b.data = b;
                GemmOutput out = {.data = c, .dtype = DTYPE_FP32, .ld = N, .alpha = 1};
                gemm(&cpu.gemm[dtype], &cpu.workspace, M, N, K, in_a, in_b, out);
                double start = now_seconds();
                gemm(&cpu.gemm[dtype], &cpu.workspace, M, N, K, in_a, in_b, out);
                rate[variant][r] = 2.0 * (double)(M * N * K) / (now_seconds() - start) * 1e-9;
                ops->free(memory, bytes);
            }
        }
        qsort(peaks, (size_t)repetitions, sizeof *peaks, compare_doubles);
        for (int variant = 2; variant < VARIANTS; variant++) {
            qsort(rate[variant], (size_t)repetitions, sizeof(double), compare_doubles);
            double median = rate[variant][repetitions / 2], best = rate[variant][repetitions - 1];
            printf("%s,%s,%lld,%lld,%lld,%.1f,%.1f,%.2f\n", ISAS[variant / 2],
                   variant == 6 || variant % 2 ? "bf16" : "fp32", (long long)M, (long long)K, (long long)N, median,
                   best, median / peaks[repetitions / 2]);
        }
        printf("peak,fp32,%lld,%lld,%lld,%.1f,%.1f,1.00\n", (long long)M, (long long)K, (long long)N,
               peaks[repetitions / 2], peaks[repetitions - 1]);
    }
    free(a), free(b), free(c);
    return 0;
}
