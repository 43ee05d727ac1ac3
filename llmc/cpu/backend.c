/* Choosing the instruction set at run time, and the operations that need no vector code: memory, the step.
 *
 * AMX uses the AVX-512 objects for everything but the BF16 matrix product. Its tile registers are off until the process
 * asks the kernel for them (arch_prctl ARCH_REQ_XCOMP_PERM, Linux 5.16).
 */
#include "backend.h"

#include "cpu.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#endif

CpuState cpu;
static Ops ops;             /* the open table */
static const char *ops_isa; /* its instruction set */

/* ---- instruction sets, best last ---- */

extern const CpuTable cpu_table_portable;

static bool have_portable(void) { return true; }

#ifdef __x86_64__
extern const CpuTable cpu_table_avx2, cpu_table_avx512;

static bool have_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

static bool have_avx512(void)
{
    return have_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

static bool have_amx(void)
{
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a = 7, b, c = 0, d; /* CPUID leaf 7: EDX bit 24 AMX-TILE, bit 22 AMX-BF16 */
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    bool tiles = d >> 24 & 1 && d >> 22 & 1;
    return tiles && have_avx512() && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

static const struct {
    const char *name;
    bool (*available)(void);
    const CpuTable *table;
} ISAS[] = {
    {"portable", have_portable, &cpu_table_portable},
#ifdef __x86_64__
    {"avx2", have_avx2, &cpu_table_avx2},
    {"avx512", have_avx512, &cpu_table_avx512},
    {"amx", have_amx, &cpu_table_avx512},
#endif
};
enum { ISA_COUNT = sizeof ISAS / sizeof *ISAS };

static int choose_isa(const char *name, Error *error)
{
    char names[64] = "";
    int best = -1, asked = -1;
    for (int i = 0; i < ISA_COUNT; i++) {
        if (!ISAS[i].available()) continue;
        best = i;
        if (strcmp(ISAS[i].name, name) == 0) asked = i;
        strcat(strcat(names, *names ? ", " : ""), ISAS[i].name);
    }
    if (strcmp(name, "auto") == 0) return best;
    if (asked < 0) error_set(error, "isa %s: not on this machine; it has %s (or --isa auto)", name, names);
    return asked;
}

/* ---- memory ---- */

static void *cpu_alloc(size_t bytes)
{
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        die("out of memory: %.2f GiB: %s; make batch or seq_len smaller, or --recompute block", (double)bytes / 0x1p30,
            strerror(errno));
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes, MADV_HUGEPAGE);
#endif
    return memory;
}

static void cpu_free(void *memory, size_t bytes) { munmap(memory, bytes); }

static size_t partial_bytes(const Need *need)
{
    return (size_t)(ceil_div(need->N, SUM_ROWS) * 2 * need->cols) * sizeof(float) + 64;
}

static size_t sorted_bytes(const Need *need)
{
    return (size_t)(round_up(need->V, 128) + 1 + need->N) * sizeof(int32_t) + 64;
}

/* What quantizing needs: rows and columns of the largest operand. */
static int64_t quantized_rows(const Need *need) { return round_up(max_i64(need->N, need->weight_rows), 16); }

static size_t source_bytes(const Need *need)
{
    return need->weight_rows ? (size_t)(need->N * need->cols) * sizeof(uint16_t) : 0;
}

static size_t pending_scales_bytes(const Need *need)
{
    size_t blocks = (size_t)(quantized_rows(need) * ceil_div(need->cols, NVFP4_BLOCK));
    return need->weight_rows ? 2 * blocks * sizeof(uint16_t) : 0;
}

static size_t tile_stats_bytes(const Need *need)
{
    return need->weight_rows ? (size_t)(quantized_rows(need) / 16) * sizeof(QuantStats) : 0;
}

static const CpuTable *open_table(void)
{
    for (int i = 0; i < ISA_COUNT; i++)
        if (ops_isa == ISAS[i].name) return ISAS[i].table;
    die("cpu: no open backend; this is a bug");
}

static size_t aligned(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

static size_t cpu_workspace_bytes(const Need *need)
{
    return aligned(gemm_workspace_bytes(cpu.gemm, cpu.threads)) + aligned(partial_bytes(need)) +
           aligned(sorted_bytes(need)) + aligned(source_bytes(need)) + aligned(pending_scales_bytes(need)) +
           aligned(tile_stats_bytes(need)) + (size_t)cpu.threads * open_table()->attention_bytes(need, cpu.gemm);
}

static void cpu_workspace_set(void *memory, const Need *need)
{
    char *p = memory;
    if (need->native_rounding) die_usage("native_rounding: only some GPUs have it");
    gemm_workspace_set(&cpu.workspace, cpu.gemm, cpu.threads, p);
    p += aligned(gemm_workspace_bytes(cpu.gemm, cpu.threads));
    cpu.partial = (float *)p;
    p += aligned(partial_bytes(need));
    cpu.sorted = (int32_t *)p;
    p += aligned(sorted_bytes(need));
    cpu.source = (uint16_t *)p;
    p += aligned(source_bytes(need));
    cpu.pending_scales = (uint16_t *)p;
    p += aligned(pending_scales_bytes(need));
    cpu.tile_stats = (QuantStats *)p;
    p += aligned(tile_stats_bytes(need));
    cpu.attention = p;
    cpu.attention_bytes = open_table()->attention_bytes(need, cpu.gemm);
}

static void cpu_copy_host(void *dst, const void *src, size_t bytes) { memcpy(dst, src, bytes); }

static void cpu_zero(Tensor t)
{
    if (t.rows == 1) { /* a bucket: as rows of 4096, so that threads share it */
        int64_t rows = t.cols / 4096;
        Tensor rest = tensor_cols(t, rows * 4096, t.cols - rows * 4096);
        memset(rest.data, 0, tensor_bytes(rest));
        t = (Tensor){t.data, t.dtype, rows, 4096, 4096};
    }
#pragma omp parallel for schedule(static) num_threads(cpu.threads)
    for (int64_t r = 0; r < t.rows; r++)
        memset((char *)t.data + (size_t)(r * t.ld) * dtype_bytes(t.dtype), 0, (size_t)t.cols * dtype_bytes(t.dtype));
}

/* ---- the peak: the kernel's own micro-tiles on panels that stay in the cache, on all threads at once ---- */

static double peak_of_thread(const GemmKernel *kernel, double seconds)
{
    int64_t rows = 2 * kernel->mr, cols = 2 * kernel->nr, ks = min_i64(kernel->kc, 256);
    size_t panel = (size_t)(max_i64(rows, cols) * (ks + 48)) * kernel->element_bytes;
    char *a = xcalloc(1, panel), *b = xcalloc(1, panel);
    float *c = xcalloc((size_t)(rows * cols), sizeof *c);
    double start = now_seconds(), elapsed = 0;
    int64_t calls = 0;
    for (; elapsed < seconds; elapsed = now_seconds() - start)
        for (int i = 0; i < 16; i++, calls++) kernel->block(c, cols, a, b, rows, cols, ks, false);
    free(a);
    free(b);
    free(c);
    return (double)calls * 2.0 * (double)(rows * cols * ks) / elapsed;
}

static double cpu_peak_flops(DType dtype)
{
    double best = 0;
    for (int round = 0; round < 5; round++) { /* the best of a few: other programs only slow a round down */
        double total = 0;
#pragma omp parallel num_threads(cpu.threads) reduction(+ : total)
        total += peak_of_thread(&cpu.gemm[dtype], 0.02);
        if (total > best) best = total;
    }
    return best;
}

/* ---- the step ---- */

static void cpu_begin_step(const Step *step) { cpu.step = *step; }

static void cpu_begin_micro_step(int64_t row0) { cpu.row0 = row0; }

/* An NVFP4 view: | codes, 8 bytes a block | tensor scale, 4 bytes | block scales, 1 byte a block, or a 16 x 16 block |.
 * Blocks of a row view stand by rows; those of a column view, each 16 rows of one column, by groups of 16 rows. */
static int64_t view_blocks(unsigned view, int64_t rows, int64_t cols)
{
    return view == VIEW_ROW ? rows * ceil_div(cols, NVFP4_BLOCK) : ceil_div(rows, NVFP4_BLOCK) * cols;
}

static size_t cpu_view_bytes(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols)
{
    if (format->format == FORMAT_NONE) return 0;
    if (format->format == FORMAT_NVFP4) {
        int64_t scale_rows = format->nvfp4.block == SCALE_16X16 ? ceil_div(rows, NVFP4_BLOCK) : rows;
        return (size_t)(view_blocks(view, rows, cols) * 8 + view_blocks(view, scale_rows, cols)) + sizeof(float);
    }
    return (size_t)(rows * cols) * dtype_bytes(format->format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16);
}

static void cpu_view_place(View *v, unsigned view, int64_t rows, int64_t cols, void *memory)
{
    v->data = memory;
    if (v->format.format != FORMAT_NVFP4 || !memory) return;
    v->tensor_scale = (float *)((char *)memory + (size_t)view_blocks(view, rows, cols) * 8);
    v->block_scale = (uint8_t *)(v->tensor_scale + 1);
}

/* One piece of rows x row_bytes where 16 rows stand together. */
static WeightPiece piece_of(void *data, int64_t rows, size_t row_bytes)
{
    return (WeightPiece){data, 16 * row_bytes, (size_t)rows * row_bytes};
}

static int view_pieces(const View *v, bool col, int64_t rows, int64_t cols, WeightPiece *out)
{
    int64_t groups = ceil_div(rows, 16), blocks = ceil_div(cols, NVFP4_BLOCK);
    if (v->format.format == FORMAT_NONE) return 0;
    if (v->format.format != FORMAT_NVFP4) {
        out[0] = piece_of(v->data, rows,
                          (size_t)cols * dtype_bytes(v->format.format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16));
        return 1;
    }
    bool square = v->format.nvfp4.block == SCALE_16X16;
    size_t codes = 8 * (size_t)(col && !square ? cols : 16 * blocks), scales = (size_t)(square ? blocks
                                                                                        : col  ? cols
                                                                                               : 16 * blocks);
    out[0] = (WeightPiece){v->data, codes, col && !square ? (size_t)groups * codes : (size_t)(rows * blocks) * 8};
    out[1] = (WeightPiece){(char *)v->block_scale, scales,
                           square || col ? (size_t)groups * scales : (size_t)(rows * blocks)};
    return 2;
}

static int cpu_weight_pieces(const Linear *w, WeightPiece out[WEIGHT_PIECES])
{
    const Operand *o = &w->weight;
    int count = view_pieces(&o->row, false, o->rows, o->cols, out);
    if (views_are_one(&o->row.format, &o->col.format)) return count;
    return count + view_pieces(&o->col, true, o->rows, o->cols, out + count);
}

/* Steps have ended when they return: at most one result is there. */
static void cpu_result_post(const StepResult *result) { cpu.result = *result; }
static void cpu_result_collect(StepResult *host) { *host = cpu.result; }

static void cpu_product_counts(ProductCounts *counts) { *counts = cpu.counts; }
static void cpu_measure(QuantStats *stats) { cpu.measure = stats; }

static void cpu_loss_sum(double *sum, Tensor losses)
{
    const float *loss = losses.data;
    *sum = 0;
    for (int64_t r = 0; r < losses.rows; r += 16) {
        double piece = 0;
        for (int64_t i = r; i < min_i64(losses.rows, r + 16); i++) piece += (double)loss[i];
        *sum += piece;
    }
}

static void cpu_finish_step(StepResult *result, const double *piece, int64_t pieces, const double *loss,
                            int64_t micro_batches, int64_t tokens)
{
    double squares = 0, sum = 0, limit = (double)cpu.step.grad_clip;
    for (int64_t i = 0; i < pieces; i++) squares += piece[i];
    for (int64_t j = 0; j < micro_batches; j++) sum += loss[j];
    *result = (StepResult){.loss = sum / (double)tokens, .grad_norm = sqrt(squares), .clip = 1};
    result->finite = isfinite(result->loss) && isfinite(result->grad_norm);
    if (limit > 0 && result->grad_norm > limit) result->clip = (float)(limit / result->grad_norm);
}

void cpu_share_cores(char **argv)
{
#ifdef _OPENMP
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT") || getenv("KMP_BLOCKTIME")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1); /* gcc: turns of a loop, some microseconds */
    setenv("KMP_BLOCKTIME", "1", 1);     /* clang: milliseconds */
    char path[4096];
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1); /* by its own name, for ps and kill */
    if (length <= 0) return;                                            /* where it cannot, the run goes on as it is */
    path[length] = 0;
    execv(path, argv);
#else
    (void)argv;
#endif
}

int cpu_open(const Ops **out, const char *isa, int64_t threads, Error *error)
{
    static const char *const NAMES[] = {"cpu portable", "cpu avx2", "cpu avx512", "cpu amx"};
    int i = choose_isa(isa, error), available = 1;
    if (i < 0) return -1;
#ifdef _OPENMP
    available = omp_get_max_threads();
#endif
    static int at_start;
    if (!at_start) at_start = available;
    cpu = (CpuState){.threads = threads > 0 ? (int)threads : at_start};
#ifdef _OPENMP
    omp_set_num_threads(cpu.threads); /* for loops outside the backend: initial values */
#else
    cpu.threads = 1;
#endif
    gemm_fill_e4m3();
    ops_isa = ISAS[i].name;
    cpu.gemm[DTYPE_FP32] = *ISAS[i].table->gemm[DTYPE_FP32];
    cpu.gemm[DTYPE_BF16] = *ISAS[i].table->gemm[DTYPE_BF16];
#ifdef __x86_64__
    if (strcmp(ops_isa, "amx") == 0) {
        cpu.gemm[DTYPE_BF16] = gemm_kernel_amx;
        cpu.gemm[DTYPE_BF16].store = cpu.gemm[DTYPE_FP32].store;
    }
#endif
    ops = ISAS[i].table->ops;
    ops.name = NAMES[i];
    ops.alloc = cpu_alloc;
    ops.free = cpu_free;
    ops.workspace_bytes = cpu_workspace_bytes;
    ops.workspace_set = cpu_workspace_set;
    ops.copy_in = ops.copy_out = cpu_copy_host;
    ops.zero = cpu_zero;
    ops.peak_flops = cpu_peak_flops;
    ops.begin_step = cpu_begin_step;
    ops.begin_micro_step = cpu_begin_micro_step;
    ops.result_post = cpu_result_post;
    ops.result_collect = cpu_result_collect;
    ops.product_counts = cpu_product_counts;
    ops.measure = cpu_measure;
    ops.weight_pieces = cpu_weight_pieces;
    ops.view_bytes = cpu_view_bytes;
    ops.view_place = cpu_view_place;
    ops.loss_sum = cpu_loss_sum;
    ops.finish_step = cpu_finish_step;
    *out = &ops;
    return 0;
}

const char *cpu_isa(void) { return ops_isa; }
int cpu_threads(void) { return cpu.threads; }
