/* A double of cuBLASLt: the functions of cublasLt.h, with its own signatures, for programs that run on a CPU.
 *
 * It is stricter than the library. An algorithm works only for the problem that a heuristic gave it for, a host pointer
 * where a device pointer belongs is refused, and every refusal has a reason (cuda_on_cpu::cublaslt_reason(), and on
 * stderr with CUDA_ON_CPU_VERBOSE=1) besides its documented status. Setting an attribute checks the size and no more, as
 * the library does; contradictions are found by the heuristic and by the call. Which device there is, and so which types
 * exist, cudaDeviceGetAttribute says.
 */
#include "cublaslt_problem.h"
#include "internal.h"

#include <new>
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

/* ---- attributes: one table each of where they are ---- */

struct Field {
    int attribute;
    size_t offset, bytes;
};
#define FIELD(attribute, type, member)                                                                                 \
    {                                                                                                                  \
        attribute, offsetof(type, member), sizeof(type::member)                                                        \
    }

static const Field layout_fields[] = {
    FIELD(CUBLASLT_MATRIX_LAYOUT_TYPE, Layout, type),
    FIELD(CUBLASLT_MATRIX_LAYOUT_ORDER, Layout, order),
    FIELD(CUBLASLT_MATRIX_LAYOUT_ROWS, Layout, rows),
    FIELD(CUBLASLT_MATRIX_LAYOUT_COLS, Layout, cols),
    FIELD(CUBLASLT_MATRIX_LAYOUT_LD, Layout, ld),
    FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, Layout, batch_count),
    FIELD(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, Layout, batch_stride),
    FIELD(CUBLASLT_MATRIX_LAYOUT_PLANE_OFFSET, Layout, plane_offset),
    FIELD(CUBLASLT_MATRIX_LAYOUT_BATCH_MODE, Layout, batch_mode),
};

static const Field desc_fields[] = {
    FIELD(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, Desc, compute_type),
    FIELD(CUBLASLT_MATMUL_DESC_SCALE_TYPE, Desc, scale_type),
    FIELD(CUBLASLT_MATMUL_DESC_POINTER_MODE, Desc, pointer_mode),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSA, Desc, trans_a),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSB, Desc, trans_b),
    FIELD(CUBLASLT_MATMUL_DESC_TRANSC, Desc, trans_c),
    FIELD(CUBLASLT_MATMUL_DESC_FILL_MODE, Desc, fill),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE, Desc, epilogue),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_POINTER, Desc, bias),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, Desc, bias_batch_stride),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, Desc, aux),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, Desc, aux_ld),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_BATCH_STRIDE, Desc, aux_batch_stride),
    FIELD(CUBLASLT_MATMUL_DESC_ALPHA_VECTOR_BATCH_STRIDE, Desc, alpha_batch_stride),
    FIELD(CUBLASLT_MATMUL_DESC_SM_COUNT_TARGET, Desc, sm_count),
    FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, Desc, a_scale),
    FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, Desc, b_scale),
    FIELD(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, Desc, c_scale),
    FIELD(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, Desc, d_scale),
    FIELD(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, Desc, d_amax),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, Desc, aux_type),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_POINTER, Desc, aux_scale),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_AMAX_POINTER, Desc, aux_amax),
    FIELD(CUBLASLT_MATMUL_DESC_FAST_ACCUM, Desc, fast_accum),
    FIELD(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, Desc, bias_type),
    FIELD(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, Desc, a_mode),
    FIELD(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, Desc, b_mode),
    FIELD(CUBLASLT_MATMUL_DESC_C_SCALE_MODE, Desc, c_mode),
    FIELD(CUBLASLT_MATMUL_DESC_D_SCALE_MODE, Desc, d_mode),
    FIELD(CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_SCALE_MODE, Desc, aux_mode),
    FIELD(CUBLASLT_MATMUL_DESC_D_OUT_SCALE_POINTER, Desc, d_out_scale),
    FIELD(CUBLASLT_MATMUL_DESC_D_OUT_SCALE_MODE, Desc, d_out_mode),
    FIELD(CUBLASLT_MATMUL_DESC_EMULATION_DESCRIPTOR, Desc, emulation),
};

static const Field preference_fields[] = {
    FIELD(CUBLASLT_MATMUL_PREF_SEARCH_MODE, Preference, search_mode),
    FIELD(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, Preference, workspace),
    FIELD(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, Preference, reduction_mask),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, Preference, align_a),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, Preference, align_b),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, Preference, align_c),
    FIELD(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, Preference, align_d),
    FIELD(CUBLASLT_MATMUL_PREF_MAX_WAVES_COUNT, Preference, max_waves),
    FIELD(CUBLASLT_MATMUL_PREF_IMPL_MASK, Preference, impl_mask),
};

static const Field config_fields[] = {
    FIELD(CUBLASLT_ALGO_CONFIG_ID, Algo, id),
    FIELD(CUBLASLT_ALGO_CONFIG_TILE_ID, Algo, tile),
    FIELD(CUBLASLT_ALGO_CONFIG_SPLITK_NUM, Algo, split_k),
    FIELD(CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, Algo, reduction),
    FIELD(CUBLASLT_ALGO_CONFIG_CTA_SWIZZLING, Algo, swizzle),
    FIELD(CUBLASLT_ALGO_CONFIG_CUSTOM_OPTION, Algo, custom),
    FIELD(CUBLASLT_ALGO_CONFIG_STAGES_ID, Algo, stages),
    FIELD(CUBLASLT_ALGO_CONFIG_INNER_SHAPE_ID, Algo, inner_shape),
    FIELD(CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, Algo, cluster_shape),
};

template <size_t count>
static cublasStatus_t set_field(const Field (&fields)[count], void *object, int attribute, const void *from,
                                size_t bytes)
{
    if (!object || !from) return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d: a pointer is NULL", attribute);
    for (const Field &f : fields)
        if (f.attribute == attribute && f.bytes == bytes) {
            memcpy((char *)object + f.offset, from, bytes);
            return CUBLAS_STATUS_SUCCESS;
        }
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "no attribute %d of %zu bytes", attribute, bytes);
}

static cublasStatus_t give(const void *from, size_t size, void *to, size_t bytes, size_t *written)
{
    if (bytes == 0 ? !written : !to || bytes != size)
        return refuse(CUBLAS_STATUS_INVALID_VALUE, "an attribute of %zu bytes into %zu", size, bytes);
    if (bytes) memcpy(to, from, size);
    if (written) *written = size;
    return CUBLAS_STATUS_SUCCESS;
}

template <size_t count>
static cublasStatus_t get_field(const Field (&fields)[count], const void *object, int attribute, void *to, size_t bytes,
                                size_t *written)
{
    if (!object) return refuse(CUBLAS_STATUS_INVALID_VALUE, "attribute %d of NULL", attribute);
    for (const Field &f : fields)
        if (f.attribute == attribute) return give((const char *)object + f.offset, f.bytes, to, bytes, written);
    return refuse(CUBLAS_STATUS_INVALID_VALUE, "no attribute %d", attribute);
}

/* Makes the memory of an opaque descriptor one of ours. */
template <class T, class Opaque> static cublasStatus_t init(Opaque *memory, size_t size, const T &value)
{
    if (!memory) return refuse(CUBLAS_STATUS_INVALID_VALUE, "a descriptor is NULL");
    if (size < sizeof *memory) return refuse(CUBLAS_STATUS_ALLOC_FAILED, "%zu bytes for a descriptor", size);
    new (memory) T(value);
    return CUBLAS_STATUS_SUCCESS;
}

template <class T, class Opaque> static cublasStatus_t create(Opaque **out, const T &value)
{
    if (!out) return refuse(CUBLAS_STATUS_INVALID_VALUE, "no place for the descriptor");
    *out = new Opaque();
    return init<T>(*out, sizeof **out, value);
}

static Layout make_layout(cudaDataType type, uint64_t rows, uint64_t cols, int64_t ld)
{
    Layout l;
    l.type = (uint32_t)type, l.rows = rows, l.cols = cols, l.ld = ld;
    return l;
}

static Desc make_desc(cublasComputeType_t compute, cudaDataType_t scale)
{
    Desc d;
    d.compute_type = compute, d.scale_type = scale;
    return d;
}

static bool alive(cublasLtHandle_t handle) { return handle && handle->magic == CONTEXT_MAGIC; }

static Algo make_algo(int id, uint32_t types, uint64_t problem)
{
    const Kernel &k = kernels[id];
    return Algo{ALGO_MAGIC, id, k.tile, k.split_k, k.reduction, 0, 0, 0, 0, 0, types, problem};
}

/* The algorithms for a problem, at most `most`: the double has no idea of time and keeps its own order. */
static int heuristic(const Problem &p, const Preference &preference, cublasLtMatmulHeuristicResult_t *results, int most)
{
    int count = 0;
    uint32_t types = hash_types(p.desc.compute_type, p.desc.scale_type, p.a.type, p.b.type, p.c.type, p.d.type);
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
    return count;
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

static const struct {
    cublasStatus_t status;
    const char *name, *text;
} statuses[] = {
    {CUBLAS_STATUS_SUCCESS, "CUBLAS_STATUS_SUCCESS", "success"},
    {CUBLAS_STATUS_NOT_INITIALIZED, "CUBLAS_STATUS_NOT_INITIALIZED", "the handle is not one of the library"},
    {CUBLAS_STATUS_ALLOC_FAILED, "CUBLAS_STATUS_ALLOC_FAILED", "not enough memory"},
    {CUBLAS_STATUS_INVALID_VALUE, "CUBLAS_STATUS_INVALID_VALUE", "arguments that are invalid or in conflict"},
    {CUBLAS_STATUS_ARCH_MISMATCH, "CUBLAS_STATUS_ARCH_MISMATCH", "the device lacks what the operation needs"},
    {CUBLAS_STATUS_MAPPING_ERROR, "CUBLAS_STATUS_MAPPING_ERROR", "an access to device memory failed"},
    {CUBLAS_STATUS_EXECUTION_FAILED, "CUBLAS_STATUS_EXECUTION_FAILED", "the device could not run the operation"},
    {CUBLAS_STATUS_INTERNAL_ERROR, "CUBLAS_STATUS_INTERNAL_ERROR", "the library failed"},
    {CUBLAS_STATUS_NOT_SUPPORTED, "CUBLAS_STATUS_NOT_SUPPORTED", "the operation is not supported"},
    {CUBLAS_STATUS_LICENSE_ERROR, "CUBLAS_STATUS_LICENSE_ERROR", "the license check failed"},
};

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    for (const auto &s : statuses)
        if (s.status == status) return s.name;
    return "unrecognized status";
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    for (const auto &s : statuses)
        if (s.status == status) return s.text;
    return "unrecognized status";
}

/* ---- descriptors ---- */

cublasStatus_t cublasLtMatrixLayoutInit_internal(cublasLtMatrixLayout_t layout, size_t size, cudaDataType type,
                                                 uint64_t rows, uint64_t cols, int64_t ld)
{
    return init(layout, size, make_layout(type, rows, cols, ld));
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *layout, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    return create(layout, make_layout(type, rows, cols, ld));
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout)
{
    delete layout;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *from,
                                                size_t bytes)
{
    return set_field(layout_fields, layout, attribute, from, bytes);
}

cublasStatus_t cublasLtMatrixLayoutGetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, void *to, size_t bytes,
                                                size_t *written)
{
    return get_field(layout_fields, layout, attribute, to, bytes, written);
}

cublasStatus_t cublasLtMatmulDescInit_internal(cublasLtMatmulDesc_t desc, size_t size, cublasComputeType_t compute,
                                               cudaDataType_t scale)
{
    return init(desc, size, make_desc(compute, scale));
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *desc, cublasComputeType_t compute, cudaDataType_t scale)
{
    return create(desc, make_desc(compute, scale));
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t desc)
{
    delete desc;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              const void *from, size_t bytes)
{
    return set_field(desc_fields, desc, attribute, from, bytes);
}

cublasStatus_t cublasLtMatmulDescGetAttribute(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute,
                                              void *to, size_t bytes, size_t *written)
{
    return get_field(desc_fields, desc, attribute, to, bytes, written);
}

cublasStatus_t cublasLtMatmulPreferenceInit_internal(cublasLtMatmulPreference_t preference, size_t size)
{
    return init(preference, size, Preference());
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    return create(preference, Preference());
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    delete preference;
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *from,
                                                    size_t bytes)
{
    return set_field(preference_fields, preference, attribute, from, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceGetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, void *to,
                                                    size_t bytes, size_t *written)
{
    return get_field(preference_fields, preference, attribute, to, bytes, written);
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
    return *returned ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
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

cublasStatus_t cublasLtMatmulAlgoConfigSetAttribute(cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, const void *from,
                                                    size_t bytes)
{
    if (attribute == CUBLASLT_ALGO_CONFIG_ID) return refuse(CUBLAS_STATUS_INVALID_VALUE, "the id cannot be set");
    return set_field(config_fields, algo, attribute, from, bytes);
}

cublasStatus_t cublasLtMatmulAlgoConfigGetAttribute(const cublasLtMatmulAlgo_t *algo,
                                                    cublasLtMatmulAlgoConfigAttributes_t attribute, void *to,
                                                    size_t bytes, size_t *written)
{
    return get_field(config_fields, algo, attribute, to, bytes, written);
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
        if (!heuristic(p, preference, &best, 1)) return CUBLAS_STATUS_NOT_SUPPORTED;
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
