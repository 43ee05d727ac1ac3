/* What the documentation of cublasLtMatmul asks of a product, rule by rule, each with the status that it names.
 *
 * INVALID_VALUE: the arguments contradict each other. NOT_SUPPORTED: they do not, but no algorithm does it.
 * ARCH_MISMATCH: a device of another compute capability would; a heuristic says NOT_SUPPORTED instead. EXECUTION_FAILED:
 * an address of the host where one of the device belongs, or the other way round; the library faults on it later. Device
 * memory that is too small or freed ends the program, as a kernel's access outside of it does. What the
 * library can do and no one here asks for (FP16, integers, row-major matrices, vectors of alpha, epilogues with a second
 * output) is NOT_SUPPORTED too, with a reason that says so.
 */
#include "cublaslt_problem.h"
#include "internal.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace cuda_on_cpu
{

static thread_local char reason[256];
static thread_local bool quiet;
const char *cublaslt_reason() { return reason; }

namespace lt
{

cublasStatus_t refuse(cublasStatus_t status, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(reason, sizeof reason, format, arguments);
    va_end(arguments);
    const char *verbose = getenv("CUDA_ON_CPU_VERBOSE");
    if (!quiet && verbose && strcmp(verbose, "1") == 0)
        fprintf(stderr, "cuBLASLt: status %d: %s\n", (int)status, reason);
    return status;
}

void keep_quiet(bool yes) { quiet = yes; }

#define INVALID_IF(condition, ...)                                                                                     \
    if (condition) return refuse(CUBLAS_STATUS_INVALID_VALUE, __VA_ARGS__)
#define UNSUPPORTED_IF(condition, ...)                                                                                 \
    if (condition) return refuse(CUBLAS_STATUS_NOT_SUPPORTED, __VA_ARGS__)
#define FORWARD(call)                                                                                                  \
    do {                                                                                                               \
        cublasStatus_t status = call;                                                                                  \
        if (status != CUBLAS_STATUS_SUCCESS) return status;                                                            \
    } while (0)

/* ---- types and sizes ---- */

bool is_fp8(uint32_t type) { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
bool is_fp4(uint32_t type) { return type == CUDA_R_4F_E2M1; }

int64_t bits_of(uint32_t type)
{
    if (is_fp4(type)) return 4;
    if (is_fp8(type)) return 8;
    return type == CUDA_R_16BF ? 16 : type == CUDA_R_32F ? 32 : 0;
}

int scale_block(const Desc &desc)
{
    if (desc.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3) return 16;
    return desc.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0 ? 32 : 0;
}

int64_t matrix_bytes(const Layout &layout)
{
    if (!layout.rows || !layout.cols) return 0;
    int64_t elements = ((int64_t)layout.cols - 1) * layout.ld + (int64_t)layout.rows;
    return bytes_of(layout.type, elements + (layout.batch_count - 1) * layout.batch_stride);
}

int64_t scale_bytes(int64_t outer, int64_t k, int block)
{
    int64_t blocks = (k + block - 1) / block;
    return (outer + 127) / 128 * 128 * ((blocks + 3) / 4 * 4);
}

bool has_bias(uint32_t epilogue) { return (epilogue & CUBLASLT_EPILOGUE_BIAS) != 0; }

static bool narrow(uint32_t type) { return is_fp8(type) || is_fp4(type); }

uint32_t bias_type_of(const Problem &p) /* BF16 whenever inputs are narrow; else that of D */
{
    if (p.desc.bias_type != -1) return (uint32_t)p.desc.bias_type;
    return narrow(p.a.type) ? (uint32_t)CUDA_R_16BF : p.d.type;
}

/* ---- hashes: an algorithm remembers what it was made for ---- */

static uint64_t hash(const uint64_t *words, size_t count)
{
    uint64_t h = 0xcbf29ce484222325ull;
    for (size_t i = 0; i < count; i++) h = (h ^ words[i]) * 0x100000001b3ull ^ words[i] >> 29;
    return h ? h : 1;
}

uint32_t hash_types(int32_t compute, int32_t scale, uint32_t a, uint32_t b, uint32_t c, uint32_t d)
{
    uint64_t words[] = {(uint64_t)compute, (uint64_t)scale, a, b, c, d};
    uint64_t h = hash(words, sizeof words / sizeof *words);
    return (uint32_t)(h ^ h >> 32);
}

uint64_t hash_problem(const Problem &p)
{
    const Desc &s = p.desc;
    const Layout *all[] = {&p.a, &p.b, &p.c, &p.d};
    uint64_t words[64], *w = words;
    for (const Layout *l : all)
        for (uint64_t word : {(uint64_t)l->type, l->rows, l->cols, (uint64_t)l->ld, (uint64_t)l->batch_count,
                              (uint64_t)l->batch_stride})
            *w++ = word;
    for (uint64_t word : {(uint64_t)s.compute_type, (uint64_t)s.scale_type, (uint64_t)s.pointer_mode,
                          (uint64_t)s.trans_a, (uint64_t)s.trans_b, (uint64_t)s.epilogue, (uint64_t)s.a_mode,
                          (uint64_t)s.b_mode, (uint64_t)s.d_mode, (uint64_t)s.fast_accum, (uint64_t)bias_type_of(p)})
        *w++ = word;
    for (const void *pointer : {s.a_scale, s.b_scale, s.d_scale, (const void *)s.d_amax}) *w++ = pointer != nullptr;
    return hash(words, (size_t)(w - words));
}

/* ---- the problem ---- */

static bool is_operation(int32_t t) { return t == CUBLAS_OP_N || t == CUBLAS_OP_T || t == CUBLAS_OP_C; }

static cublasStatus_t check_desc(const Desc &s)
{
    UNSUPPORTED_IF(s.compute_type != CUBLAS_COMPUTE_32F && s.compute_type != CUBLAS_COMPUTE_32F_PEDANTIC,
                   "compute type %d: the double computes in FP32 only", s.compute_type);
    UNSUPPORTED_IF(s.scale_type != CUDA_R_32F, "scale type %d with compute type 32F", s.scale_type);
    INVALID_IF(!is_operation(s.trans_a) || !is_operation(s.trans_b), "operation %d, %d", s.trans_a, s.trans_b);
    UNSUPPORTED_IF(s.trans_c != CUBLAS_OP_N, "TRANSC is not supported");
    UNSUPPORTED_IF(s.fill != CUBLAS_FILL_MODE_FULL, "fill mode %d", s.fill);
    INVALID_IF(s.pointer_mode < CUBLASLT_POINTER_MODE_HOST ||
                   s.pointer_mode > CUBLASLT_POINTER_MODE_ALPHA_DEVICE_VECTOR_BETA_HOST,
               "pointer mode %d", s.pointer_mode);
    UNSUPPORTED_IF(s.pointer_mode > CUBLASLT_POINTER_MODE_DEVICE, "pointer mode %d: the double knows no vectors",
                   s.pointer_mode);
    const uint32_t known[] = {CUBLASLT_EPILOGUE_DEFAULT,   CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS,
                              CUBLASLT_EPILOGUE_RELU_BIAS, CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS};
    bool computed = false;
    for (uint32_t e : known) computed = computed || s.epilogue == e;
    UNSUPPORTED_IF(!computed, "epilogue %u: not one that the double computes", s.epilogue);
    UNSUPPORTED_IF(s.emulation, "emulation of floating point");
    INVALID_IF(s.aux_scale || s.aux_amax, "scale or amax of an auxiliary output, which this epilogue has not");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_layout(const char *name, const Layout &l)
{
    UNSUPPORTED_IF(!bits_of(l.type), "%s: data type %u", name, l.type);
    UNSUPPORTED_IF(l.order != CUBLASLT_ORDER_COL, "%s: order %d: the double knows column-major only", name, l.order);
    UNSUPPORTED_IF(l.plane_offset || l.batch_mode != CUBLASLT_BATCH_MODE_STRIDED, "%s: planes, or a batch of pointers",
                   name);
    INVALID_IF(!l.rows || !l.cols || l.rows > INT32_MAX || l.cols > INT32_MAX, "%s: %llu x %llu", name,
               (unsigned long long)l.rows, (unsigned long long)l.cols);
    UNSUPPORTED_IF(l.ld == 0, "%s: leading dimension 0, a broadcast: not in the double", name);
    INVALID_IF(l.ld < (int64_t)l.rows, "%s: leading dimension %lld for columns of %llu", name, (long long)l.ld,
               (unsigned long long)l.rows);
    INVALID_IF(l.batch_count < 1, "%s: batch of %d", name, l.batch_count);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_sizes(Problem *p)
{
    FORWARD(check_layout("A", p->a));
    FORWARD(check_layout("B", p->b));
    FORWARD(check_layout("C", p->c));
    FORWARD(check_layout("D", p->d));
    p->transposed_a = p->desc.trans_a != CUBLAS_OP_N;
    p->transposed_b = p->desc.trans_b != CUBLAS_OP_N;
    p->m = (int64_t)(p->transposed_a ? p->a.cols : p->a.rows);
    p->k = (int64_t)(p->transposed_a ? p->a.rows : p->a.cols);
    p->n = (int64_t)(p->transposed_b ? p->b.rows : p->b.cols);
    int64_t k = (int64_t)(p->transposed_b ? p->b.cols : p->b.rows);
    INVALID_IF(k != p->k, "op(A) is %lld x %lld, op(B) is %lld x %lld", (long long)p->m, (long long)p->k, (long long)k,
               (long long)p->n);
    INVALID_IF((int64_t)p->d.rows != p->m || (int64_t)p->d.cols != p->n, "D is %llu x %llu, the product %lld x %lld",
               (unsigned long long)p->d.rows, (unsigned long long)p->d.cols, (long long)p->m, (long long)p->n);
    INVALID_IF(p->c.rows != p->d.rows || p->c.cols != p->d.cols, "C and D differ in size");
    INVALID_IF(p->a.batch_count != p->d.batch_count || p->b.batch_count != p->d.batch_count ||
                   p->c.batch_count != p->d.batch_count,
               "batches of A, B, C, D differ in length");
    bool batch = p->d.batch_count > 1;
    INVALID_IF(batch && p->d.batch_stride < (int64_t)(p->d.cols - 1) * p->d.ld + (int64_t)p->d.rows,
               "matrices D of the batch overlap");
    INVALID_IF(p->a.batch_stride < 0 || p->b.batch_stride < 0 || p->c.batch_stride < 0, "negative batch stride");
    UNSUPPORTED_IF(batch && narrow(p->a.type), "a batch of FP8 or FP4 products: not in the double");
    return CUBLAS_STATUS_SUCCESS;
}

/* The table of types: what A and B may be, then C and D for them. */
static cublasStatus_t check_types(const Problem &p)
{
    uint32_t a = p.a.type, b = p.b.type, c = p.c.type, d = p.d.type;
    bool wide = d == CUDA_R_16BF || d == CUDA_R_32F;
    if (!narrow(a) && !narrow(b)) {
        UNSUPPORTED_IF(a != b, "A of type %u, B of type %u", a, b);
        UNSUPPORTED_IF(c != d, "C of type %u, D of type %u", c, d);
        UNSUPPORTED_IF(!(a == CUDA_R_16BF && wide) && d != CUDA_R_32F, "D of type %u from type %u", d, a);
        return CUBLAS_STATUS_SUCCESS;
    }
    UNSUPPORTED_IF(is_fp4(a) != is_fp4(b) || is_fp8(a) != is_fp8(b), "A of type %u, B of type %u", a, b);
    UNSUPPORTED_IF(a == CUDA_R_8F_E5M2 && b == CUDA_R_8F_E5M2, "E5M2 times E5M2");
    UNSUPPORTED_IF(is_fp4(d), "D in FP4, with block scales that the library chooses: not in the double");
    UNSUPPORTED_IF(wide ? c != d : c != CUDA_R_16BF, "C of type %u for D of type %u", c, d);
    UNSUPPORTED_IF(d == CUDA_R_8F_E5M2 && a == b, "D in E5M2 needs an input in E5M2");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_scales(const Problem &p)
{
    const Desc &s = p.desc;
    const int32_t modes[] = {s.a_mode, s.b_mode, s.c_mode, s.d_mode, s.aux_mode, s.d_out_mode};
    for (int32_t mode : modes) INVALID_IF(mode < 0 || mode >= CUBLASLT_MATMUL_MATRIX_SCALE_END, "scale mode %d", mode);
    bool fp4 = is_fp4(p.a.type);
    INVALID_IF(!narrow(p.a.type) && (s.a_scale || s.b_scale), "scale of A or B, which are neither FP8 nor FP4");
    INVALID_IF(!narrow(p.a.type) && (s.a_mode || s.b_mode), "scale mode for A or B, which are neither FP8 nor FP4");
    INVALID_IF(s.c_scale || s.c_mode, "scale of C, which is neither FP8 nor FP4");
    INVALID_IF(!narrow(p.d.type) && (s.d_scale || s.d_mode), "scale of D, which is neither FP8 nor FP4");
    INVALID_IF(!is_fp8(p.d.type) && s.d_amax, "amax of D, which is not FP8");
    INVALID_IF(s.d_out_scale || s.d_out_mode, "output scales of D, which has no scales per block");
    UNSUPPORTED_IF(s.a_mode != s.b_mode, "A in scale mode %d, B in %d", s.a_mode, s.b_mode);
    UNSUPPORTED_IF(s.a_mode > CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0, "scale mode %d: not in the double", s.a_mode);
    INVALID_IF(fp4 && s.a_mode != CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3, "FP4 in scale mode %d, not VEC16_UE4M3",
               s.a_mode);
    INVALID_IF(!fp4 && s.a_mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3, "scale mode VEC16_UE4M3 without FP4");
    UNSUPPORTED_IF(s.a_mode && is_fp8(p.d.type), "block scales with D in FP8: not in the double");
    INVALID_IF(s.a_mode && !s.a_scale, "scale mode %d requires a pointer for the scales of A", s.a_mode);
    INVALID_IF(s.b_mode && !s.b_scale, "scale mode %d requires a pointer for the scales of B", s.b_mode);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_narrow(const Problem &p) /* FP8 and FP4: rows of 16 bytes, transposes */
{
    if (!narrow(p.a.type)) return CUBLAS_STATUS_SUCCESS;
    int64_t unit = 128 / bits_of(p.a.type);
    UNSUPPORTED_IF(p.k % unit || p.a.ld % unit || p.b.ld % unit,
                   "K %lld with leading dimensions %lld, %lld: not multiples of %lld elements, 16 bytes",
                   (long long)p.k, (long long)p.a.ld, (long long)p.b.ld, (long long)unit);
    UNSUPPORTED_IF(bytes_of(p.d.type, p.m) % 16 || bytes_of(p.c.type, p.m) % 16 || bytes_of(p.d.type, p.d.ld) % 16 ||
                       bytes_of(p.c.type, p.c.ld) % 16,
                   "columns of C and D, of %lld, are not multiples of 16 bytes", (long long)p.m);
    UNSUPPORTED_IF(is_fp8(p.a.type) && !p.transposed_a && p.m % unit, "A not transposed with M %lld", (long long)p.m);
    UNSUPPORTED_IF(is_fp8(p.a.type) && p.transposed_b && p.n % unit, "B transposed with N %lld", (long long)p.n);
    UNSUPPORTED_IF(is_fp4(p.a.type) && (!p.transposed_a || p.transposed_b), "FP4 needs A transposed, B not");
    UNSUPPORTED_IF(is_fp4(p.a.type) && (p.desc.epilogue & CUBLASLT_EPILOGUE_GELU), "GELU is not available with FP4");
    return CUBLAS_STATUS_SUCCESS;
}

static int attribute(cudaDeviceAttr which)
{
    int device = 0, value = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&value, which, device);
    return value;
}

static cublasStatus_t check_device(const Problem &p)
{
    int major = attribute(cudaDevAttrComputeCapabilityMajor), minor = attribute(cudaDevAttrComputeCapabilityMinor);
    int capability = major * 10 + minor;
    bool any_layout = major == 10 || major == 11; /* the others multiply FP8 only with A transposed, B not */
    bool blocks = capability >= 100;
    const char *lacks = nullptr;
    if (p.a.type == CUDA_R_16BF && capability < 80) lacks = "BF16";
    if (is_fp8(p.a.type) && capability < 89) lacks = "FP8";
    if (is_fp4(p.a.type) && !blocks) lacks = "FP4";
    if (p.desc.a_mode && !blocks) lacks = "scales per block";
    if (lacks) return refuse(CUBLAS_STATUS_ARCH_MISMATCH, "compute capability %d.%d has no %s", major, minor, lacks);
    UNSUPPORTED_IF(
        is_fp4(p.a.type) && p.desc.epilogue == CUBLASLT_EPILOGUE_BIAS && capability >= 110,
        "BIAS with FP4 is reported to be refused beyond compute capability 10 (CUDALibrarySamples issue 303)");
    UNSUPPORTED_IF(is_fp8(p.a.type) && !any_layout && (!p.transposed_a || p.transposed_b),
                   "FP8 on compute capability %d.%d needs A transposed, B not", major, minor);
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_bias(const Problem &p)
{
    if (!has_bias(p.desc.epilogue)) return CUBLAS_STATUS_SUCCESS;
    uint32_t expected = narrow(p.a.type) ? (uint32_t)CUDA_R_16BF : p.d.type;
    UNSUPPORTED_IF(bias_type_of(p) != expected, "bias of type %u for D of type %u", bias_type_of(p), p.d.type);
    INVALID_IF(p.desc.bias_batch_stride < 0, "negative batch stride of the bias");
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_problem(Problem *p, const Desc *desc, const Layout *a, const Layout *b, const Layout *c,
                             const Layout *d)
{
    INVALID_IF(!desc || !a || !b || !d, "a descriptor is NULL");
    *p = Problem{*desc, *a, *b, c ? *c : *d, *d, 0, 0, 0, false, false};
    FORWARD(check_desc(p->desc));
    FORWARD(check_sizes(p));
    FORWARD(check_types(*p));
    FORWARD(check_scales(*p));
    FORWARD(check_bias(*p));
    FORWARD(check_narrow(*p));
    return check_device(*p);
}

/* ---- the algorithm ---- */

cublasStatus_t check_algo(const Problem &p, const Algo &algo, Kernel *kernel, uint64_t *workspace)
{
    const Desc &s = p.desc;
    INVALID_IF(algo.magic != ALGO_MAGIC || algo.id < 0 || algo.id >= KERNELS, "not an algorithm of this library");
    INVALID_IF(algo.types != hash_types(s.compute_type, s.scale_type, p.a.type, p.b.type, p.c.type, p.d.type),
               "the algorithm was made for other data types");
    INVALID_IF(algo.problem && algo.problem != hash_problem(p), "the algorithm was made for another problem");
    *kernel = kernels[algo.id];
    kernel->split_k = algo.split_k;
    kernel->reduction = algo.reduction;
    UNSUPPORTED_IF(algo.tile != kernel->tile, "algorithm %d has no tile %u", algo.id, algo.tile);
    UNSUPPORTED_IF(algo.split_k < 1 || algo.split_k > 16 || algo.split_k > p.k, "K %lld split %d times", (long long)p.k,
                   algo.split_k);
    bool reduced = algo.reduction == CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE ||
                   algo.reduction == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
    UNSUPPORTED_IF(algo.split_k > 1 ? !reduced : algo.reduction != CUBLASLT_REDUCTION_SCHEME_NONE,
                   "reduction scheme %u for K split %d times", algo.reduction, algo.split_k);
    *workspace = algo.split_k > 1 ? (uint64_t)(p.m * p.n * algo.split_k) * sizeof(float) : 0;
    UNSUPPORTED_IF(algo.split_k > 1 && p.d.batch_count > 1, "K split in a batch");
    UNSUPPORTED_IF(narrow(p.a.type) && kernel->alignment < 16, "algorithm %d: not for FP8 and FP4", algo.id);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t check_alignment(const Problem &p, const Kernel &kernel, const Preference &preference)
{
    const struct {
        const char *name;
        const Layout *layout;
        uint32_t least;
    } all[] = {{"A", &p.a, preference.align_a},
               {"B", &p.b, preference.align_b},
               {"C", &p.c, preference.align_c},
               {"D", &p.d, preference.align_d}};
    for (const auto &x : all) {
        int64_t need = kernel.alignment ? kernel.alignment : bytes_of(x.layout->type, 1);
        bool batch = x.layout->batch_count > 1;
        UNSUPPORTED_IF(x.least % need || bytes_of(x.layout->type, x.layout->ld) % need ||
                           (batch && bytes_of(x.layout->type, x.layout->batch_stride) % need),
                       "%s: the algorithm needs addresses and columns at multiples of %lld bytes", x.name,
                       (long long)need);
    }
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- the call ---- */

static cublasStatus_t check_memory(const char *name, const void *device, int64_t bytes, int64_t alignment)
{
    INVALID_IF(!device, "%s is NULL", name);
    INVALID_IF((uintptr_t)device % (uintptr_t)alignment, "%s is not at a multiple of %lld bytes", name,
               (long long)alignment);
    if (!is_device_address(device))
        return refuse(CUBLAS_STATUS_EXECUTION_FAILED, "%s: %p is not device memory", name, device);
    device_memory(device, (size_t)bytes, (std::string("cublasLtMatmul: ") + name).c_str());
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_factor(const char *name, const void *factor, bool device)
{
    INVALID_IF(!factor, "%s is NULL", name);
    if (device) return check_memory(name, factor, sizeof(float), sizeof(float));
    if (is_device_address(factor))
        return refuse(CUBLAS_STATUS_EXECUTION_FAILED, "%s is device memory in pointer mode host", name);
    return CUBLAS_STATUS_SUCCESS;
}

static bool overlap(const void *x, int64_t x_bytes, const void *y, int64_t y_bytes)
{
    return x && y && (uintptr_t)x < (uintptr_t)y + (uintptr_t)y_bytes &&
           (uintptr_t)y < (uintptr_t)x + (uintptr_t)x_bytes;
}

static cublasStatus_t check_c(const Call &call, const void *beta)
{
    const Problem &p = call.problem;
    bool used = p.desc.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE || *(const float *)beta != 0;
    INVALID_IF(used && !call.c, "C is NULL and beta is not known to be 0");
    if (!call.c) return CUBLAS_STATUS_SUCCESS;
    int64_t need = call.kernel.alignment ? call.kernel.alignment : bytes_of(p.c.type, 1);
    FORWARD(check_memory("C", call.c, matrix_bytes(p.c), need));
    bool same = p.c.type == p.d.type && p.c.ld == p.d.ld && p.c.batch_stride == p.d.batch_stride;
    INVALID_IF(call.c == call.d && !same, "in place, C and D have different layouts");
    INVALID_IF(call.c != call.d && overlap(call.c, matrix_bytes(p.c), call.d, matrix_bytes(p.d)), "C overlaps D");
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t check_attributes(const Problem &p)
{
    const Desc &s = p.desc;
    int block = scale_block(s);
    int64_t align = block ? 16 : sizeof(float);
    int64_t a_bytes = block ? scale_bytes(p.m, p.k, block) : (int64_t)sizeof(float);
    int64_t b_bytes = block ? scale_bytes(p.n, p.k, block) : (int64_t)sizeof(float);
    if (s.a_scale) FORWARD(check_memory("scale of A", s.a_scale, a_bytes, align));
    if (s.b_scale) FORWARD(check_memory("scale of B", s.b_scale, b_bytes, align));
    if (s.d_scale) FORWARD(check_memory("scale of D", s.d_scale, sizeof(float), sizeof(float)));
    if (s.d_amax) FORWARD(check_memory("amax of D", s.d_amax, sizeof(float), sizeof(float)));
    if (!has_bias(s.epilogue)) return CUBLAS_STATUS_SUCCESS;
    int64_t elements = p.m + (p.d.batch_count - 1) * s.bias_batch_stride;
    return check_memory("bias", s.bias, bytes_of(bias_type_of(p), elements), bytes_of(bias_type_of(p), 1));
}

cublasStatus_t check_call(const Call &call, const void *alpha, const void *beta, uint64_t workspace_bytes)
{
    const Problem &p = call.problem;
    bool device = p.desc.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE;
    FORWARD(check_factor("alpha", alpha, device));
    FORWARD(check_factor("beta", beta, device));
    auto need = [&](const Layout &l) { return call.kernel.alignment ? call.kernel.alignment : bytes_of(l.type, 1); };
    FORWARD(check_memory("A", call.a, matrix_bytes(p.a), need(p.a)));
    FORWARD(check_memory("B", call.b, matrix_bytes(p.b), need(p.b)));
    FORWARD(check_memory("D", call.d, matrix_bytes(p.d), need(p.d)));
    INVALID_IF(overlap(call.d, matrix_bytes(p.d), call.a, matrix_bytes(p.a)), "D overlaps A");
    INVALID_IF(overlap(call.d, matrix_bytes(p.d), call.b, matrix_bytes(p.b)), "D overlaps B");
    FORWARD(check_c(call, beta));
    FORWARD(check_attributes(p));
    if (workspace_bytes) FORWARD(check_memory("workspace", call.workspace, (int64_t)workspace_bytes, 256));
    return CUBLAS_STATUS_SUCCESS;
}

} // namespace lt
} // namespace cuda_on_cpu
