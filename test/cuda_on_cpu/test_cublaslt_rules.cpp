/* The double of cuBLASLt refuses what its documentation forbids, each rule violated once, with the documented status.
 *
 *     test_cublaslt_rules                   descriptors, rules
 *     test_cublaslt_rules capability 90     which types that device has (CUDA_ON_CPU_CAPABILITY=9.0)
 *     test_cublaslt_rules small             a call with too little device memory: must end the program
 */
#include "lt_product.h"

#include <functional>
#include <stdlib.h>

static const cudaDataType F32 = CUDA_R_32F, BF16 = CUDA_R_16BF, E4M3 = CUDA_R_8F_E4M3, E5M2 = CUDA_R_8F_E5M2,
                          E2M1 = CUDA_R_4F_E2M1, F16 = CUDA_R_16F;
static const cublasStatus_t OK = CUBLAS_STATUS_SUCCESS, INVALID = CUBLAS_STATUS_INVALID_VALUE,
                            UNSUPPORTED = CUBLAS_STATUS_NOT_SUPPORTED, FAILED = CUBLAS_STATUS_EXECUTION_FAILED;

/* ---- descriptors: sizes and defaults as cuBLASLt 13.1 tells them ---- */

static void test_attributes()
{
    test_case("attributes of a product: sizes and defaults");
    const struct {
        int attribute, bytes;
        int64_t value;
    } attributes[] = {{0, 4, CUBLAS_COMPUTE_32F},
                      {1, 4, CUDA_R_32F},
                      {2, 4, 0},
                      {3, 4, 0},
                      {4, 4, 0},
                      {5, 4, 0},
                      {6, 4, 2},
                      {7, 4, 1},
                      {8, 8, 0},
                      {10, 8, 0},
                      {11, 8, 0},
                      {12, 8, 0},
                      {13, 8, 0},
                      {14, 8, 0},
                      {15, 4, 0},
                      {17, 8, 0},
                      {18, 8, 0},
                      {19, 8, 0},
                      {20, 8, 0},
                      {21, 8, 0},
                      {22, 4, 0xffffffff},
                      {23, 8, 0},
                      {24, 8, 0},
                      {25, 1, 0},
                      {26, 4, 0xffffffff},
                      {31, 4, 0},
                      {32, 4, 0},
                      {33, 4, 0},
                      {34, 4, 0},
                      {35, 4, 0},
                      {36, 8, 0},
                      {37, 4, 0},
                      {38, 8, 0},
                      {9, 0, 0},
                      {27, 0, 0},
                      {39, 0, 0}};
    cublasLtMatmulDescOpaque_t memory;
    cublasLtMatmulDesc_t desc = &memory;
    CHECK(cublasLtMatmulDescInit(desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == OK, "%s", reason());
    CHECK(cublasLtMatmulDescInit_internal(desc, 8, CUBLAS_COMPUTE_32F, F32) == CUBLAS_STATUS_ALLOC_FAILED, "8 bytes");
    for (const auto &x : attributes) {
        auto which = (cublasLtMatmulDescAttributes_t)x.attribute;
        size_t written = 0;
        int64_t value = 0;
        cublasStatus_t status = cublasLtMatmulDescGetAttribute(desc, which, nullptr, 0, &written);
        CHECK(status == (x.bytes ? OK : INVALID) && (!x.bytes || written == (size_t)x.bytes), "attribute %d",
              x.attribute);
        if (!x.bytes) continue;
        CHECK(cublasLtMatmulDescGetAttribute(desc, which, &value, written, nullptr) == OK && value == x.value,
              "attribute %d is %lld", x.attribute, (long long)value);
        CHECK(cublasLtMatmulDescGetAttribute(desc, which, &value, written + 4, &written) == INVALID,
              "too large a place");
        CHECK(cublasLtMatmulDescSetAttribute(desc, which, &value, (size_t)x.bytes + 1) == INVALID, "wrong size");
        CHECK(cublasLtMatmulDescSetAttribute(desc, which, nullptr, (size_t)x.bytes) == INVALID, "NULL");
        value = 0x77;
        CHECK(cublasLtMatmulDescSetAttribute(desc, which, &value, (size_t)x.bytes) == OK, "attribute %d", x.attribute);
        value = 0;
        cublasLtMatmulDescGetAttribute(desc, which, &value, (size_t)x.bytes, nullptr);
        CHECK(value == 0x77, "attribute %d set to 0x77 is %lld", x.attribute, (long long)value);
    }

    test_case("attributes of a layout, of a preference");
    cublasLtMatrixLayout_t layout;
    cublasLtMatmulPreference_t preference;
    uint64_t value = 0;
    CHECK(cublasLtMatrixLayoutCreate(&layout, BF16, 64, 32, 72) == OK, "%s", reason());
    CHECK(cublasLtMatrixLayoutGetAttribute(layout, CUBLASLT_MATRIX_LAYOUT_LD, &value, 8, nullptr) == OK && value == 72,
          "ld %llu", (unsigned long long)value);
    CHECK(cublasLtMatmulPreferenceCreate(&preference) == OK, "%s", reason());
    value = 0;
    cublasLtMatmulPreferenceGetAttribute(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &value, 4, nullptr);
    CHECK(value == 256, "alignment %llu", (unsigned long long)value);
    cublasLtMatmulPreferenceGetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &value, 8, nullptr);
    CHECK(value == 0, "workspace %llu", (unsigned long long)value);
    cublasLtMatrixLayoutDestroy(layout);
    cublasLtMatmulPreferenceDestroy(preference);
    CHECK(cublasLtMatmulDescCreate(nullptr, CUBLAS_COMPUTE_32F, F32) == INVALID && cublasLtCreate(nullptr) == INVALID &&
              cublasLtDestroy(nullptr) == INVALID,
          "NULL");
    CHECK(strcmp(cublasLtGetStatusName(CUBLAS_STATUS_NOT_SUPPORTED), "CUBLAS_STATUS_NOT_SUPPORTED") == 0, "name");
}

/* ---- rules ---- */

struct Rule {
    const char *name;
    Spec spec;
    std::function<void(Product &)> change;
    cublasStatus_t heuristic, call; /* the call without an algorithm of its own */
};

static Spec square(cudaDataType in, cudaDataType out) { return {in, in, out, 64, 64, 64}; }

static std::vector<Rule> rules_of_descriptors()
{
    Spec bf16 = square(BF16, BF16), f32 = square(F32, F32);
    using P = Product;
    auto set = [](cublasLtMatmulDescAttributes_t attribute, int32_t value) {
        return [=](P &p) { p.set(attribute, value); };
    };
    return {
        {"sound", bf16, [](P &) {}, OK, OK},
        {"A's rows are not K", bf16, [](P &p) { P::lay(p.a_layout, CUBLASLT_MATRIX_LAYOUT_ROWS, (uint64_t)48); },
         INVALID, INVALID},
        {"D's rows are not M", bf16, [](P &p) { P::lay(p.d_layout, CUBLASLT_MATRIX_LAYOUT_ROWS, (uint64_t)48); },
         INVALID, INVALID},
        {"C is not as large as D", bf16, [](P &p) { P::lay(p.c_layout, CUBLASLT_MATRIX_LAYOUT_COLS, (uint64_t)48); },
         INVALID, INVALID},
        {"leading dimension below the rows", bf16,
         [](P &p) { P::lay(p.b_layout, CUBLASLT_MATRIX_LAYOUT_LD, (int64_t)63); }, INVALID, INVALID},
        {"no columns", bf16, [](P &p) { P::lay(p.b_layout, CUBLASLT_MATRIX_LAYOUT_COLS, (uint64_t)0); }, INVALID,
         INVALID},
        {"batches of another length", bf16,
         [](P &p) { P::lay(p.a_layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, (int32_t)2); }, INVALID, INVALID},
        {"row-major", bf16, [](P &p) { P::lay(p.a_layout, CUBLASLT_MATRIX_LAYOUT_ORDER, (int32_t)CUBLASLT_ORDER_ROW); },
         UNSUPPORTED, UNSUPPORTED},
        {"compute type FP16", bf16, set(CUBLASLT_MATMUL_DESC_COMPUTE_TYPE, CUBLAS_COMPUTE_16F), UNSUPPORTED,
         UNSUPPORTED},
        {"scale type FP64", f32, set(CUBLASLT_MATMUL_DESC_SCALE_TYPE, CUDA_R_64F), UNSUPPORTED, UNSUPPORTED},
        {"operation 7", bf16, set(CUBLASLT_MATMUL_DESC_TRANSA, 7), INVALID, INVALID},
        {"C transposed", bf16, set(CUBLASLT_MATMUL_DESC_TRANSC, CUBLAS_OP_T), UNSUPPORTED, UNSUPPORTED},
        {"one triangle", bf16, set(CUBLASLT_MATMUL_DESC_FILL_MODE, CUBLAS_FILL_MODE_LOWER), UNSUPPORTED, UNSUPPORTED},
        {"pointer mode 9", bf16, set(CUBLASLT_MATMUL_DESC_POINTER_MODE, 9), INVALID, INVALID},
        {"epilogue with a second output", bf16, set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU_AUX),
         UNSUPPORTED, UNSUPPORTED},
        {"epilogue of a bias gradient", bf16, set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BGRADB), UNSUPPORTED,
         UNSUPPORTED},
        {"bias of another type", bf16,
         [](P &p) {
             p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
             p.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, (const void *)p.c.p);
             p.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)F32);
         },
         UNSUPPORTED, UNSUPPORTED},
        {"bias without a pointer", bf16, set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS), OK, INVALID},
        {"A BF16, B FP32", bf16, [](P &p) { P::lay(p.b_layout, CUBLASLT_MATRIX_LAYOUT_TYPE, (uint32_t)F32); },
         UNSUPPORTED, UNSUPPORTED},
        {"C FP32, D BF16", bf16, [](P &p) { P::lay(p.c_layout, CUBLASLT_MATRIX_LAYOUT_TYPE, (uint32_t)F32); },
         UNSUPPORTED, UNSUPPORTED},
        {"A FP32, D BF16", square(F32, BF16), [](P &) {}, UNSUPPORTED, UNSUPPORTED},
        {"FP16", bf16, [](P &p) { P::lay(p.a_layout, CUBLASLT_MATRIX_LAYOUT_TYPE, (uint32_t)F16); }, UNSUPPORTED,
         UNSUPPORTED},
        {"scale of A in BF16", bf16,
         [](P &p) { p.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)p.scalars.p); }, INVALID, INVALID},
        {"scale of D in BF16", bf16,
         [](P &p) { p.set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (const void *)p.scalars.p); }, INVALID, INVALID},
        {"scale mode of D in FP32", f32, set(CUBLASLT_MATMUL_DESC_D_OUT_SCALE_MODE, 1), INVALID, INVALID},
        {"amax of D in FP32", f32, [](P &p) { p.set(CUBLASLT_MATMUL_DESC_AMAX_D_POINTER, (void *)p.scalars.p); },
         INVALID, INVALID},
    };
}

static std::vector<Rule> rules_of_narrow_types()
{
    Spec fp4 = square(E2M1, F32), fp8 = square(E4M3, BF16), nn = fp4, nt = fp4, k48 = fp4, m2 = fp4, k24 = fp8;
    nn.transposed_a = false, nt.transposed_b = true, k48.k = 48, m2.m = 66, k24.k = 24;
    using P = Product;
    auto set = [](cublasLtMatmulDescAttributes_t attribute, int32_t value) {
        return [=](P &p) { p.set(attribute, value); };
    };
    auto drop = [](cublasLtMatmulDescAttributes_t attribute) {
        return [=](P &p) { p.set(attribute, (const void *)nullptr); };
    };
    auto nothing = [](P &) {};
    return {
        {"FP4: sound", fp4, nothing, OK, OK},
        {"FP4: NN", nn, nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP4: TT", nt, nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP4: K not a multiple of 32", k48, nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP4: columns of D not of 16 bytes", m2, nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP4: no pointer for the scales of A", fp4, drop(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER), INVALID, INVALID},
        {"FP4: no pointer for the scales of B", fp4, drop(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER), INVALID, INVALID},
        {"FP4: one scale for all", fp4,
         [](P &p) {
             p.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, (int32_t)0);
             p.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, (int32_t)0);
         },
         INVALID, INVALID},
        {"FP4: scale modes that differ", fp4, set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, 2), UNSUPPORTED, UNSUPPORTED},
        {"FP4: scale mode 17", fp4, set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, 17), INVALID, INVALID},
        {"FP4: scales off 16 bytes", fp4,
         [](P &p) { p.set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, (const void *)(p.a_scale.p + 8)); }, OK, INVALID},
        {"FP4: scale of D, BF16", square(E2M1, BF16),
         [](P &p) { p.set(CUBLASLT_MATMUL_DESC_D_SCALE_POINTER, (const void *)p.scalars.p); }, INVALID, INVALID},
        {"FP4: scale of C", fp4, [](P &p) { p.set(CUBLASLT_MATMUL_DESC_C_SCALE_POINTER, (const void *)p.scalars.p); },
         INVALID, INVALID},
        {"FP4: GELU", fp4, set(CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_GELU), UNSUPPORTED, UNSUPPORTED},
        {"FP4 x FP8", fp4, [](P &p) { P::lay(p.b_layout, CUBLASLT_MATRIX_LAYOUT_TYPE, (uint32_t)E4M3); }, UNSUPPORTED,
         UNSUPPORTED},
        {"FP8: sound", fp8, nothing, OK, OK},
        {"FP8: K not a multiple of 16", k24, nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP8: E5M2 x E5M2", square(E5M2, BF16), nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP8: D in E5M2 from E4M3", square(E4M3, E5M2), nothing, UNSUPPORTED, UNSUPPORTED},
        {"FP8: blocks of 16", fp8,
         [](P &p) {
             p.set(CUBLASLT_MATMUL_DESC_A_SCALE_MODE, (int32_t)1);
             p.set(CUBLASLT_MATMUL_DESC_B_SCALE_MODE, (int32_t)1);
         },
         INVALID, INVALID},
        {"FP8: bias in FP32", fp8,
         [](P &p) {
             p.set(CUBLASLT_MATMUL_DESC_EPILOGUE, (uint32_t)CUBLASLT_EPILOGUE_BIAS);
             p.set(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, (int32_t)F32);
         },
         UNSUPPORTED, UNSUPPORTED},
    };
}

static std::vector<Rule> rules_of_addresses()
{
    Spec bf16 = square(BF16, BF16), device = bf16, place = bf16, accumulate = bf16, padded = bf16;
    device.device_scalars = true, padded.pad = 8, padded.in_place = true, place.in_place = true, place.beta = 1,
    accumulate.beta = 1;
    static float scalar = 1;
    static uint8_t memory[64 * 64 * 4];
    using P = Product;
    return {
        {"A is NULL", bf16, [](P &p) { p.a_at = nullptr; }, OK, INVALID},
        {"D is NULL", bf16, [](P &p) { p.d_at = nullptr; }, OK, INVALID},
        {"alpha is NULL", bf16, [](P &p) { p.alpha = nullptr; }, OK, INVALID},
        {"beta is NULL", device, [](P &p) { p.beta = nullptr; }, OK, INVALID},
        {"C is NULL, beta 0", bf16, [](P &p) { p.c_at = nullptr; }, OK, OK},
        {"C is NULL, beta 1", accumulate, [](P &p) { p.c_at = nullptr; }, OK, INVALID},
        {"C is NULL, beta on the device", device, [](P &p) { p.c_at = nullptr; }, OK, INVALID},
        {"A is host memory", bf16, [](P &p) { p.a_at = memory; }, OK, FAILED},
        {"D is host memory", bf16, [](P &p) { p.d_at = memory; }, OK, FAILED},
        {"alpha on the device, mode host", bf16, [](P &p) { p.alpha = p.scalars.p; }, OK, FAILED},
        {"alpha on the host, mode device", device, [](P &p) { p.alpha = &scalar; }, OK, FAILED},
        {"A off 16 bytes", bf16, [](P &p) { p.a_at = p.a.p + 2; }, OK, INVALID},
        {"D off its element", bf16, [](P &p) { p.d_at = p.d.p + 1; }, OK, INVALID},
        {"in place", place, [](P &) {}, OK, OK},
        {"in place, C with another leading dimension", padded,
         [](P &p) { P::lay(p.c_layout, CUBLASLT_MATRIX_LAYOUT_LD, (int64_t)64); }, OK, INVALID},
        {"C overlaps D", padded, [](P &p) { p.c_at = p.d.p + 16; }, OK, INVALID},
        {"D overlaps A", bf16, [](P &p) { p.d_at = p.a.p; }, OK, INVALID},
    };
}

static void test_rules(const std::vector<Rule> &rules)
{
    for (const Rule &rule : rules) {
        test_case(rule.name);
        Product p(rule.spec);
        rule.change(p);
        cublasStatus_t status = p.heuristic();
        CHECK(status == rule.heuristic, "heuristic: status %d, not %d: %s", status, rule.heuristic,
              status ? reason() : "");
        status = p.run();
        CHECK(status == rule.call, "call: status %d, not %d: %s", status, rule.call, status ? reason() : "");
        CHECK(!status || *reason(), "no reason");
        if (status) CHECK(p.d.now() == p.d.host, "refused, and D has changed");
    }
}

static void test_algorithm_rules()
{
    test_case("algorithm and workspace");
    Product p(square(BF16, F32)), other({BF16, BF16, F32, 64, 64, 128});
    CHECK(p.heuristic() == OK && p.results.size() == 5, "%zu results: %s", p.results.size(), reason());
    CHECK(other.run(&p.results[0].algo) == INVALID, "an algorithm of another problem");
    cublasLtMatmulAlgo_t zeros = {};
    CHECK(p.run(&zeros) == INVALID, "an algorithm of nobody");
    const cublasLtMatmulAlgo_t *split = &p.results[2].algo;
    size_t need = p.results[2].workspaceSize;
    CHECK(need == 64 * 64 * 2 * 4, "workspace %zu", need);
    p.workspace_bytes = need;
    CHECK(p.run(split) == OK, "%s", reason());
    p.workspace_bytes = need - 1;
    CHECK(p.run(split) == INVALID, "a workspace too small");
    p.workspace_bytes = need;
    p.workspace_at = p.workspace.p + 128;
    CHECK(p.run(split) == INVALID, "a workspace off 256 bytes");
    p.workspace_at = nullptr;
    CHECK(p.run(split) == INVALID, "no workspace");
    std::vector<uint8_t> host(need + 256);
    p.workspace_at = (void *)(((uintptr_t)host.data() + 255) / 256 * 256);
    CHECK(p.run(split) == FAILED, "a workspace of the host");

    test_case("heuristic: its own arguments");
    cublasLtMatmulHeuristicResult_t result;
    int count;
    auto ask = [&](cublasLtHandle_t h, cublasLtMatmulPreference_t preference, int most, int *returned) {
        return cublasLtMatmulAlgoGetHeuristic(h, p.desc, p.a_layout, p.b_layout, p.c_layout, p.d_layout, preference,
                                              most, &result, returned);
    };
    CHECK(ask(nullptr, p.preference, 1, &count) == CUBLAS_STATUS_NOT_INITIALIZED, "no handle");
    CHECK(ask(handle(), nullptr, 1, &count) == INVALID, "no preference");
    CHECK(ask(handle(), p.preference, 0, &count) == INVALID, "none requested");
    CHECK(ask(handle(), p.preference, 1, nullptr) == INVALID, "no place for the count");
    Product fp8(square(E4M3, BF16));
    fp8.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, (uint32_t)8);
    CHECK(fp8.heuristic() == UNSUPPORTED, "FP8 with addresses at multiples of 8");
}

/* ---- devices ---- */

static void test_capability(int capability)
{
    test_case("types of the device");
    Spec mx = square(E4M3, F32);
    mx.microscaled = true;
    const struct {
        Spec spec;
        int least;
    } types[] = {{square(F32, F32), 0},
                 {square(BF16, BF16), 80},
                 {square(E4M3, BF16), 89},
                 {mx, 100},
                 {square(E2M1, BF16), 100}};
    for (const auto &t : types) {
        Product p(t.spec);
        bool has = capability >= t.least;
        CHECK(p.heuristic() == (has ? OK : UNSUPPORTED), "type %d on %d: %s", t.spec.a, capability, reason());
        CHECK(p.run() == (has ? OK : CUBLAS_STATUS_ARCH_MISMATCH), "type %d on %d: %s", t.spec.a, capability, reason());
    }
    if (capability < 89) return;
    Spec nn = square(E4M3, BF16);
    nn.transposed_a = false;
    Product p(nn);
    CHECK(p.heuristic() == (capability / 10 == 10 ? OK : UNSUPPORTED), "FP8 NN on %d: %s", capability, reason());
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "capability") == 0) {
        test_capability(atoi(argv[2]));
        return test_done();
    }
    if (argc == 2 && strcmp(argv[1], "small") == 0) {
        Product p(square(BF16, BF16));
        p.a_at = p.a.p + 16;
        return p.run() == OK ? 0 : 3;
    }
    test_attributes();
    test_rules(rules_of_descriptors());
    test_rules(rules_of_narrow_types());
    test_rules(rules_of_addresses());
    test_algorithm_rules();
    return test_done();
}
