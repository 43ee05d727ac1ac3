/* See gemm.cuh. Order: status, workspace, plans, products, NVFP4, choices. */
#include "gemm.cuh"

#include "../json.h"

#include <cublasLt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    WORKSPACE = 32 << 20,  /* bytes for cuBLASLt; what NVIDIA advises from sm_90 on */
    SUM_FLOATS = 16 << 20, /* of a product that is rounded before it is added: rows at a time */
    BIASES = 1 << 18,      /* elements of a bias, at most */
    PLANS_AT_FIRST = 64,
    CANDIDATES = 8,
    TIMED_RUNS = 5,
    ALIGNMENT = 256 /* of an address, at most, that an algorithm may count on */
};

typedef struct { /* what an algorithm is chosen for */
    int64_t M, N, K, a_ld, b_ld, out_ld;
    DType in, out;
    bool fp4, device_alpha, a_k_contiguous, b_k_contiguous, bias, add;
    uint32_t a_align, b_align, out_align;
} PlanKey;

typedef struct {
    PlanKey key;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, out; /* cuBLASLt's: its a is our b */
    cublasLtMatmulAlgo_t algorithm;
    bool fused_bias;
} Plan;

typedef struct {
    uint64_t key; /* hash of the PlanKey */
    int candidate;
} Choice;

static struct {
    cublasLtHandle_t handle;
    Plan *plan; /* [count] owned */
    int count, room;
    Choice *choice; /* [choices] owned */
    int choices;
    bool tuning;
    char *workspace;
    float *sum;     /* [SUM_FLOATS] */
    uint16_t *bias; /* [BIASES] BF16 */
    float *scalar;  /* [3] on the device: an alpha, 0 and 1 */
    bool native_fp4;
    uint16_t *expanded[2]; /* emulated NVFP4: the operands in BF16 */
    char name[32];         /* "cuBLASLt 13.1.0" */
} gemm;

static void check(cublasStatus_t status, const char *what)
{
    if (status != CUBLAS_STATUS_SUCCESS)
        die("%s: %s: %s; CUBLASLT_LOG_LEVEL=5 in the environment makes it say why", gemm_library(), what,
            cublasLtGetStatusString(status));
}

const char *gemm_library(void)
{
    size_t version = cublasLtGetVersion();
    snprintf(gemm.name, sizeof gemm.name, "cuBLASLt %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return gemm.name;
}

void gemm_open(bool native_fp4)
{
    check(cublasLtCreate(&gemm.handle), "cublasLtCreate");
    gemm.native_fp4 = native_fp4;
}

/* Of one operand of an emulated product: of tokens, or a weight; both sides padded to 32. */
static size_t expanded_bytes(const Need *need)
{
    if (!need->weight_rows || gemm.native_fp4) return 0;
    int64_t tokens = round_up(need->N, 32) * round_up(need->cols, 32);
    int64_t weight = need->weight_elements + 32 * (need->weight_rows + need->cols) + 1024;
    return (size_t)round_up(max_i64(tokens, weight), 128) * sizeof(uint16_t);
}

size_t gemm_workspace_bytes(const Need *need)
{
    return WORKSPACE + SUM_FLOATS * sizeof(float) + BIASES * sizeof(uint16_t) + 256 + 2 * expanded_bytes(need);
}

void gemm_workspace_set(void *memory, const Need *need)
{
    static const float SCALARS[] = {1, 0, 1};
    char *at = (char *)memory;
    gemm.workspace = at;
    gemm.sum = (float *)(at += WORKSPACE);
    gemm.bias = (uint16_t *)(at += SUM_FLOATS * sizeof(float));
    gemm.scalar = (float *)(at += BIASES * sizeof(uint16_t));
    at += 256;
    for (int i = 0; i < 2; i++) gemm.expanded[i] = (uint16_t *)(at + (size_t)i * expanded_bytes(need));
    cuda_check(cudaMemcpyAsync(gemm.scalar, SCALARS, sizeof SCALARS, cudaMemcpyHostToDevice, cuda.stream), "workspace");
}

/* ---- plans ---- */

static cudaDataType_t type_of(DType dtype) { return dtype == DTYPE_BF16 ? CUDA_R_16BF : CUDA_R_32F; }

/* Largest power of two, at most ALIGNMENT, that divides the address. */
static uint32_t alignment_of(const void *data)
{
    uintptr_t address = (uintptr_t)data | ALIGNMENT;
    return (uint32_t)(address & -address);
}

template <class T> static void set(Plan *p, cublasLtMatmulDescAttributes_t attribute, T value)
{
    check(cublasLtMatmulDescSetAttribute(p->product, attribute, &value, sizeof value), "matmul attribute");
}

template <class T>
static void prefer(cublasLtMatmulPreference_t p, cublasLtMatmulPreferenceAttributes_t attribute, T value)
{
    check(cublasLtMatmulPreferenceSetAttribute(p, attribute, &value, sizeof value), "preference");
}

/* A matrix with `rows` rows of our storage; its leading dimension counts elements. */
static cublasLtMatrixLayout_t layout(cudaDataType_t type, int64_t rows, int64_t cols, int64_t ld)
{
    cublasLtMatrixLayout_t m;
    check(cublasLtMatrixLayoutCreate(&m, type, (uint64_t)cols, (uint64_t)rows, ld), "matrix layout");
    return m;
}

static cublasLtMatrixLayout_t input_layout(const PlanKey *key, bool k_contiguous, int64_t outer, int64_t ld)
{
    cudaDataType_t type = key->fp4 ? CUDA_R_4F_E2M1 : type_of(key->in);
    return k_contiguous ? layout(type, outer, key->K, ld) : layout(type, key->K, outer, ld);
}

/* The heuristic's best algorithms; returns how many there are. */
static int candidates(const Plan *p, cublasLtMatmulAlgo_t algorithm[CANDIDATES])
{
    cublasLtMatmulPreference_t preference;
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    const PlanKey *k = &p->key;
    int count = 0, usable = 0;
    check(cublasLtMatmulPreferenceCreate(&preference), "preference");
    prefer(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)WORKSPACE);
    prefer(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, k->b_align);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, k->a_align);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, k->out_align);
    prefer(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, k->out_align);
    cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(gemm.handle, p->product, p->a, p->b, p->out, p->out,
                                                           preference, CANDIDATES, found, &count);
    cublasLtMatmulPreferenceDestroy(preference);
    if (status == CUBLAS_STATUS_NOT_SUPPORTED) return 0;
    check(status, "heuristic");
    for (int i = 0; i < count; i++)
        if (found[i].state == CUBLAS_STATUS_SUCCESS) algorithm[usable++] = found[i].algo;
    return usable;
}

static int chosen(const PlanKey *key)
{
    uint64_t hash = hash64(key, sizeof *key, 0);
    for (int i = 0; i < gemm.choices; i++)
        if (gemm.choice[i].key == hash) return gemm.choice[i].candidate;
    return -1;
}

static void add_choice(uint64_t key, int candidate)
{
    gemm.choice = (Choice *)xrealloc(gemm.choice, (size_t)(gemm.choices + 1) * sizeof *gemm.choice);
    gemm.choice[gemm.choices++] = Choice{key, candidate};
}

/* False: cuBLASLt has no algorithm. */
static bool choose(Plan *p)
{
    cublasLtMatmulAlgo_t algorithm[CANDIDATES];
    int wanted = (int)max_i64(0, chosen(&p->key)), count = candidates(p, algorithm);
    if (count && wanted >= count)
        die("%s no longer offers the algorithm that tune_gemm chose; delete algorithms.json in the run's folder",
            gemm_library());
    if (count) p->algorithm = algorithm[wanted];
    return count > 0;
}

static void make_plan(Plan *p, PlanKey key, const GemmInput *a, const GemmInput *b)
{
    *p = Plan();
    p->key = key;
    check(cublasLtMatmulDescCreate(&p->product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "matmul descriptor");
    set(p, CUBLASLT_MATMUL_DESC_TRANSA, key.b_k_contiguous ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(p, CUBLASLT_MATMUL_DESC_TRANSB, key.a_k_contiguous ? CUBLAS_OP_N : CUBLAS_OP_T);
    if (key.device_alpha) set(p, CUBLASLT_MATMUL_DESC_POINTER_MODE, CUBLASLT_POINTER_MODE_DEVICE);
    if (key.fp4) {
        set(p, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
        set(p, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3);
        set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b->scales); /* the heuristic wants them, whichever they are */
        set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a->scales);
    }
    p->a = input_layout(&key, key.b_k_contiguous, key.N, key.b_ld);
    p->b = input_layout(&key, key.a_k_contiguous, key.M, key.a_ld);
    p->out = layout(type_of(key.out), key.M, key.N, key.out_ld);
    if (key.bias) { /* in the type of the output; not everywhere with FP4, then a kernel adds it */
        set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS);
        p->fused_bias = choose(p);
        if (p->fused_bias) return;
        set(p, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_DEFAULT);
    }
    if (!choose(p))
        die("%s has no algorithm for a product of %lld x %lld x %lld (%s, ld %lld %lld %lld)", gemm_library(),
            (long long)key.M, (long long)key.N, (long long)key.K,
            key.fp4                ? "NVFP4"
            : key.in == DTYPE_BF16 ? "BF16"
                                   : "FP32",
            (long long)key.a_ld, (long long)key.b_ld, (long long)key.out_ld);
}

static Plan *plan_for(PlanKey key, const GemmInput *a, const GemmInput *b)
{
    for (int i = 0; i < gemm.count; i++)
        if (!memcmp(&gemm.plan[i].key, &key, sizeof key)) return &gemm.plan[i];
    if (gemm.count == gemm.room) {
        gemm.room = gemm.room ? 2 * gemm.room : PLANS_AT_FIRST;
        gemm.plan = (Plan *)xrealloc(gemm.plan, (size_t)gemm.room * sizeof *gemm.plan);
    }
    Plan *p = &gemm.plan[gemm.count];
    make_plan(p, key, a, b);
    gemm.count++;
    return p;
}

/* ---- products ---- */

typedef struct {
    float alpha, beta; /* of products without device_alpha */
    const void *a, *b;
    void *out;
} Call;

static void run(const Plan *p, const cublasLtMatmulAlgo_t *algorithm, const Call *c)
{
    bool device = p->key.device_alpha;
    const float *alpha = device ? gemm.scalar : &c->alpha, *beta = device ? gemm.scalar + (c->beta ? 2 : 1) : &c->beta;
    check(cublasLtMatmul(gemm.handle, p->product, alpha, c->b, p->a, c->a, p->b, beta, c->out, p->out, c->out, p->out,
                         algorithm, gemm.workspace, WORKSPACE, cuda.stream),
          "matmul");
}

/* The plan's algorithm becomes the fastest of its candidates, which write over the output; remembered as a choice. */
static void time_candidates(Plan *p, const Call *call)
{
    cublasLtMatmulAlgo_t algorithm[CANDIDATES];
    cudaEvent_t start, end;
    int count = candidates(p, algorithm), best = 0;
    float least = INFINITY, ms;
    cuda_check(cudaEventCreate(&start), "tune_gemm");
    cuda_check(cudaEventCreate(&end), "tune_gemm");
    for (int i = 0; i < count; i++) {
        run(p, &algorithm[i], call); /* the first time loads it */
        cuda_check(cudaEventRecord(start, cuda.stream), "tune_gemm");
        for (int k = 0; k < TIMED_RUNS; k++) run(p, &algorithm[i], call);
        cuda_check(cudaEventRecord(end, cuda.stream), "tune_gemm");
        cuda_check(cudaEventSynchronize(end), "tune_gemm");
        cuda_check(cudaEventElapsedTime(&ms, start, end), "tune_gemm");
        if (ms < least) least = ms, best = i;
    }
    cuda_check(cudaEventDestroy(start), "tune_gemm");
    cuda_check(cudaEventDestroy(end), "tune_gemm");
    p->algorithm = algorithm[best];
    add_choice(hash64(&p->key, sizeof p->key, 0), best);
}

/* The bias as the epilogue wants it: in the type of the output. */
static const void *bias_as(DType dtype, const void *bias, int64_t N)
{
    if (dtype == DTYPE_FP32) return bias;
    if (N > BIASES) die("gemm: a bias of %lld elements; this is a bug", (long long)N);
    cuda_copy(Tensor{gemm.bias, DTYPE_BF16, 1, N, N}, Tensor{(void *)bias, DTYPE_FP32, 1, N, N});
    return gemm.bias;
}

enum { BIAS_THREADS = 256 };

/* y += bias. A thread takes one column of every gridDim.y-th row, so that the bias is read once: 4 bytes per BF16 element
 * read and written. */
template <class T> __global__ void add_bias(Matrix<T> y, gmem<const float> bias)
{
    int64_t c = blockIdx.x * (int64_t)BIAS_THREADS + threadIdx.x;
    if (c >= y.cols) return;
    float b = bias.ld(c);
    for (int64_t r = blockIdx.y; r < y.rows; r += gridDim.y) y.row(r).st(c, from_f32<T>(to_f32(y.row(r).ld(c)) + b));
}

static void multiply(int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b, GemmOutput out, float alpha)
{
    PlanKey key;
    memset(&key, 0, sizeof key); /* compared as bytes */
    key.M = M, key.N = N, key.K = K;
    key.a_ld = a.ld, key.b_ld = b.ld, key.out_ld = out.ld;
    key.in = a.dtype, key.out = out.dtype;
    key.fp4 = a.scales != NULL, key.device_alpha = a.tensor_scale != NULL;
    key.a_k_contiguous = a.k_contiguous, key.b_k_contiguous = b.k_contiguous;
    key.bias = out.bias != NULL, key.add = out.accumulate;
    key.a_align = alignment_of(a.data), key.b_align = alignment_of(b.data), key.out_align = alignment_of(out.data);

    Plan *p = plan_for(key, &a, &b);
    float beta = out.accumulate ? 1.0f : 0.0f;
    if (p->fused_bias) set(p, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias_as(out.dtype, out.bias, N));
    if (key.fp4) set(p, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, b.scales);
    if (key.fp4) set(p, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, a.scales);
    Call call = {alpha, beta, a.data, b.data, out.data};
    if (gemm.tuning && chosen(&key) < 0) time_candidates(p, &call);
    run(p, &p->algorithm, &call);
    if (!out.bias || p->fused_bias) return;
    dim3 grid((unsigned)ceil_div(N, BIAS_THREADS), (unsigned)min_i64(M, 65535));
    Tensor y = {out.data, out.dtype, M, N, out.ld};
    BY_DTYPE(out.dtype, T,
             add_bias<T><<<grid, BIAS_THREADS, 0, cuda.stream>>>(matrix<T>(y), gmem<const float>((void *)out.bias)));
    cuda_check(cudaGetLastError(), "add_bias");
}

/* ---- NVFP4 ---- */

/* One thread: the factor on the sum of code x block scale products. */
static __global__ void make_alpha(gmem<float> alpha, gmem<const float> a, Nvfp4Form a_form, gmem<const float> b,
                                  Nvfp4Form b_form)
{
    alpha.st(0, nvfp4_alpha(a.ld(0), &a_form, b.ld(0), &b_form));
}

enum { EXPAND_THREADS = 128 };

/* Codes x block scales in BF16, exactly. A thread takes one block of 16: 9 bytes read, 32 written in two stores; neighbours
 * take neighbouring blocks of a row. */
static __global__ void __launch_bounds__(EXPAND_THREADS)
    expand(gmem<bf16> to, gmem<const uint8_t> codes, gmem<const uint8_t> scales, int64_t outer, int64_t blocks)
{
    int64_t i = blockIdx.x * (int64_t)EXPAND_THREADS + threadIdx.x, row = i / blocks, block = i % blocks;
    if (row >= outer) return;
    Pack<uint8_t, 8> pairs = codes.ld_pack<8>(8 * i);
    float scale = e4m3_to_f32(scales.ld((int64_t)nvfp4_tile_offset(row, block, blocks)));
    for (int half = 0; half < 2; half++) {
        Pack<bf16, 8> x;
        for (int j = 0; j < 8; j++)
            x.v[j] = to_bf16(e2m1_to_f32(pairs.v[4 * half + j / 2] >> 4 * (j % 2) & 15) * scale);
        to.st_pack<8>(16 * i + 8 * half, x);
    }
}

/* The operand in BF16, in gemm.expanded[which]. */
static GemmInput expanded(GemmInput in, int64_t outer, int which)
{
    int64_t blocks = in.ld / NVFP4_BLOCK;
    unsigned grid = (unsigned)ceil_div(outer * blocks, EXPAND_THREADS);
    expand<<<grid, EXPAND_THREADS, 0, cuda.stream>>>(gmem<bf16>((void *)gemm.expanded[which]),
                                                     gmem<const uint8_t>((void *)in.data),
                                                     gmem<const uint8_t>((void *)in.scales), outer, blocks);
    cuda_check(cudaGetLastError(), "expand");
    in.data = gemm.expanded[which];
    in.scales = NULL;
    return in;
}

/* Makes alpha, and both inputs such as this machine multiplies. */
static void prepare_fp4(int64_t M, int64_t N, GemmInput *a, GemmInput *b)
{
    make_alpha<<<1, 1, 0, cuda.stream>>>(gmem<float>(gemm.scalar), gmem<const float>(a->tensor_scale), a->form,
                                         gmem<const float>(b->tensor_scale), b->form);
    cuda_check(cudaGetLastError(), "make_alpha");
    if (gemm.native_fp4) return;
    *a = expanded(*a, M, 0);
    *b = expanded(*b, N, 1);
}

/* The input from row (of M) `first` on. */
static GemmInput rows_from(GemmInput a, int64_t first)
{
    int64_t elements = a.k_contiguous ? first * a.ld : first;
    if (a.scales) { /* first is a multiple of 128 */
        a.data = (const char *)a.data + elements / 2;
        a.scales += nvfp4_tile_offset(first, 0, a.ld / NVFP4_BLOCK);
        return a;
    }
    a.data = (const char *)a.data + (size_t)elements * dtype_bytes(a.dtype);
    return a;
}

void cuda_gemm(int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b, GemmOutput out, float alpha)
{
    if (a.scales) prepare_fp4(M, N, &a, &b);
    if (out.accumulate && gemm.tuning && M * N <= SUM_FLOATS) out.data = gemm.sum; /* gradients stay as they are */
    if (!out.accumulate || (cuda.fast_sums && !(gemm.tuning && M * N > SUM_FLOATS))) {
        multiply(M, N, K, a, b, out, alpha);
        return;
    }
    int64_t most = SUM_FLOATS / N / 128 * 128; /* whole tiles of any algorithm */
    if (most == 0) die("gemm: a gradient with rows of %lld elements; this is a bug", (long long)N);
    for (int64_t row = 0; row < M; row += most) {
        int64_t rows = min_i64(most, M - row);
        GemmOutput part = {gemm.sum, DTYPE_FP32, N, NULL, false};
        multiply(rows, N, K, rows_from(a, row), b, part, alpha);
        if (gemm.tuning) continue;
        cuda_add(Tensor{(float *)out.data + row * out.ld, DTYPE_FP32, rows, N, out.ld},
                 Tensor{gemm.sum, DTYPE_FP32, rows, N, N});
    }
}

/* ---- choices ---- */

void gemm_tuning(bool on) { gemm.tuning = on; }

char *gemm_choices(const char *device)
{
    Json *object = json_new_object();
    json_add_string(object, "library", gemm_library());
    json_add_string(object, "device", device);
    Json *list = json_add_object(object, "candidates");
    for (int i = 0; i < gemm.choices; i++) {
        char key[17];
        snprintf(key, sizeof key, "%016llx", (unsigned long long)gemm.choice[i].key);
        json_add_int(list, key, gemm.choice[i].candidate);
    }
    char *text = json_print(object, true);
    json_free(object);
    return text;
}

int gemm_choices_set(const char *text, const char *device, Error *error)
{
    Json *object = json_parse(text, strlen(text), "the choices of tune_gemm", error);
    if (!object) return -1;
    const char *library = json_string(json_get(object, "library")), *made_on = json_string(json_get(object, "device"));
    int status = 0;
    if (!library || !made_on || strcmp(library, gemm_library()) || strcmp(made_on, device))
        status = error_set(error, "made with %s on %s", library ? library : "another library",
                           made_on ? made_on : "another device");
    for (const Json *c = json_first(json_get(object, "candidates")); c && !status; c = json_next(c)) {
        int64_t candidate;
        char *end;
        uint64_t key = strtoull(json_key(c), &end, 16);
        if (*end || !json_int(c, &candidate) || candidate < 0 || candidate >= CANDIDATES)
            status = error_set(error, "\"%s\" is no choice", json_key(c));
        else
            add_choice(key, (int)candidate);
    }
    json_free(object);
    return status;
}
