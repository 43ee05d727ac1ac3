/* For tests of the operations: one case runs in every way that this machine has, each instruction set with 1, 2 and 3
 * threads, on the same random inputs; all results must be the same bits (NaN equal to NaN). The first run, portable
 * and on one thread, is compared with what the case computes itself, by plain loops in FP64.
 *
 * The same cases test a backend whose memory the host cannot read (cuda_ops.c). Every block then has two homes: the
 * tensor's address is the device's, and a mirror in host memory is what get, put and the checks read and write.
 * ops(run) sends all mirrors to the device before an op, and the first look at an element after it brings them back.
 * Pointers that are no tensors go through on_device and on_host.
 *
 * All memory of a case comes from here, between guard bytes; inputs must come out as they went in, and so must the
 * gaps between the rows of a slice and the bytes behind the workspace, which is set to exactly what the case needs.
 *
 *     static void case_add(Run *run)
 *     {
 *         Tensor sum = inout(run, "sum", DTYPE_FP32, 1, n), x = input(run, DTYPE_FP32, 1, n, 1);
 *         double *expected = expect(run, sum, 1e-6);      error bound, relative to |value| + rms of all values
 *         if (expected) for (...) expected[i] = ...;      NULL but in the first run
 *         ops(run)->add(sum, x);
 *     }
 *     every_way(case_add, 5);
 *
 * In some rounds (run->hostile) inputs hold NaN, Inf, denormal and huge values; then only bits are compared.
 */
#ifndef LLMC_OPS_HARNESS_H
#define LLMC_OPS_HARNESS_H

#include <math.h>

#include "cpu/backend.h"
#include "mathfn.h"
#include "test.h"
#include "philox.h"

enum { HARNESS_BLOCKS = 64, HARNESS_GUARD = 256 };

typedef struct {
    const char *name; /* of an output, NULL for an input */
    char *memory;     /* guard, data, guard */
    size_t bytes;
    Tensor t;        /* its data is within memory, or on the device */
    uint64_t before; /* hash of an input */
    bool scratch;    /* written, but compared by nobody */
    double *expected, bound;
} HarnessBlock;

typedef struct {
    const Ops *ops;
    bool reference, hostile, device; /* device: its memory is not the host's */
    DType act;
    uint64_t random;
    HarnessBlock block[HARNESS_BLOCKS];
    int blocks;
    char *workspace;
    size_t workspace_bytes;
    const char *isa;
    int threads, round;
    int64_t cols_factor, cols_multiple; /* what shape_cols makes of a number of columns; 0: nothing */
} Run;

/* ---- mirrors of device memory ---- */

typedef struct {
    char *device, *host; /* the same `bytes`, guards and all where the device has them */
    size_t bytes;
    const Ops *ops;
} HarnessMirror;

static struct {
    int (*open)(const Ops **ops, Error *error); /* of the backend "cuda", set by its test */
    size_t guard;                               /* bytes around a block on the device */
    HarnessMirror mirror[4 * HARNESS_BLOCKS];
    int mirrors;
    bool on_device; /* the device has what is new, else the host */
} harness;

static inline void harness_to_host(void)
{
    if (!harness.on_device) return;
    harness.on_device = false;
    for (int i = 0; i < harness.mirrors; i++) {
        HarnessMirror *m = &harness.mirror[i];
        if (m->bytes) m->ops->copy_out(m->host, m->device, m->bytes);
    }
}

static inline void harness_to_device(void)
{
    if (harness.on_device) return;
    harness.on_device = true;
    for (int i = 0; i < harness.mirrors; i++) {
        HarnessMirror *m = &harness.mirror[i];
        if (m->bytes) m->ops->copy_in(m->device, m->host, m->bytes);
    }
}

/* The table of operations, to call one: what the host wrote is where the op reads it. */
static inline const Ops *ops(Run *run)
{
    if (run->device) harness_to_device();
    return run->ops;
}

/* Where the host finds what is at an op's address, and the other way; the same address for memory of the host. */
static inline void *on_host(const void *p)
{
    static int last; /* elements are asked for one after the other */
    for (int i = 0; i < harness.mirrors; i++) {
        int k = (last + i) % harness.mirrors;
        const HarnessMirror *m = &harness.mirror[k];
        if ((const char *)p < m->device || (const char *)p > m->device + m->bytes) continue;
        last = k;
        harness_to_host();
        return m->host + ((const char *)p - m->device);
    }
    return (void *)(uintptr_t)p;
}
static inline void *on_device(const void *p)
{
    for (int i = 0; i < harness.mirrors; i++) {
        const HarnessMirror *m = &harness.mirror[i];
        if ((const char *)p >= m->host && (const char *)p <= m->host + m->bytes)
            return m->device + ((const char *)p - m->host);
    }
    return (void *)(uintptr_t)p;
}

/* Gives a block its place on the device. */
static inline void harness_mirror(Run *run, HarnessBlock *b)
{
    if (harness.mirrors == 4 * HARNESS_BLOCKS) die("ops_harness: too many blocks on the device");
    harness_to_host();
    size_t bytes = b->bytes + 2 * harness.guard;
    char *device = run->ops->alloc(bytes ? bytes : 1);
    harness.mirror[harness.mirrors++] = (HarnessMirror){device, b->memory + HARNESS_GUARD - harness.guard, bytes,
                                                        run->ops};
    b->t.data = device + harness.guard;
}

static inline void harness_unmirror(const HarnessBlock *b)
{
    for (int i = 0; i < harness.mirrors; i++) {
        HarnessMirror *m = &harness.mirror[i];
        if (m->device + harness.guard != (char *)b->t.data) continue;
        m->ops->free(m->device, m->bytes ? m->bytes : 1);
        *m = harness.mirror[--harness.mirrors];
        return;
    }
}

/* ---- random numbers: the same in every run of a round ---- */

static inline uint64_t random_bits(Run *run)
{
    run->random ^= run->random << 13;
    run->random ^= run->random >> 7;
    return run->random ^= run->random << 17;
}
static inline int64_t pick(Run *run, int64_t low, int64_t high) /* low .. high */
{
    return low + (int64_t)(random_bits(run) % (uint64_t)(high - low + 1));
}
static inline bool coin(Run *run) { return random_bits(run) >> 40 & 1; }
static inline double normal(Run *run) { return f64_inverse_normal(((double)(random_bits(run) >> 11) + 0.5) * 0x1p-53); }

/* Cases pick few columns of any number; a test may ask for wider or for even shapes. */
static inline int64_t shape_cols(const Run *run, int64_t cols)
{
    return round_up(cols * max_i64(run->cols_factor, 1), max_i64(run->cols_multiple, 1));
}

/* ---- elements ---- */

static inline char *element_of(Tensor t, int64_t r, int64_t c)
{
    return (char *)on_host((char *)t.data + (size_t)(r * t.ld + c) * dtype_bytes(t.dtype));
}
static inline double get(Tensor t, int64_t r, int64_t c)
{
    float x;
    uint16_t half;
    if (t.dtype == DTYPE_BF16) {
        memcpy(&half, element_of(t, r, c), sizeof half);
        return (double)bf16_to_f32(half);
    }
    memcpy(&x, element_of(t, r, c), sizeof x);
    return (double)x;
}
static inline void put(Tensor t, int64_t r, int64_t c, double value)
{
    float x = (float)value;
    uint16_t half = bf16_from_f32(x);
    if (t.dtype == DTYPE_BF16)
        memcpy(element_of(t, r, c), &half, sizeof half);
    else
        memcpy(element_of(t, r, c), &x, sizeof x);
}

/* Inf, NaN of every kind, zeros, denormal and huge values. */
static inline void put_hostile(Run *run, Tensor t, int64_t r, int64_t c)
{
    static const uint32_t BITS[] = {0x7f800000, 0xff800000, 0x7fc00000, 0xffffffff, 0x7fffffff, 0x7f800001,
                                    0xff810000, 0x00000001, 0x807fffff, 0x7f7fffff, 0xf149f2ca, 0x00000000,
                                    0x80000000, 0x42b10000, 0xc2d00000, 0x00010000};
    uint32_t bits = BITS[random_bits(run) % (sizeof BITS / sizeof *BITS)];
    uint16_t half = (uint16_t)(bits >> 16 | (bits & 0xffff ? 1 : 0));
    if (t.dtype == DTYPE_BF16)
        memcpy(element_of(t, r, c), &half, sizeof half);
    else
        memcpy(element_of(t, r, c), &bits, sizeof bits);
}

/* ---- memory ---- */

static inline HarnessBlock *new_block(Run *run, DType dtype, int64_t rows, int64_t cols)
{
    if (run->blocks == HARNESS_BLOCKS) die("ops_harness: too many tensors in one case");
    HarnessBlock *b = &run->block[run->blocks++];
    *b = (HarnessBlock){.bytes = (size_t)(rows * cols) * dtype_bytes(dtype)};
    b->memory = xmalloc(b->bytes + 2 * HARNESS_GUARD);
    memset(b->memory, 0xA5, b->bytes + 2 * HARNESS_GUARD);
    b->t = (Tensor){b->memory + HARNESS_GUARD, dtype, rows, cols, cols};
    if (run->device) harness_mirror(run, b);
    return b;
}

static inline uint64_t hash_of(const HarnessBlock *b) { return hash64(on_host(b->t.data), b->bytes, 0); }

static inline void fill_normal(Run *run, Tensor t, double std)
{
    for (int64_t r = 0; r < t.rows; r++)
        for (int64_t c = 0; c < t.cols; c++) {
            put(t, r, c, normal(run) * std);
            if (run->hostile && random_bits(run) % 61 == 0) put_hostile(run, t, r, c);
        }
}

static inline Tensor input(Run *run, DType dtype, int64_t rows, int64_t cols, double std)
{
    HarnessBlock *b = new_block(run, dtype, rows, cols);
    fill_normal(run, b->t, std);
    b->before = hash_of(b);
    return b->t;
}

static inline Tensor inout(Run *run, const char *name, DType dtype, int64_t rows, int64_t cols, double std)
{
    HarnessBlock *b = new_block(run, dtype, rows, cols);
    fill_normal(run, b->t, std);
    b->name = name;
    return b->t;
}

/* What is in it before must not matter: a pattern. */
static inline Tensor output(Run *run, const char *name, DType dtype, int64_t rows, int64_t cols)
{
    HarnessBlock *b = new_block(run, dtype, rows, cols);
    b->name = name;
    return b->t;
}

/* A case that changes an input on purpose, before the op runs, says so. */
static inline void input_changed(Run *run, Tensor t)
{
    for (int i = 0; i < run->blocks; i++)
        if (run->block[i].t.data == t.data) run->block[i].before = hash_of(&run->block[i]);
}

/* In host memory: an op gets on_device(them). */
static inline int32_t *integers(Run *run, int64_t count, int64_t low, int64_t high)
{
    HarnessBlock *b = new_block(run, DTYPE_INT32, 1, count);
    int32_t *x = on_host(b->t.data);
    for (int64_t i = 0; i < count; i++) x[i] = (int32_t)pick(run, low, high);
    b->before = hash_of(b);
    return x;
}
static inline void integers_changed(Run *run, const int32_t *x) { input_changed(run, (Tensor){.data = on_device(x)}); }

/* A struct or an array that an op reads, at the op's address. */
static inline void *constant(Run *run, const void *value, size_t bytes)
{
    HarnessBlock *b = new_block(run, DTYPE_INT32, 1, (int64_t)(bytes / 4));
    memcpy(on_host(b->t.data), value, bytes);
    b->before = hash_of(b);
    return b->t.data;
}

/* FP64 results: an output of DTYPE_INT32 and two columns. NaN has many forms: one of them. */
static inline double get_double(Tensor t, int64_t r)
{
    double x;
    memcpy(&x, element_of(t, r, 0), sizeof x);
    if (x != x) memset(element_of(t, r, 0), 0, sizeof x);
    return x;
}

static inline HarnessBlock *block_of(Run *run, Tensor t)
{
    for (int i = 0; i < run->blocks; i++)
        if (run->block[i].t.data == t.data) return &run->block[i];
    die("ops_harness: no such tensor");
}

/* Where to write what is expected of an output, [rows, cols], preset to its present values; NULL: not asked for. */
static inline double *expect(Run *run, Tensor t, double bound)
{
    if (!run->reference || run->hostile) return NULL;
    HarnessBlock *b = block_of(run, t);
    b->bound = bound;
    b->expected = xmalloc((size_t)(t.rows * t.cols) * sizeof *b->expected);
    for (int64_t i = 0; i < t.rows * t.cols; i++) b->expected[i] = get(b->t, i / t.cols, i % t.cols);
    return b->expected;
}

/* Sets a workspace of exactly the size that is needed, with what earlier runs left in it; the guard behind it is a
 * pattern. */
static inline void need_on_host(Run *run)
{
    static char *memory;
    static size_t room;
    if (room < run->workspace_bytes + HARNESS_GUARD) {
        free(memory);
        room = (2 * run->workspace_bytes + HARNESS_GUARD + 4095) / 4096 * 4096;
        memory = aligned_alloc(4096, room);
        if (!memory) die("out of memory");
        memset(memory, 0xA5, room);
    }
    run->workspace = memory;
    memset(run->workspace + run->workspace_bytes, 0xA5, HARNESS_GUARD);
}
static inline void need_on_device(Run *run)
{
    static char *memory, guard[HARNESS_GUARD];
    static size_t room;
    size_t bytes = run->workspace_bytes + harness.guard;
    if (room != bytes) {
        if (memory) run->ops->free(memory, room);
        memory = run->ops->alloc(room = bytes);
        memset(guard, 0xA5, sizeof guard);
        if (harness.guard) run->ops->copy_in(memory + run->workspace_bytes, guard, harness.guard);
    }
    run->workspace = memory;
}
static inline void need(Run *run, Need n)
{
    run->workspace_bytes = run->ops->workspace_bytes(&n);
    if (run->device)
        need_on_device(run);
    else
        need_on_host(run);
    run->ops->workspace_set(run->workspace, &n);
}

/* ---- checks after a run ---- */

static inline bool untouched(const char *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++)
        if ((unsigned char)p[i] != 0xA5) return false;
    return true;
}

static inline void check_memory(const Run *run)
{
    harness_to_host();
    for (int i = 0; i < run->blocks; i++) {
        const HarnessBlock *b = &run->block[i];
        CHECK(untouched(b->memory, HARNESS_GUARD) && untouched(b->memory + HARNESS_GUARD + b->bytes, HARNESS_GUARD),
              "%s, %d threads: wrote around %s", run->isa, run->threads, b->name ? b->name : "an input");
        CHECK(b->name || b->scratch || b->before == hash_of(b), "%s, %d threads: changed input %d", run->isa,
              run->threads, i);
    }
    if (!run->workspace) return;
    char copy[HARNESS_GUARD], *guard = run->workspace + run->workspace_bytes;
    if (run->device && harness.guard) run->ops->copy_out(copy, guard, harness.guard);
    CHECK(run->device ? untouched(copy, harness.guard) : untouched(guard, HARNESS_GUARD),
          "%s, %d threads: wrote behind the workspace", run->isa, run->threads);
}

static struct {
    double error[2]; /* worst error over bound, by act dtype */
    char where[2][200];
} harness_worst;

/* One element: within the bound of |value| + rms. Many: their rms error within 3/4 of the bound of the rms. */
static inline void check_block(const Run *run, const HarnessBlock *b)
{
    int64_t n = b->t.rows * b->t.cols;
    double squares = 0, errors = 0, worst = 0;
    for (int64_t k = 0; k < n; k++) squares += b->expected[k] * b->expected[k];
    for (int64_t k = 0; k < n; k++) {
        double got = get(b->t, k / b->t.cols, k % b->t.cols), error = fabs(got - b->expected[k]);
        double limit = b->bound > 0 ? b->bound * (fabs(b->expected[k]) + sqrt(squares / (double)n)) + 1e-15 : 0;
        if (!CHECK(error <= limit, "%s, %s, round %d, %s [%ld,%ld] is %.9g, expected %.9g", run->isa, b->name,
                   run->round, run->act == DTYPE_BF16 ? "bf16" : "fp32", (long)(k / b->t.cols), (long)(k % b->t.cols),
                   got, b->expected[k]))
            return;
        errors += error * error;
        if (limit > 0) worst = fmax(worst, error / limit);
    }
    CHECK(n < 100 || sqrt(errors) <= 0.75 * b->bound * sqrt(squares), "%s, round %d: rms error %.3g of rms %.3g",
          b->name, run->round, sqrt(errors / (double)n), sqrt(squares / (double)n));
    if (worst > harness_worst.error[run->act]) {
        harness_worst.error[run->act] = worst;
        snprintf(harness_worst.where[run->act], sizeof harness_worst.where[0], "%s of %s", b->name, test_state.name);
    }
}

static inline void check_expected(const Run *run)
{
    for (int i = 0; i < run->blocks; i++)
        if (run->block[i].expected) check_block(run, &run->block[i]);
}

static inline void check_bits(const Run *first, const Run *run)
{
    for (int i = 0; i < run->blocks; i++) {
        const HarnessBlock *a = &first->block[i], *b = &run->block[i];
        if (!b->name || memcmp(on_host(a->t.data), on_host(b->t.data), a->bytes) == 0) continue;
        for (int64_t k = 0; k < a->t.rows * a->t.cols; k++) {
            double x = get(a->t, k / a->t.cols, k % a->t.cols), y = get(b->t, k / b->t.cols, k % b->t.cols);
            if (x != x && y != y) continue;
            if (!CHECK(x == y && signbit(x) == signbit(y), "%s, %d threads, round %d, %s%s: %s [%ld,%ld] is %a, not %a",
                       run->isa, run->threads, run->round, run->act == DTYPE_BF16 ? "bf16" : "fp32",
                       run->hostile ? ", hostile" : "", b->name, (long)(k / a->t.cols), (long)(k % a->t.cols), y, x))
                break;
        }
    }
}

static inline void run_free(Run *run)
{
    for (int i = 0; i < run->blocks; i++) {
        harness_unmirror(&run->block[i]);
        free(run->block[i].memory);
        free(run->block[i].expected);
    }
}

/* ---- every way that this machine has ---- */

static const char *const HARNESS_ISAS[] = {"portable", "avx2", "avx512", "amx"};

static inline bool harness_open(Run *run, const char *isa, int threads)
{
    run->device = strcmp(isa, "cuda") == 0;
    if (run->device ? harness.open(&run->ops, NULL) : cpu_open(&run->ops, isa, threads, NULL)) return false;
    run->isa = isa;
    run->threads = threads;
    return true;
}

/* Rounds alternate between FP32 and BF16; every third pair is hostile. */
static inline void every_way(void (*one)(Run *), int rounds)
{
    for (int round = 0; round < rounds; round++) {
        Run first = {0};
        for (int s = 0; s < 4; s++)
            for (int threads = 1; threads <= 3; threads++) {
                Run run = {.act = round % 2 ? DTYPE_BF16 : DTYPE_FP32, .hostile = round / 2 % 3 == 2, .round = round};
                run.random = 0x9E3779B97F4A7C15u * (uint64_t)(round + 1);
                run.reference = s == 0 && threads == 1;
                if (!harness_open(&run, HARNESS_ISAS[s], threads)) continue;
                one(&run);
                check_memory(&run);
                if (run.reference) {
                    check_expected(&run);
                    first = run;
                    continue;
                }
                check_bits(&first, &run);
                run_free(&run);
            }
        run_free(&first);
    }
}

static inline void harness_report(void)
{
    for (int act = 0; act < 2; act++)
        printf("measured %s: at worst %.0f%% of the error bound (%s)\n", act ? "bf16" : "fp32",
               100 * harness_worst.error[act], harness_worst.where[act]);
}

static inline void skip_missing_isas(void)
{
    Run run;
    test_case("every instruction set of this machine is tried");
    for (int s = 0; s < 4; s++)
        if (!harness_open(&run, HARNESS_ISAS[s], 1)) printf("skipped %s: not on this machine\n", HARNESS_ISAS[s]);
    CHECK(harness_open(&run, "portable", 1), "portable is everywhere");
}

#endif
