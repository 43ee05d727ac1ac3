/* Matrix products at the shapes of GPT-2 124M: this project's on every instruction set here, and those of oneDNN and
 * OpenBLAS where they are installed.
 *
 *     make bench && build/bench/bench_gemm [--quick] [--repetitions N] [--csv FILE]
 *
 * CSV: library, dtypes of input and output, M, K, N, GFLOP/s (median and best), share of the machine's FP32 peak (a
 * loop of independent fma in registers, measured beside), and ours_over_this: how many times as fast our fastest
 * instruction set is in the same dtypes, the median of ratios within a repetition. A repetition asks every library once, one after
 * the other. All cores. Ours packs both inputs in every call; oneDNN has its weights packed before (its best case).
 * --quick: small shapes, to see that it works; its figures say nothing.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/backend.h"
#include "cpu/cpu.h"
#include "peers.h"

static const int64_t SHAPES[][3] = {
    {4096, 768, 2304}, {4096, 768, 768}, {4096, 768, 3072}, {4096, 3072, 768}, {4096, 768, 50304}};
static const int64_t QUICK_SHAPES[][3] = {{128, 96, 160}, {128, 160, 96}};
enum { MAX_REPETITIONS = 64 };

#ifdef __x86_64__
/* Twelve independent chains in registers, x = 0 * 0 + x: enough for two units of latency four. 10000 turns. */
#define FMA(v, x) "vfmadd231ps %%" v "0, %%" v "0, %%" v #x "\n"
#define TWELVE(OF, v)                                                                                                  \
    OF(v, 4) OF(v, 5) OF(v, 6) OF(v, 7) OF(v, 8) OF(v, 9) OF(v, 10) OF(v, 11) OF(v, 12) OF(v, 13) OF(v, 14) OF(v, 15)
#define CHAINS(v)                                                                                                      \
    __asm__ volatile("vzeroall\n movl $10000, %%ecx\n 1:\n" TWELVE(FMA, v) "decl %%ecx\n jnz 1b\n" ::                  \
                         : "ecx", "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",        \
                           "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15")

__attribute__((target("avx512f"))) static void chains_512(void) { CHAINS("zmm"); }
__attribute__((target("avx2,fma"))) static void chains_256(void) { CHAINS("ymm"); }

static double peak_thread(double seconds)
{
    bool wide = __builtin_cpu_supports("avx512f");
    double start = now_seconds();
    int64_t rounds = 0;
    if (!wide && !__builtin_cpu_supports("fma")) return 0;
    for (; now_seconds() - start < seconds; rounds++) wide ? chains_512() : chains_256();
    return (double)rounds * 10000 * 12 * (wide ? 32 : 16) / (now_seconds() - start) * 1e-9;
}
#else
static double peak_thread(double seconds) { return 0 * seconds; }
#endif

static double peak(double seconds)
{
    double total = 0;
#pragma omp parallel reduction(+ : total)
    total += peak_thread(seconds);
    return total;
}

/* ---- the sides: a product is opened (untimed), run, closed ---- */

static struct { /* ours, of the open instruction set */
    const Ops *ops;
    void *memory;
    size_t bytes;
} ours;

static bool ours_open(const char *isa, const Product *p)
{
    Need need = {.N = 64, .T = 64, .cols = 64, .V = 64, .head_dim = 16, .group = 1};
    Error error;
    if (strcmp(isa, "amx") == 0 && p->in == DTYPE_FP32) return false; /* that is avx512 */
    if (cpu_open(&ours.ops, isa, 0, &error)) return false;
    ours.bytes = ours.ops->workspace_bytes(&need);
    ours.memory = ours.ops->alloc(ours.bytes);
    ours.ops->workspace_set(ours.memory, &need);
    return true;
}

static void ours_run(const Product *p)
{
    GemmInput a = {.data = p->a, .dtype = p->in, .ld = p->K, .k_contiguous = true}, b = a;
    b.data = p->b;
    gemm(&cpu.gemm[p->in], &cpu.workspace, p->M, p->N, p->K, a, b,
         (GemmOutput){.data = p->c, .dtype = p->out, .ld = p->N, .alpha = 1});
}

static void ours_close(void) { ours.ops->free(ours.memory, ours.bytes); }

/* OpenBLAS by its C interface: cblas_sgemm(row major, A as it is, B transposed, ...); sbgemm where it was built in. */
enum { ROW_MAJOR = 101, AS_IT_IS = 111, TRANSPOSED = 112 };
static struct {
    void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
    void (*sbgemm)(int, int, int, int, int, int, float, const uint16_t *, int, const uint16_t *, int, float, float *,
                   int);
    void (*set_threads)(int);
} blas;

static void blas_load(void)
{
    void *library = dlopen("libopenblas.so.0", RTLD_NOW | RTLD_LOCAL);
    if (!library) library = dlopen("libopenblas.so", RTLD_NOW | RTLD_LOCAL);
    if (!library) return;
    *(void **)&blas.sgemm = dlsym(library, "cblas_sgemm");
    *(void **)&blas.sbgemm = dlsym(library, "cblas_sbgemm");
    *(void **)&blas.set_threads = dlsym(library, "openblas_set_num_threads");
}

static bool blas_open(const char *isa, const Product *p)
{
    (void)isa;
    if (!blas.sgemm || !blas.set_threads || p->out != DTYPE_FP32 || (p->in == DTYPE_BF16 && !blas.sbgemm)) return false;
    blas.set_threads(cpu_threads());
    return true;
}

static void blas_run(const Product *p)
{
    int M = (int)p->M, N = (int)p->N, K = (int)p->K;
    if (p->in == DTYPE_FP32)
        blas.sgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, M, N, K, 1, p->a, K, p->b, K, 0, p->c, N);
    else
        blas.sbgemm(ROW_MAJOR, AS_IT_IS, TRANSPOSED, M, N, K, 1, p->a, K, p->b, K, 0, p->c, N);
}

static void blas_close(void) {}

static const struct {
    const char *name, *isa; /* isa: of ours */
    bool (*open)(const char *isa, const Product *p);
    void (*run)(const Product *p);
    void (*close)(void);
} SIDES[] = {{"ours avx2", "avx2", ours_open, ours_run, ours_close},
             {"ours avx512", "avx512", ours_open, ours_run, ours_close},
             {"ours amx", "amx", ours_open, ours_run, ours_close},
             {"onednn", NULL, dnnl_open, dnnl_run, dnnl_close},
             {"openblas", NULL, blas_open, blas_run, blas_close}};
enum { SIDE_COUNT = sizeof SIDES / sizeof *SIDES };

/* ---- measuring ---- */

static const struct {
    DType in, out;
    const char *text;
} DTYPES[] = {{DTYPE_FP32, DTYPE_FP32, "fp32,fp32"},
              {DTYPE_BF16, DTYPE_BF16, "bf16,bf16"},
              {DTYPE_BF16, DTYPE_FP32, "bf16,fp32"}};
enum { DTYPE_PAIRS = sizeof DTYPES / sizeof *DTYPES };

/* GFLOP/s of one side, or 0 where it has no such product: a first run, then runs for at least 20 ms. */
static double rate(int side, const Product *p)
{
    int runs = 0;
    if (!SIDES[side].open(SIDES[side].isa, p)) return 0;
    SIDES[side].run(p);
    double start = now_seconds(), elapsed = 0;
    for (; elapsed < 0.02; runs++, elapsed = now_seconds() - start) SIDES[side].run(p);
    SIDES[side].close();
    return runs * 2.0 * (double)p->M * (double)p->N * (double)p->K / elapsed * 1e-9;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *x, int n) /* sorts */
{
    qsort(x, (size_t)n, sizeof *x, compare_doubles);
    return x[n / 2];
}

/* Values in [0.5, 1), sign by chance: finite in either dtype, sums that stay small. */
static void fill(void *data, DType dtype, size_t elements)
{
    for (size_t i = 0; i < elements; i++) {
        uint32_t bits = (uint32_t)(i * 2654435761u), high = (bits & 0x8000) | 0x3f00 | (bits >> 24 & 0x7f);
        if (dtype == DTYPE_BF16)
            ((uint16_t *)data)[i] = (uint16_t)high;
        else
            ((uint32_t *)data)[i] = high << 16;
    }
}

static double element(const Product *p, int64_t i)
{
    return p->out == DTYPE_BF16 ? (double)bf16_to_f32(((uint16_t *)p->c)[i]) : (double)((float *)p->c)[i];
}

/* Do all sides multiply the same matrices? Some elements of the result, against sums in FP64; the limit is that of FP32
 * sums in any order. */
static void check(const char *name, const Product *p)
{
    for (int64_t i = 0; i < p->M; i += p->M / 3)
        for (int64_t j = 0; j < p->N; j += p->N / 3) {
            double sum = 0, size = 0;
            for (int64_t k = 0; k < p->K; k++) {
                const void *a = p->a, *b = p->b;
                int64_t x = i * p->K + k, y = j * p->K + k;
                double term = p->in == DTYPE_BF16 ? (double)bf16_to_f32(((const uint16_t *)a)[x]) *
                                                        (double)bf16_to_f32(((const uint16_t *)b)[y])
                                                  : (double)((const float *)a)[x] * (double)((const float *)b)[y];
                sum += term;
                size += term < 0 ? -term : term;
            }
            double difference = element(p, i * p->N + j) - sum,
                   limit = size * (double)(p->K + 2) * 0x1p-24 +
                           (p->out == DTYPE_BF16 ? 0.005 * (sum < 0 ? -sum : sum) : 0);
            if (!(difference <= limit && -difference <= limit))
                die("%s: element %lld, %lld is off by %g", name, (long long)i, (long long)j, difference);
        }
}

static void bench(FILE *csv, const int64_t *shape, int pair, int repetitions, bool quick)
{
    static double gflops[SIDE_COUNT][MAX_REPETITIONS], fastest[MAX_REPETITIONS], peaks[MAX_REPETITIONS];
    Product p = {.M = shape[0], .K = shape[1], .N = shape[2], .in = DTYPES[pair].in, .out = DTYPES[pair].out};
    p.a = xcalloc((size_t)(p.M * p.K), dtype_bytes(p.in));
    p.b = xcalloc((size_t)(p.N * p.K), dtype_bytes(p.in));
    p.c = xcalloc((size_t)(p.M * p.N), dtype_bytes(p.out));
    fill(p.a, p.in, (size_t)(p.M * p.K));
    fill(p.b, p.in, (size_t)(p.N * p.K));
    for (int r = 0; r < repetitions; r++) {
        peaks[r] = peak(quick ? 0.01 : 0.1);
        fastest[r] = 0;
        for (int side = 0; side < SIDE_COUNT; side++) {
            memset(p.c, 0xff, (size_t)(p.M * p.N) * dtype_bytes(p.out)); /* NaN */
            gflops[side][r] = rate(side, &p);
            if (gflops[side][r] > 0 && r == 0) check(SIDES[side].name, &p);
            if (SIDES[side].isa && gflops[side][r] > fastest[r]) fastest[r] = gflops[side][r];
        }
    }
    double machine = median(peaks, repetitions);
    for (int side = 0; side < SIDE_COUNT; side++) {
        double ratio[MAX_REPETITIONS];
        if (gflops[side][0] == 0) {
            if (shape == SHAPES[0] || shape == QUICK_SHAPES[0])
                fprintf(stderr, "skipped %s %s: not here\n", SIDES[side].name, DTYPES[pair].text);
            continue;
        }
        for (int r = 0; r < repetitions; r++) ratio[r] = fastest[r] / gflops[side][r];
        double middle = median(gflops[side], repetitions);
        fprintf(csv, "%s,%s,%lld,%lld,%lld,%.2f,%.2f,%.3f,%.3f\n", SIDES[side].name, DTYPES[pair].text, (long long)p.M,
                (long long)p.K, (long long)p.N, middle, gflops[side][repetitions - 1],
                machine > 0 ? middle / machine : 0, median(ratio, repetitions));
    }
    fflush(csv);
    free(p.a), free(p.b), free(p.c);
}

int main(int argc, char **argv)
{
    int repetitions = 7;
    bool quick = false;
    FILE *csv = stdout;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--repetitions") == 0 && i + 1 < argc)
            repetitions = atoi(argv[++i]);
        else if (strcmp(argv[i], "--csv") == 0 && i + 1 < argc) {
            if (!(csv = fopen(argv[++i], "w"))) die("%s: cannot write", argv[i]);
        } else
            die_usage("%s: options are --quick, --repetitions N, --csv FILE", argv[i]);
    }
    if (repetitions < 5 || repetitions > MAX_REPETITIONS) die_usage("repetitions: 5 to %d", MAX_REPETITIONS);
    blas_load();
    if (!dnnl_there()) fprintf(stderr, "skipped onednn: built without it (apt install libdnnl-dev, make bench)\n");
    if (!blas.sgemm) fprintf(stderr, "skipped openblas: no libopenblas.so.0 (apt install libopenblas-dev)\n");

    fprintf(csv, "library,input,output,M,K,N,median_gflops,best_gflops,share_of_fp32_peak,ours_over_this\n");
    const int64_t(*shapes)[3] = quick ? QUICK_SHAPES : SHAPES;
    int count = quick ? (int)(sizeof QUICK_SHAPES / sizeof *QUICK_SHAPES) : (int)(sizeof SHAPES / sizeof *SHAPES);
    for (int shape = 0; shape < count; shape++)
        for (int pair = 0; pair < DTYPE_PAIRS; pair++) bench(csv, shapes[shape], pair, repetitions, quick);
    return csv != stdout && fclose(csv) ? 1 : 0;
}
