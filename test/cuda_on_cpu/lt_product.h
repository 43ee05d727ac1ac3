/* One product for the tests of the double of cuBLASLt: its descriptors and device memory, filled with random codes, and
 * what it should give, by loops in double over formats that are decoded by their formula.
 *
 *     Product p(spec);                  // a Spec says types, sizes, transposes; members can be changed before a call
 *     p.heuristic();                    // status; p.results
 *     p.run(&p.results[0].algo);        // status
 *     p.check("what it is");            // D against the loops
 */
#ifndef LT_PRODUCT_H
#define LT_PRODUCT_H

#include "../test.h"

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <vector>

namespace cuda_on_cpu
{
const char *cublaslt_reason();
}

/* ---- formats, by their definition ---- */

static inline double small_float(unsigned code, int exponent_bits, int mantissa_bits, int bias)
{
    unsigned sign = code >> (exponent_bits + mantissa_bits) & 1, mantissa = code & ((1u << mantissa_bits) - 1);
    int exponent = (int)(code >> mantissa_bits & ((1u << exponent_bits) - 1));
    double x = exponent ? ldexp((double)(mantissa + (1u << mantissa_bits)), exponent - bias - mantissa_bits)
                        : ldexp((double)mantissa, 1 - bias - mantissa_bits);
    return sign ? -x : x;
}

static inline int type_bits(cudaDataType t)
{
    return t == CUDA_R_32F ? 32 : t == CUDA_R_16BF ? 16 : t == CUDA_R_4F_E2M1 ? 4 : 8;
}

static inline double decode(cudaDataType t, const std::vector<uint8_t> &bytes, int64_t index)
{
    uint16_t half;
    float single;
    switch (t) {
    case CUDA_R_32F:
        memcpy(&single, &bytes[(size_t)index * 4], 4);
        return single;
    case CUDA_R_16BF:
        memcpy(&half, &bytes[(size_t)index * 2], 2);
        return small_float(half, 8, 7, 127);
    case CUDA_R_8F_E4M3:
        return small_float(bytes[(size_t)index], 4, 3, 7);
    case CUDA_R_8F_E5M2:
        return small_float(bytes[(size_t)index], 5, 2, 15);
    default:
        return small_float(bytes[(size_t)index / 2] >> index % 2 * 4 & 15, 2, 1, 1);
    }
}

static inline double ulp(cudaDataType t) /* relative error of storing as t, and a little */
{
    return t == CUDA_R_32F ? 1e-7 : t == CUDA_R_16BF ? 1.0 / 250 : t == CUDA_R_8F_E4M3 ? 1.0 / 15.9 : 1.0 / 7.9;
}

/* ---- random contents ---- */

static inline uint32_t next_random(uint64_t *state)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33);
}

/* Values of about 1, all mantissas, both signs. */
static inline std::vector<uint8_t> random_codes(cudaDataType t, int64_t elements, uint64_t *state)
{
    std::vector<uint8_t> bytes((size_t)(elements * type_bits(t) + 7) / 8);
    for (size_t i = 0; i < bytes.size(); i++) bytes[i] = (uint8_t)next_random(state);
    for (int64_t i = 0; i < elements && t != CUDA_R_4F_E2M1; i++) {
        float x = (float)(next_random(state) % 65536) / 32768.0f - 1.0f;
        uint32_t bits;
        memcpy(&bits, &x, 4);
        if (t == CUDA_R_32F) memcpy(&bytes[(size_t)i * 4], &bits, 4);
        if (t == CUDA_R_16BF)
            bytes[(size_t)i * 2] = (uint8_t)(bits >> 16), bytes[(size_t)i * 2 + 1] = (uint8_t)(bits >> 24);
        uint8_t &code = bytes[(size_t)i];
        if (t == CUDA_R_8F_E4M3) code = (uint8_t)((code & 0x87) | (5 + code / 8 % 4) << 3);
        if (t == CUDA_R_8F_E5M2) code = (uint8_t)((code & 0x83) | (13 + code / 4 % 4) << 2);
    }
    return bytes;
}

struct Device { /* memory with a copy of what the test put there */
    std::vector<uint8_t> host;
    uint8_t *p = nullptr;
    Device() = default;
    Device(const Device &) = delete;
    Device &operator=(const Device &) = delete;
    ~Device() { cudaFree(p); }
    void fill(std::vector<uint8_t> bytes)
    {
        cudaFree(p);
        host = std::move(bytes);
        cudaMalloc((void **)&p, host.size());
        cudaMemcpy(p, host.data(), host.size(), cudaMemcpyHostToDevice);
    }
    void fill_floats(std::vector<float> x)
    {
        std::vector<uint8_t> bytes(x.size() * 4);
        memcpy(bytes.data(), x.data(), bytes.size());
        fill(bytes);
    }
    std::vector<uint8_t> now() const
    {
        std::vector<uint8_t> bytes(host.size());
        cudaMemcpy(bytes.data(), p, bytes.size(), cudaMemcpyDeviceToHost);
        return bytes;
    }
};

/* ---- the product ---- */

struct Spec {
    cudaDataType a, b, d;
    int64_t m, n, k;
    bool transposed_a = true, transposed_b = false;
    int pad = 0; /* elements after each column */
    int batch = 1;
    float alpha = 1, beta = 0;
    bool device_scalars = false, in_place = false;
    bool scaled = false;      /* FP8 with a scale of A, of B and of D */
    bool microscaled = false; /* FP8 with a scale per 32 elements */
    cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
};

static inline cublasLtHandle_t handle()
{
    static cublasLtHandle_t h;
    if (!h) cublasLtCreate(&h);
    return h;
}

static inline const char *reason() { return cuda_on_cpu::cublaslt_reason(); }

class Product
{
  public:
    Spec s;
    int block = 0; /* elements per scale */
    cudaDataType c_type, bias_type;
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a_layout, b_layout, c_layout, d_layout;
    cublasLtMatmulPreference_t preference;
    Device a, b, c, d, bias, a_scale, b_scale, d_scale, amax, scalars, workspace;
    float host_scalars[2];
    const void *alpha, *beta, *a_at, *b_at, *c_at;
    void *d_at, *workspace_at;
    size_t workspace_bytes = 1 << 22;
    std::vector<cublasLtMatmulHeuristicResult_t> results;

    explicit Product(const Spec &spec, uint64_t seed = 1) : s(spec), seed(seed)
    {
        bool fp8 = type_bits(s.a) == 8, narrow = type_bits(s.a) <= 8;
        block = s.a == CUDA_R_4F_E2M1 ? 16 : s.microscaled ? 32 : 0;
        c_type = type_bits(s.d) == 8 ? CUDA_R_16BF : s.d;
        bias_type = narrow ? CUDA_R_16BF : s.d;
        cublasLtMatmulDescCreate(&desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
        a_layout = matrix(&a, s.a, s.transposed_a ? s.k : s.m, s.transposed_a ? s.m : s.k, &lda, &batch_a);
        b_layout = matrix(&b, s.b, s.transposed_b ? s.n : s.k, s.transposed_b ? s.k : s.n, &ldb, &batch_b);
        c_layout = matrix(&c, c_type, s.m, s.n, &ldc, &batch_c);
        d_layout = matrix(&d, s.d, s.m, s.n, &ldd, &batch_d);
        set(CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)(s.transposed_a ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(CUBLASLT_MATMUL_DESC_TRANSB, (int32_t)(s.transposed_b ? CUBLAS_OP_T : CUBLAS_OP_N));
        set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)s.epilogue);
        if (s.device_scalars) set(CUBLASLT_MATMUL_DESC_POINTER_MODE, (int32_t)CUBLASLT_POINTER_MODE_DEVICE);
        if (s.epilogue & CUBLASLT_EPILOGUE_BIAS) {
            bias.fill(random_codes(bias_type, s.m, &this->seed));
            set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void *)bias.p);
        }
        if (block) set_block_scales();
        if (s.scaled && fp8) set_scales();
        host_scalars[0] = s.alpha, host_scalars[1] = s.beta;
        scalars.fill_floats({s.alpha, s.beta});
        alpha = s.device_scalars ? (const void *)scalars.p : host_scalars;
        beta = s.device_scalars ? (const void *)(scalars.p + 4) : host_scalars + 1;
        workspace.fill(std::vector<uint8_t>(workspace_bytes));
        a_at = a.p, b_at = b.p, c_at = s.in_place ? d.p : c.p, d_at = d.p, workspace_at = workspace.p;
        cublasLtMatmulPreferenceCreate(&preference);
        prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)workspace_bytes);
    }
    ~Product()
    {
        cublasLtMatmulDescDestroy(desc);
        for (cublasLtMatrixLayout_t l : {a_layout, b_layout, c_layout, d_layout}) cublasLtMatrixLayoutDestroy(l);
        cublasLtMatmulPreferenceDestroy(preference);
    }
    template <class T> cublasStatus_t set(cublasLtMatmulDescAttributes_t attribute, T value)
    {
        return cublasLtMatmulDescSetAttribute(desc, attribute, &value, sizeof value);
    }
    template <class T> cublasStatus_t prefer(cublasLtMatmulPreferenceAttributes_t attribute, T value)
    {
        return cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof value);
    }
    template <class T>
    static cublasStatus_t lay(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, T value)
    {
        return cublasLtMatrixLayoutSetAttribute(layout, attribute, &value, sizeof value);
    }
    cublasStatus_t heuristic(int most = 16)
    {
        int count = -1;
        results.resize((size_t)most);
        cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle(), desc, a_layout, b_layout, c_layout, d_layout,
                                                               preference, most, results.data(), &count);
        results.resize(status ? 0 : (size_t)count);
        return status;
    }
    cublasStatus_t run(const cublasLtMatmulAlgo_t *algo = nullptr, cudaStream_t stream = nullptr)
    {
        cublasStatus_t status = cublasLtMatmul(handle(), desc, alpha, a_at, a_layout, b_at, b_layout, beta, c_at,
                                               c_layout, d_at, d_layout, algo, workspace_at, workspace_bytes, stream);
        cudaDeviceSynchronize();
        return status;
    }
    /* Of D's elements, in units of what rounding explains; `rounded`: the parts of a split K were, to BF16. */
    double largest_error(bool rounded = false) const
    {
        std::vector<uint8_t> out = d.now();
        double worst = 0;
        for (int64_t z = 0; z < s.batch; z++)
            for (int64_t j = 0; j < s.n; j++)
                for (int64_t i = 0; i < s.m; i++) {
                    double size, expected = element(i, j, z, &size);
                    double error = fabs(decode(s.d, out, z * batch_d + j * ldd + i) - expected);
                    double allowed = fabs(expected) * ulp(s.d) + size * (rounded ? 0.004 : 1e-6) +
                                     (ulp(s.d) > 0.01 ? 0.002 : 0);
                    worst = error == error ? fmax(worst, error / allowed) : INFINITY;
                }
        return worst;
    }
    bool check(const char *what, const cublasLtMatmulAlgo_t *algo = nullptr) const
    {
        uint32_t scheme = 0;
        size_t written;
        if (algo)
            cublasLtMatmulAlgoConfigGetAttribute(algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, 4, &written);
        double worst = largest_error(scheme == CUBLASLT_REDUCTION_SCHEME_OUTPUT_TYPE && s.d == CUDA_R_16BF);
        return CHECK(worst <= 1, "%s: an element is off by %g of what rounding explains", what, worst);
    }
    void clear() { cudaMemcpy(d.p, d.host.data(), d.host.size(), cudaMemcpyHostToDevice); }

  private:
    uint64_t seed;
    int64_t lda, ldb, ldc, ldd, batch_a, batch_b, batch_c, batch_d;
    double a_factor = 1, b_factor = 1, d_factor = 1;

    cublasLtMatrixLayout_t matrix(Device *memory, cudaDataType t, int64_t rows, int64_t cols, int64_t *ld,
                                  int64_t *stride)
    {
        cublasLtMatrixLayout_t layout;
        *ld = rows + s.pad;
        *stride = *ld * cols;
        memory->fill(random_codes(t, *stride * s.batch, &seed));
        cublasLtMatrixLayoutCreate(&layout, t, (uint64_t)rows, (uint64_t)cols, *ld);
        if (s.batch > 1) {
            lay(layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)s.batch);
            lay(layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, *stride);
        }
        return layout;
    }
    void set_block_scales()
    {
        int64_t blocks = ((s.k + block - 1) / block + 3) / 4 * 4;
        for (Device *scale : {&a_scale, &b_scale}) {
            std::vector<uint8_t> codes((size_t)(((scale == &a_scale ? s.m : s.n) + 127) / 128 * 128 * blocks));
            for (uint8_t &code : codes)
                code = (uint8_t)((block == 16 ? 0x28 : 125) + next_random(&seed) % (block == 16 ? 32 : 4));
            scale->fill(codes);
        }
        int32_t mode = block == 16 ? CUBLASLT_MATMUL_MATRIX_SCALE_VEC16_UE4M3
                                   : CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
        set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, mode);
        set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, mode);
        set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)a_scale.p);
        set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void *)b_scale.p);
    }
    void set_scales()
    {
        a_factor = 0.375, b_factor = 3;
        a_scale.fill_floats({0.375f});
        b_scale.fill_floats({3});
        set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)a_scale.p);
        set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, (const void *)b_scale.p);
        if (type_bits(s.d) > 8) return;
        d_factor = 0.25;
        d_scale.fill_floats({0.25f});
        amax.fill_floats({-1});
        set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (const void *)d_scale.p);
        set(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void *)amax.p);
    }
    double block_factor(const Device &scale, int64_t i, int64_t p) const
    {
        int64_t tiles = ((s.k + block - 1) / block + 3) / 4, j = p / block;
        int64_t at = (i / 128 * tiles + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
        uint8_t code = scale.host[(size_t)at];
        return block == 16 ? small_float(code, 4, 3, 7) : ldexp(1, code - 127);
    }
    double element(int64_t i, int64_t j, int64_t z, double *size) const /* size: the sum of magnitudes */
    {
        double sum = 0, magnitudes = 0;
        for (int64_t p = 0; p < s.k; p++) {
            double x = decode(s.a, a.host, z * batch_a + (s.transposed_a ? i * lda + p : p * lda + i));
            double y = decode(s.b, b.host, z * batch_b + (s.transposed_b ? p * ldb + j : j * ldb + p));
            if (block) x *= block_factor(a_scale, i, p), y *= block_factor(b_scale, j, p);
            sum += x * y;
            magnitudes += fabs(x * y);
        }
        double factor = s.alpha * a_factor * b_factor, x = factor * sum;
        int64_t at = z * batch_c + j * ldc + i;
        double before = s.in_place ? decode(s.d, d.host, at) : decode(c_type, c.host, at);
        if (s.beta != 0) x += s.beta * before;
        if (s.epilogue & CUBLASLT_EPILOGUE_BIAS) x += decode(bias_type, bias.host, i);
        *size = (fabs(factor) * magnitudes + fabs(s.beta * before) + 1) * d_factor;
        if (s.epilogue & CUBLASLT_EPILOGUE_RELU) x = fmax(x, 0);
        if (s.epilogue & CUBLASLT_EPILOGUE_GELU) x = 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        return x * d_factor;
    }
};

#endif
