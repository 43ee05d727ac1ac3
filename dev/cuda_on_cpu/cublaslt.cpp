/* A double of cuBLASLt: the functions of cublasLt.h, with its own signatures, for programs that run on a CPU.
 *
 * It is stricter than the library. An algorithm works only for the problem that a heuristic gave it for, a host pointer
 * where a device pointer belongs is refused, and every refusal has a reason (cuda_on_cpu::cublaslt_reason(), and on
 * stderr with CUDA_ON_CPU_VERBOSE=1) besides its documented status. Which device there is, and so which types exist,
 * cudaDeviceGetAttribute says.
 */
#include "cublaslt_problem.h"
#include "internal.h"

#include <string.h>

using namespace cuda_on_cpu::lt;

struct cublasLtContext {
    uint32_t magic;
};
static const uint32_t CONTEXT_MAGIC = 0x626c6173;

namespace cuda_on_cpu
{
namespace lt
{
/* Two tiles, without and with K split; the last takes any address and column. Their sums differ in the last bits. */
const Kernel kernels[KERNELS] = {
    {CUBLASLT_MATMUL_TILE_128x128, 128, 128, 256, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 16},
    {CUBLASLT_MATMUL_TILE_64x64, 64, 64, 64, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 16},
    {CUBLASLT_MATMUL_TILE_128x64, 128, 64, 128, 2, CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE, 16},
    {CUBLASLT_MATMUL_TILE_64x128, 64, 128, 128, 3, CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE, 16},
    {CUBLASLT_MATMUL_TILE_32x32, 32, 32, 32, 1, CUBLASLT_REDUCTION_SCHEME_NONE, 0},
};
} // namespace lt
} // namespace cuda_on_cpu

static bool alive(cublasLtHandle_t handle) { return handle && handle->magic == CONTEXT_MAGIC; }

static Algo make_algo(int id, uint32_t types, uint64_t problem)
{
    const Kernel &k = kernels[id];
    return Algo{ALGO_MAGIC, id, k.tile, k.split_k, k.reduction, 0, 0, 0, 0, 0, types, problem};
}

/* The algorithms for a problem, at most `most`: the double has no idea of time and keeps its own order. When there is none,
 * the reason is that of the last one. */
static int heuristic(const Problem &p, const Preference &preference, cublasLtMatmulHeuristicResult_t *results, int most)
{
    int count = 0;
    uint32_t types = hash_types(p.desc.compute_type, p.desc.scale_type, p.a.type, p.b.type, p.c.type, p.d.type);
    keep_quiet(true);
    for (int id = 0; id < KERNELS && count < most; id++) {
        Algo algo = make_algo(id, types, hash_problem(p));
        Kernel kernel;
        uint64_t workspace;
        if (check_algo(p, algo, &kernel, &workspace) || check_alignment(p, kernel, preference)) continue;
        if (workspace > preference.workspace || (kernel.reduction & ~preference.reduction_mask)) continue;
        cublasLtMatmulHeuristicResult_t r = {};
        memcpy(&r.algo, &algo, sizeof algo);
        r.workspaceSize = workspace;
        r.wavesCount = (float)(p.m * p.n) / ((float)kernel.tile_rows * (float)kernel.tile_cols);
        results[count++] = r;
    }
    keep_quiet(false);
    return count;
}

static cublasStatus_t no_algorithm()
{
    std::string last = cuda_on_cpu::cublaslt_reason();
    return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "no algorithm; the last one: %s", last.c_str());
}

extern "C" {

/* ---- the library ---- */

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    if (!handle) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no place for the handle");
    *handle = new cublasLtContext{CONTEXT_MAGIC};
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_INVALID_VALUE, "not a handle");
    handle->magic = 0;
    delete handle;
    return CUBLAS_STATUS_SUCCESS;
}

size_t cublasLtGetVersion(void) { return CUBLAS_VERSION; }
size_t cublasLtGetCudartVersion(void) { return CUDART_VERSION; }

cublasStatus_t cublasLtGetProperty(libraryPropertyType type, int *value)
{
    if (!value) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no place for the property");
    *value = type == MAJOR_VERSION ? CUBLAS_VER_MAJOR : type == MINOR_VERSION ? CUBLAS_VER_MINOR : CUBLAS_VER_PATCH;
    return CUBLAS_STATUS_SUCCESS;
}

/* ---- algorithms ---- */

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t results[], int *returned)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (!preference || !results || !returned || requested <= 0)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "%d algorithms requested, or a pointer is NULL", requested);
    *returned = 0;
    Problem p;
    cublasStatus_t status = check_problem(&p, (const Desc *)desc, (const Layout *)a, (const Layout *)b,
                                          (const Layout *)c, (const Layout *)d);
    if (status == CUBLAS_STATUS_ARCH_MISMATCH) return CUBLAS_STATUS_NOT_SUPPORTED;
    if (status) return status;
    const Preference &wanted = *(const Preference *)preference;
    if (wanted.search_mode != CUBLASLT_SEARCH_BEST_FIT)
        return refuse(CUBLAS_STATUS_NOT_SUPPORTED, "search mode %u: not in the double", wanted.search_mode);
    *returned = heuristic(p, wanted, results, requested);
    return *returned ? CUBLAS_STATUS_SUCCESS : no_algorithm();
}

cublasStatus_t cublasLtMatmulAlgoGetIds(cublasLtHandle_t handle, cublasComputeType_t, cudaDataType_t, cudaDataType_t,
                                        cudaDataType_t, cudaDataType_t, cudaDataType_t, int requested, int ids[],
                                        int *returned)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (requested <= 0 || !ids || !returned) return refuse(CUBLAS_STATUS_INVALID_VALUE, "%d ids requested", requested);
    *returned = requested < KERNELS ? requested : (int)KERNELS;
    for (int id = 0; id < *returned; id++) ids[id] = id;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoInit(cublasLtHandle_t handle, cublasComputeType_t compute, cudaDataType_t scale,
                                      cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, cudaDataType_t d, int id,
                                      cublasLtMatmulAlgo_t *algo)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (!algo || id < 0 || id >= KERNELS) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no algorithm %d", id);
    Algo made = make_algo(id, hash_types(compute, scale, a, b, c, d), 0);
    memset(algo, 0, sizeof *algo);
    memcpy(algo, &made, sizeof made);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, cublasLtMatrixLayout_t a,
                                       cublasLtMatrixLayout_t b, cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                       const cublasLtMatmulAlgo_t *algo, cublasLtMatmulHeuristicResult_t *result)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    if (!algo || !result) return refuse(CUBLAS_STATUS_INVALID_VALUE, "a pointer is NULL");
    Problem p;
    Kernel kernel;
    uint64_t workspace = 0;
    cublasStatus_t status = check_problem(&p, (const Desc *)desc, (const Layout *)a, (const Layout *)b,
                                          (const Layout *)c, (const Layout *)d);
    if (!status) status = check_algo(p, *(const Algo *)algo, &kernel, &workspace);
    if (!status) status = check_alignment(p, kernel, Preference());
    if (status) return status;
    result->workspaceSize = workspace;
    result->state = CUBLAS_STATUS_SUCCESS;
    result->wavesCount = (float)(p.m * p.n) / ((float)kernel.tile_rows * (float)kernel.tile_cols);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCapGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                 cublasLtMatmulAlgoCapAttributes_t attribute, void *to, size_t bytes,
                                                 size_t *written)
{
    const Algo *made = (const Algo *)algo;
    if (!made || made->magic != ALGO_MAGIC || made->id < 0 || made->id >= KERNELS)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "not an algorithm of this library");
    const Kernel &k = kernels[made->id];
    uint32_t value;
    switch (attribute) {
    case CUBLASLT_ALGO_CAP_SPLITK_SUPPORT:
    case CUBLASLT_ALGO_CAP_STRIDED_BATCH_SUPPORT:
    case CUBLASLT_ALGO_CAP_OUT_OF_PLACE_RESULT_SUPPORT:
        value = 1;
        break;
    case CUBLASLT_ALGO_CAP_REDUCTION_SCHEME_MASK:
        value = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE | CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE;
        break;
    case CUBLASLT_ALGO_CAP_TILE_IDS:
        value = k.tile;
        break;
    case CUBLASLT_ALGO_CAP_STAGES_IDS:
        value = CUBLASLT_MATMUL_STAGES_UNDEFINED;
        break;
    case CUBLASLT_ALGO_CAP_POINTER_MODE_MASK:
        value = CUBLASLT_POINTER_MODE_MASK_HOST | CUBLASLT_POINTER_MODE_MASK_DEVICE;
        break;
    case CUBLASLT_ALGO_CAP_EPILOGUE_MASK:
        value = CUBLASLT_EPILOGUE_DEFAULT | CUBLASLT_EPILOGUE_RELU_BIAS | CUBLASLT_EPILOGUE_GELU_BIAS;
        break;
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_A_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_B_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_C_BYTES:
    case CUBLASLT_ALGO_CAP_MIN_ALIGNMENT_D_BYTES:
        value = k.alignment ? k.alignment : 4;
        break;
    default:
        value = 0;
        break;
    }
    return give(&value, sizeof value, to, bytes, written);
}

/* ---- the product ---- */

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t desc, const void *alpha, const void *A,
                              cublasLtMatrixLayout_t a, const void *B, cublasLtMatrixLayout_t b, const void *beta,
                              const void *C, cublasLtMatrixLayout_t c, void *D, cublasLtMatrixLayout_t d,
                              const cublasLtMatmulAlgo_t *algo, void *workspace, size_t workspace_bytes,
                              cudaStream_t stream)
{
    if (!alive(handle)) return refuse(CUBLAS_STATUS_NOT_INITIALIZED, "not a handle");
    Call call = {};
    call.a = A, call.b = B, call.c = C, call.d = D, call.workspace = workspace;
    Problem &p = call.problem;
    cublasStatus_t status = check_problem(&p, (const Desc *)desc, (const Layout *)a, (const Layout *)b,
                                          (const Layout *)c, (const Layout *)d);
    if (status) return status;
    cublasLtMatmulHeuristicResult_t best = {};
    if (!algo) {
        Preference preference;
        preference.workspace = workspace_bytes;
        if (!heuristic(p, preference, &best, 1)) return no_algorithm();
        algo = &best.algo;
    }
    uint64_t need = 0;
    status = check_algo(p, *(const Algo *)algo, &call.kernel, &need);
    if (!status) status = check_alignment(p, call.kernel, Preference());
    if (status) return status;
    if (workspace_bytes < need)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "a workspace of %zu bytes, and the algorithm needs %llu",
                      workspace_bytes, (unsigned long long)need);
    status = check_call(call, alpha, beta, need);
    if (status) return status;
    if (p.desc.pointer_mode == CUBLASLT_POINTER_MODE_DEVICE)
        call.alpha_device = alpha, call.beta_device = beta;
    else
        call.alpha = *(const float *)alpha, call.beta = *(const float *)beta;
    cuda_on_cpu::enqueue(stream, [call] { compute(call); });
    return CUBLAS_STATUS_SUCCESS;
}

} /* extern "C" */
