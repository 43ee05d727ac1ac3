/* Inside the double of cuBLASLt: what its four files share.
 *
 *     cublaslt.cpp              the functions of cublasLt.h: handle, heuristic, algorithms, the call
 *     cublaslt_descriptors.cpp  descriptors and their attributes, names of statuses
 *     cublaslt_rules.cpp        what the documentation asks of a product; every refusal has a status and a reason
 *     cublaslt_compute.cpp      the product itself
 *
 * The descriptors of cublasLt.h are opaque memory of a fixed size, which callers may put on their stack: the structs
 * here are what is in it. A Problem is a descriptor and four layouts that have passed the rules.
 */
#ifndef CUDA_ON_CPU_CUBLASLT_PROBLEM_H
#define CUDA_ON_CPU_CUBLASLT_PROBLEM_H

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <stddef.h>
#include <stdint.h>

namespace cuda_on_cpu
{
namespace lt
{

struct Layout {
    uint32_t type = 0;
    int32_t order = CUBLASLT_ORDER_COL;
    uint64_t rows = 0, cols = 0;
    int64_t ld = 0;
    int32_t batch_count = 1;
    uint32_t batch_mode = CUBLASLT_BATCH_MODE_STRIDED;
    int64_t batch_stride = 0, plane_offset = 0;
};

struct Desc {
    int32_t compute_type = 0, scale_type = 0, pointer_mode = CUBLASLT_POINTER_MODE_HOST;
    int32_t trans_a = CUBLAS_OP_N, trans_b = CUBLAS_OP_N, trans_c = CUBLAS_OP_N, fill = CUBLAS_FILL_MODE_FULL;
    uint32_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
    const void *bias = nullptr;
    int64_t bias_batch_stride = 0;
    void *aux = nullptr;
    int64_t aux_ld = 0, aux_batch_stride = 0, alpha_batch_stride = 0;
    int32_t sm_count = 0, aux_type = -1, bias_type = -1;
    int8_t fast_accum = 0;
    const void *a_scale = nullptr, *b_scale = nullptr, *c_scale = nullptr, *d_scale = nullptr;
    void *d_amax = nullptr, *d_out_scale = nullptr, *aux_amax = nullptr;
    const void *aux_scale = nullptr, *emulation = nullptr;
    int32_t a_mode = 0, b_mode = 0, c_mode = 0, d_mode = 0, aux_mode = 0, d_out_mode = 0;
};

struct Preference {
    uint32_t search_mode = CUBLASLT_SEARCH_BEST_FIT, reduction_mask = CUBLASLT_REDUCTION_SCHEME_MASK;
    uint64_t workspace = 0, impl_mask = ~0ull;
    uint32_t align_a = 256, align_b = 256, align_c = 256, align_d = 256;
    float max_waves = 0;
};

const uint32_t ALGO_MAGIC = 0x616c676f;

struct Algo {
    uint32_t magic;
    int32_t id;
    uint32_t tile;
    int32_t split_k;
    uint32_t reduction, swizzle, custom, stages;
    uint16_t inner_shape, cluster_shape;
    uint32_t types; /* hash of the data types it was made for */
    uint64_t
        problem; /* hash of the problem a heuristic gave it for; 0: from cublasLtMatmulAlgoInit, any of its types */
};

static_assert(sizeof(Layout) <= sizeof(cublasLtMatrixLayoutOpaque_t), "fits");
static_assert(sizeof(Desc) <= sizeof(cublasLtMatmulDescOpaque_t), "fits");
static_assert(sizeof(Preference) <= sizeof(cublasLtMatmulPreferenceOpaque_t), "fits");
static_assert(sizeof(Algo) <= sizeof(cublasLtMatmulAlgo_t), "fits");

struct Problem {
    Desc desc;
    Layout a, b, c, d;
    int64_t m, n, k; /* D is m x n */
    bool transposed_a, transposed_b;
};

struct Kernel { /* what an algorithm's id stands for */
    uint32_t tile, tile_rows, tile_cols;
    int64_t slice_k; /* so many products are summed from zero before their sum is added to the total */
    int split_k;
    uint32_t reduction;
    uint32_t alignment; /* bytes: of pointers, columns and batches; 0: an element's */
};
enum { KERNELS = 5 };
extern const Kernel kernels[KERNELS];

struct Call { /* a product to run: addresses are the device's */
    Problem problem;
    Kernel kernel;
    const void *a, *b, *c;
    void *d, *workspace;
    const void *alpha_device, *beta_device; /* read when the stream gets there; or NULL and the values below */
    float alpha, beta;
};

/* ---- cublaslt_descriptors.cpp ---- */

/* An attribute of `size` bytes to the caller's `bytes`, or, when those are 0, only its size. */
cublasStatus_t give(const void *from, size_t size, void *to, size_t bytes, size_t *written);

/* ---- cublaslt_rules.cpp ---- */

/* Notes the reason, prints it when CUDA_ON_CPU_VERBOSE=1; returns status. */
__attribute__((format(printf, 2, 3))) cublasStatus_t refuse(cublasStatus_t status, const char *format, ...);
void keep_quiet(bool yes); /* while an algorithm that does not fit is only one of several */

bool is_fp8(uint32_t type);
bool is_fp4(uint32_t type);
int64_t bits_of(uint32_t type);    /* 0: a type that the double does not know */
int scale_block(const Desc &desc); /* 16, 32, or 0 when scales are not per block */
uint32_t bias_type_of(const Problem &p);
inline int64_t bytes_of(uint32_t type, int64_t elements) { return (elements * bits_of(type) + 7) / 8; }
int64_t matrix_bytes(const Layout &layout); /* from the first element to the last, all of the batch */
int64_t scale_bytes(int64_t outer, int64_t k, int block);
bool has_bias(uint32_t epilogue);

/* Everything that does not depend on addresses. */
cublasStatus_t check_problem(Problem *p, const Desc *desc, const Layout *a, const Layout *b, const Layout *c,
                             const Layout *d);
/* Whether this algorithm can do it, and with how much workspace. */
cublasStatus_t check_algo(const Problem &p, const Algo &algo, Kernel *kernel, uint64_t *workspace);
/* Whether addresses aligned to so many bytes suffice for the kernel. */
cublasStatus_t check_alignment(const Problem &p, const Kernel &kernel, const Preference &preference);
/* Addresses: that they are device memory, large enough, aligned. */
cublasStatus_t check_call(const Call &call, const void *alpha, const void *beta, uint64_t workspace_bytes);

uint32_t hash_types(int32_t compute, int32_t scale, uint32_t a, uint32_t b, uint32_t c, uint32_t d);
uint64_t hash_problem(const Problem &p);

/* ---- cublaslt_compute.cpp ---- */

void compute(const Call &call);

} // namespace lt

/* Why the last call of cuBLASLt on this thread that did not succeed was refused. */
const char *cublaslt_reason();

} // namespace cuda_on_cpu

#endif
