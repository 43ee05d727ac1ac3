/* The double of cuBLASLt computes what its documentation says: all types, transposes, sizes and algorithms against loops in
 * double; an NVFP4 fixture from an independent quantizer; and that faults of a caller are visible in the result. */
#include "lt_product.h"

#include <functional>
#include <stdio.h>

static const cudaDataType F32 = CUDA_R_32F, BF16 = CUDA_R_16BF, E4M3 = CUDA_R_8F_E4M3, E5M2 = CUDA_R_8F_E5M2,
                          E2M1 = CUDA_R_4F_E2M1;

/* With every algorithm that the heuristic gives; how many. */
static size_t all_algorithms(const Spec &spec, const char *what)
{
    Product p(spec);
    cublasStatus_t status = p.heuristic();
    CHECK(status == CUBLAS_STATUS_SUCCESS, "%s: status %d: %s", what, status, reason());
    for (const auto &r : p.results) {
        p.clear();
        status = p.run(&r.algo);
        CHECK(status == CUBLAS_STATUS_SUCCESS, "%s: status %d: %s", what, status, reason());
        p.check(what, &r.algo);
    }
    return p.results.size();
}

static void test_products()
{
    const struct {
        cudaDataType a, b, d;
        int64_t unit; /* sizes are multiples of it */
    } types[] = {{F32, F32, F32, 1},     {BF16, BF16, BF16, 1},  {BF16, BF16, F32, 1},
                 {E4M3, E4M3, BF16, 16}, {E4M3, E4M3, F32, 16},  {E4M3, E5M2, BF16, 16},
                 {E5M2, E4M3, F32, 16},  {E4M3, E4M3, E4M3, 16}, {E5M2, E4M3, E5M2, 16}};
    for (const auto &t : types)
        for (int layout = 0; layout < 4; layout++)
            for (int pad : {0, 16}) {
                char what[96];
                snprintf(what, sizeof what, "types %d x %d -> %d, %c%c, pad %d", t.a, t.b, t.d, "NT"[layout / 2],
                         "NT"[layout % 2], pad);
                test_case(what);
                int64_t m = t.unit == 1 ? 37 : 48, n = t.unit == 1 ? 21 : 32, k = t.unit == 1 ? 67 : 80;
                Spec s = {t.a, t.b, t.d, m, n, k};
                s.transposed_a = layout / 2, s.transposed_b = layout % 2, s.pad = pad;
                s.alpha = 0.75f, s.beta = pad ? -0.5f : 0.0f, s.in_place = pad && type_bits(t.d) > 8, s.scaled = !pad;
                all_algorithms(s, what);
            }
}

static void test_sizes()
{
    test_case("sizes about the tiles'");
    const int64_t sizes[][3] = {{1, 1, 1},     {128, 128, 256}, {129, 131, 257},
                                {16, 300, 40}, {256, 8, 33},    {7, 130, 520}};
    for (const auto &z : sizes)
        for (cudaDataType t : {F32, BF16}) all_algorithms({t, t, F32, z[0], z[1], z[2]}, "sizes");
    test_case("FP4: sizes about the tiles' of scales");
    for (int64_t m : {8, 40, 128, 136})
        for (int64_t n : {1, 33, 129})
            for (int64_t k : {32, 96, 320}) {
                Spec s = {E2M1, E2M1, n % 2 ? F32 : BF16, m, n, k};
                s.alpha = 0.0375f, s.device_scalars = true, s.beta = k == 96 ? 1.0f : 0.0f, s.in_place = true;
                size_t count = all_algorithms(s, "FP4");
                CHECK(count == 4, "%zu algorithms", count);
            }
    test_case("MXFP8");
    for (int layout = 0; layout < 4; layout++)
        for (int64_t k : {32, 208}) {
            Spec s = {E4M3, layout % 2 ? E5M2 : E4M3, layout % 2 ? F32 : BF16, 144, 160, k};
            s.transposed_a = layout / 2, s.transposed_b = layout % 2, s.microscaled = true, s.alpha = 0.5f;
            CHECK(all_algorithms(s, "MXFP8") == 4, "layout %d, K %d", layout, (int)k);
        }
    test_case("a batch");
    for (cudaDataType t : {F32, BF16}) {
        Spec s = {t, t, t, 24, 16, 40};
        s.batch = 3, s.pad = 8, s.beta = 1;
        all_algorithms(s, "batch");
    }
}

static void test_epilogues()
{
    for (cublasLtEpilogue_t e : {CUBLASLT_EPILOGUE_RELU, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_RELU_BIAS,
                                 CUBLASLT_EPILOGUE_GELU, CUBLASLT_EPILOGUE_GELU_BIAS}) {
        char what[32];
        snprintf(what, sizeof what, "epilogue %d", e);
        test_case(what);
        Spec s = {BF16, BF16, F32, 40, 24, 32};
        s.epilogue = e, s.beta = 0.5f;
        all_algorithms(s, what);
        s.d = BF16;
        all_algorithms(s, what);
        s = {E2M1, E2M1, F32, 40, 24, 32};
        s.epilogue = e, s.alpha = 0.01f;
        if (!(e & CUBLASLT_EPILOGUE_GELU)) all_algorithms(s, what);
    }
}

static void test_algorithms()
{
    test_case("algorithms: which a preference leaves");
    Spec s = {BF16, BF16, F32, 64, 48, 512};
    Product p(s);
    CHECK(p.heuristic() == 0 && p.results.size() == 5, "%zu results", p.results.size());
    CHECK(p.heuristic(2) == 0 && p.results.size() == 2, "%zu results of 2", p.results.size());
    p.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE);
    CHECK(p.heuristic() == 0 && p.results.size() == 4, "%zu results", p.results.size());
    p.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_NONE);
    CHECK(p.heuristic() == 0 && p.results.size() == 3, "%zu results", p.results.size());
    p.prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, (uint32_t)CUBLASLT_REDUCTION_SCHEME_MASK);
    p.prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, (uint64_t)0);
    CHECK(p.heuristic() == 0 && p.results.size() == 3, "%zu results", p.results.size());
    p.prefer(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, (uint32_t)2);
    CHECK(p.heuristic() == 0 && p.results.size() == 1, "%zu results", p.results.size());

    test_case("algorithms: the same bits again, other bits from another");
    Product q(s);
    q.heuristic();
    std::vector<std::vector<uint8_t>> first;
    for (const auto &r : q.results) {
        q.run(&r.algo);
        first.push_back(q.d.now());
        q.clear();
        q.run(&r.algo);
        CHECK(q.d.now() == first.back(), "the same call gives other bits");
    }
    size_t differ = 0;
    for (size_t i = 1; i < first.size(); i++) differ += first[i] != first[0];
    CHECK(differ == first.size() - 1, "%zu of %zu algorithms differ from the first", differ, first.size() - 1);

    test_case("algorithms: configured by hand");
    cublasLtMatmulAlgo_t algo;
    CHECK(!cublasLtMatmulAlgoInit(handle(), CUBLAS_COMPUTE_32F, F32, BF16, BF16, F32, F32, 0, &algo), "%s", reason());
    int32_t split = 5;
    uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasLtMatmulHeuristicResult_t result;
    cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &split, sizeof split);
    CHECK(cublasLtMatmulAlgoCheck(handle(), q.desc, q.a_layout, q.b_layout, q.c_layout, q.d_layout, &algo, &result) ==
              CUBLAS_STATUS_NOT_SUPPORTED,
          "K split without a reduction scheme");
    cublasLtMatmulAlgoConfigSetAttribute(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme);
    CHECK(!cublasLtMatmulAlgoCheck(handle(), q.desc, q.a_layout, q.b_layout, q.c_layout, q.d_layout, &algo, &result),
          "%s", reason());
    CHECK(result.workspaceSize == 64u * 48 * 5 * 4, "workspace %zu", result.workspaceSize);
    CHECK(!q.run(&algo), "%s", reason());
    q.check("K split five times");
}

/* ---- the fixture ---- */

struct Vectors { /* one product of nvfp4_matmul.bin */
    uint32_t m, n, k;
    float alpha;
    std::vector<uint8_t> a, a_scales, b, b_scales;
    std::vector<double> d;
};

static void take(FILE *f, void *to, size_t bytes)
{
    if (fread(to, 1, bytes, f) != bytes) {
        printf("the fixture is too short\n");
        exit(1);
    }
}

static std::vector<Vectors> read_fixture(const char *path)
{
    FILE *f = fopen(path, "rb");
    char magic[8];
    uint32_t count;
    if (!f) {
        printf("%s: cannot be read\n", path);
        exit(1);
    }
    take(f, magic, 8);
    take(f, &count, 4);
    CHECK(memcmp(magic, "NVFP4MM1", 8) == 0, "not the fixture");
    std::vector<Vectors> all(count);
    for (Vectors &v : all) {
        take(f, &v.m, 4), take(f, &v.n, 4), take(f, &v.k, 4), take(f, &v.alpha, 4);
        size_t columns = (v.k / 16 + 3) / 4 * 4;
        v.a.resize((size_t)v.m * v.k / 2), v.a_scales.resize((v.m + 127) / 128 * 128 * columns);
        v.b.resize((size_t)v.n * v.k / 2), v.b_scales.resize((v.n + 127) / 128 * 128 * columns);
        v.d.resize((size_t)v.m * v.n);
        take(f, v.a.data(), v.a.size()), take(f, v.a_scales.data(), v.a_scales.size());
        take(f, v.b.data(), v.b.size()), take(f, v.b_scales.data(), v.b_scales.size());
        take(f, v.d.data(), v.d.size() * sizeof(double));
    }
    fclose(f);
    return all;
}

/* The largest error of D in units of D's root mean square, after `change` did something to the product. */
static double fixture_error(const Vectors &v, const std::function<void(Product &)> &change)
{
    Spec s = {E2M1, E2M1, F32, v.m, v.n, v.k};
    s.alpha = v.alpha, s.device_scalars = true;
    Product p(s);
    cudaMemcpy(p.a.p, v.a.data(), v.a.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(p.b.p, v.b.data(), v.b.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(p.a_scale.p, v.a_scales.data(), v.a_scales.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(p.b_scale.p, v.b_scales.data(), v.b_scales.size(), cudaMemcpyHostToDevice);
    change(p);
    cublasStatus_t status = p.heuristic();
    if (!status) status = p.run(&p.results[0].algo);
    if (!CHECK(status == 0, "status %d: %s", status, reason())) return INFINITY;
    std::vector<uint8_t> out = p.d.now();
    double worst = 0, square = 0;
    for (size_t i = 0; i < v.d.size(); i++) {
        worst = fmax(worst, fabs(decode(F32, out, (int64_t)i) - v.d[i]));
        square += v.d[i] * v.d[i];
    }
    return worst / sqrt(square / (double)v.d.size());
}

/* Scales as they are before tiling: row after row. */
static void untile(Product &p)
{
    int64_t blocks = p.s.k / 16, tiles = (blocks + 3) / 4;
    std::vector<uint8_t> tiled = p.a_scale.now(), rows(tiled.size());
    for (int64_t i = 0; i < p.s.m; i++)
        for (int64_t j = 0; j < blocks; j++)
            rows[(size_t)(i * blocks + j)] =
                tiled[(size_t)((i / 128 * tiles + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4)];
    cudaMemcpy(p.a_scale.p, rows.data(), rows.size(), cudaMemcpyHostToDevice);
}

static void swap_nibbles(Product &p)
{
    std::vector<uint8_t> codes = p.a.now();
    for (uint8_t &c : codes) c = (uint8_t)(c << 4 | c >> 4);
    cudaMemcpy(p.a.p, codes.data(), codes.size(), cudaMemcpyHostToDevice);
}

static void exchange_scales(Product &p)
{
    std::vector<uint8_t> scales = p.a_scale.now(), others = p.b_scale.now();
    others.resize(scales.size(), 0x38);
    cudaMemcpy(p.a_scale.p, others.data(), others.size(), cudaMemcpyHostToDevice);
    cudaMemcpy(p.b_scale.p, scales.data(), p.b_scale.host.size(), cudaMemcpyHostToDevice);
}

static void test_fixture(const char *path)
{
    for (const Vectors &v : read_fixture(path)) {
        char what[64];
        snprintf(what, sizeof what, "NVFP4 fixture %u x %u x %u", v.m, v.n, v.k);
        test_case(what);
        double error = fixture_error(v, [](Product &) {});
        CHECK(error < 2e-6, "error %g of D's root mean square", error);
        const float one = 1;
        const struct {
            const char *name;
            std::function<void(Product &)> change;
        } faults[] = {
            {"scales not in tiles", untile},
            {"nibbles swapped", swap_nibbles},
            {"scales of A and B exchanged", exchange_scales},
            {"no alpha", [&](Product &p) { cudaMemcpy(p.scalars.p, &one, sizeof one, cudaMemcpyHostToDevice); }},
        };
        for (const auto &f : faults) {
            error = fixture_error(v, f.change);
            CHECK(error > 0.05, "planted fault, %s: not visible, error %g", f.name, error);
        }
    }
}

static void test_faults()
{
    test_case("planted fault: the wrong transpose is visible");
    Spec s = {BF16, BF16, F32, 32, 24, 32};
    Product p(s);
    p.set(CUBLASLT_MATMUL_DESC_TRANSA, (int32_t)CUBLAS_OP_N); /* A is square: sizes agree all the same */
    CHECK(!p.run(), "%s", reason());
    CHECK(p.largest_error() > 100, "error %g", p.largest_error());

    test_case("beta 0 does not read C, NaN in it stays there");
    s.beta = 0;
    Product q(s);
    std::vector<uint8_t> nan(q.c.host.size(), 0xff);
    q.c.fill(nan);
    q.c_at = q.c.p;
    CHECK(!q.run(), "%s", reason());
    q.check("beta 0");

    test_case("amax of D");
    s = {E4M3, E4M3, E4M3, 32, 16, 32};
    s.scaled = true;
    Product r(s);
    CHECK(!r.run(), "%s", reason());
    std::vector<uint8_t> out = r.d.now();
    double largest = 0;
    for (int64_t i = 0; i < 32 * 16; i++) largest = fmax(largest, fabs(decode(E4M3, out, i)));
    double amax = decode(F32, r.amax.now(), 0);
    CHECK(fabs(amax * 0.25 - largest) <= largest / 15, "amax %g, D x 4 reaches %g", amax, largest * 4);
}

int main(int argc, char **argv)
{
    if (argc != 2) return 2;
    test_products();
    test_sizes();
    test_epilogues();
    test_algorithms();
    test_fixture(argv[1]);
    test_faults();
    return test_done();
}
