/* The descriptors of the double of cuBLASLt: their attributes, and the names of statuses.
 *
 * Setting an attribute checks its size and no more, as the library does; contradictions are found by the rules.
 */
#include "cublaslt_problem.h"

#include <new>
#include <stddef.h>
#include <string.h>

using namespace cuda_on_cpu::lt;

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

cublasStatus_t cuda_on_cpu::lt::give(const void *from, size_t size, void *to, size_t bytes, size_t *written)
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

extern "C" {

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

/* ---- statuses ---- */

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

} /* extern "C" */
