/* See self_test.cuh. It allocates for itself and leaves nothing behind. */
#include "self_test.cuh"

#include "../philox.h"
#include "attention_cudnn.h"
#include "gemm.cuh"

#include <math.h>
#include <stdlib.h>

enum { ROWS = 80, COLS = 48, DEPTH = 96, LARGEST = DEPTH * DEPTH };

typedef struct { /* one kind of product, as the linear layers use it */
    const char *name;
    DType in, out;
    bool fp4, a_k_contiguous, b_k_contiguous, bias, accumulate;
} Case;

/* A matrix on both sides: values in [-1, 1) of which BF16 holds every one. */
typedef struct {
    float value[LARGEST];
    void *device;
} Sample;

static void *device_memory(size_t bytes)
{
    void *memory = NULL;
    cuda_check(cudaMalloc(&memory, bytes), "self-test");
    return memory;
}

static void fill(const Ops *ops, Sample *m, DType dtype, uint32_t stream)
{
    static uint16_t half[LARGEST];
    for (uint32_t i = 0; i < LARGEST; i++) {
        m->value[i] = (float)(int)(philox_draw(1, i, 0, 0, 0, 0, stream).word[0] % 256) / 128.0f - 1.0f;
        half[i] = bf16_from_f32(m->value[i]);
    }
    const void *host = dtype == DTYPE_BF16 ? (const void *)half : m->value;
    ops->copy_in(m->device, host, LARGEST * dtype_bytes(dtype));
}

static double element(const Sample *m, bool k_contiguous, int outer, int k, int outers)
{
    return (double)(k_contiguous ? m->value[outer * DEPTH + k] : m->value[k * outers + outer]);
}

/* The sample's rows in NVFP4, by the reference quantizer; its values become those that the codes stand for. */
static GemmInput quantized(const Ops *ops, Sample *m, int64_t outers)
{
    enum { BLOCKS = DEPTH / NVFP4_BLOCK, SCALES_AT = LARGEST / 2, TENSOR_SCALE_AT = LARGEST };
    static uint8_t codes[LARGEST], scales[LARGEST], tiles[LARGEST];
    Nvfp4Form form = {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_AMAX, FOUR_OVER_SIX_OFF, 1};
    Nvfp4Scale scale = nvfp4_quantize(codes, scales, m->value, outers, DEPTH, &form, NULL);
    for (int64_t i = 0; i < outers * DEPTH; i++)
        m->value[i] = e2m1_to_f32(codes[i]) * nvfp4_decode_scale(scales[i / NVFP4_BLOCK], scale.stored, &form);
    for (int64_t i = 0; i < outers * DEPTH; i += 2) codes[i / 2] = (uint8_t)(codes[i] | codes[i + 1] << 4);
    nvfp4_tile_scales(tiles, scales, outers, BLOCKS);
    char *at = (char *)m->device;
    ops->copy_in(at, codes, (size_t)(outers * DEPTH) / 2);
    ops->copy_in(at + SCALES_AT, tiles, nvfp4_tile_bytes(outers, BLOCKS));
    ops->copy_in(at + TENSOR_SCALE_AT, &scale.stored, sizeof scale.stored);
    GemmInput in = {at, DTYPE_BF16, DEPTH, true, (uint8_t *)at + SCALES_AT, (float *)(at + TENSOR_SCALE_AT), form};
    return in;
}

static GemmInput input(const Ops *ops, Sample *m, const Case *c, bool k_contiguous, int64_t outers)
{
    if (c->fp4) return quantized(ops, m, outers);
    GemmInput in = {};
    in.data = m->device, in.dtype = c->in, in.ld = k_contiguous ? (int64_t)DEPTH : outers,
    in.k_contiguous = k_contiguous;
    return in;
}

static void try_product(const Ops *ops, const Case *c, Sample *a, Sample *b, Sample *out, Sample *bias)
{
    static float got[LARGEST];
    static uint16_t half[LARGEST];
    const float alpha = c->accumulate || c->fp4 ? 1.0f : 0.375f; /* with NVFP4 the tensors' scales are in it */
    fill(ops, a, c->in, 1);
    fill(ops, b, c->in, 2);
    fill(ops, out, c->out, 3);
    fill(ops, bias, DTYPE_FP32, 4);
    cuda_gemm(ROWS, COLS, DEPTH, input(ops, a, c, c->a_k_contiguous, ROWS), input(ops, b, c, c->b_k_contiguous, COLS),
              GemmOutput{out->device, c->out, COLS, c->bias ? bias->device : NULL, c->accumulate}, alpha);
    ops->copy_out(c->out == DTYPE_BF16 ? (void *)half : got, out->device, ROWS * COLS * dtype_bytes(c->out));
    for (int i = 0; i < ROWS * COLS; i++) {
        int row = i / COLS, col = i % COLS;
        double sum = 0, limit = c->out == DTYPE_BF16 ? 0x1p-6 : 1e-5; /* two roundings of values below 16 */
        for (int k = 0; k < DEPTH; k++)
            sum += element(a, c->a_k_contiguous, row, k, ROWS) * element(b, c->b_k_contiguous, col, k, COLS);
        double expected = (double)alpha * sum + (c->bias ? (double)bias->value[col] : 0);
        if (c->accumulate) expected += (double)out->value[i];
        double is = c->out == DTYPE_BF16 ? (double)bf16_to_f32(half[i]) : (double)got[i];
        if (!(fabs(is - expected) <= limit * (1 + fabs(expected))))
            die("self-test: %s: element [%d, %d] is %.9g and should be %.9g; %s and this driver do not work together: "
                "install another version of either",
                c->name, row, col, is, expected, gemm_library());
    }
}

#ifdef LLMC_CUDNN

/* ---- attention by cuDNN against our kernels, to which the same case goes when its documents are given ---- */

enum { SEQUENCES = 2, LENGTH = 128, TOKENS = SEQUENCES * LENGTH, HEADS = 4, KEY_HEADS = 2, HEAD_DIM = 64 };
enum { C = HEADS * HEAD_DIM, G = KEY_HEADS * HEAD_DIM, W = C + 2 * G };

typedef struct {
    Tensor att, lse, dqkv;
} Gradients;

static Tensor device_tensor(DType dtype, int64_t cols)
{
    return Tensor{device_memory((size_t)(TOKENS * cols) * dtype_bytes(dtype)), dtype, TOKENS, cols, cols};
}

static Tensor random_tensor(const Ops *ops, int64_t cols, uint32_t stream)
{
    Tensor t = device_tensor(DTYPE_BF16, cols);
    uint16_t *host = (uint16_t *)xmalloc(tensor_bytes(t));
    for (uint32_t i = 0; i < TOKENS * cols; i++)
        host[i] = bf16_from_f32((float)(int)(philox_draw(1, i, 0, 0, 0, 0, stream).word[0] % 256) / 64.0f - 2.0f);
    ops->copy_in(t.data, host, tensor_bytes(t));
    free(host);
    return t;
}

static Gradients attend(const Ops *ops, Tensor qkv, Tensor datt, const int32_t *first_key)
{
    Gradients out = {device_tensor(DTYPE_BF16, C), device_tensor(DTYPE_FP32, HEADS), device_tensor(DTYPE_BF16, W)};
    Tensor q = tensor_cols(qkv, 0, C), k = tensor_cols(qkv, C, G), v = tensor_cols(qkv, C + G, G);
    Tensor dq = tensor_cols(out.dqkv, 0, C), dk = tensor_cols(out.dqkv, C, G), dv = tensor_cols(out.dqkv, C + G, G);
    Attention a = {SEQUENCES, LENGTH, LENGTH, HEADS, KEY_HEADS, HEAD_DIM, 0, first_key};
    if (first_key) {
        ops->attention_forward(out.att, out.lse, q, k, v, &a);
        ops->attention_backward(dq, dk, dv, datt, out.att, out.lse, q, k, v, &a);
    } else if (!attention_cudnn_forward(out.att, out.lse, q, k, v, &a) ||
               !attention_cudnn_backward(dq, dk, dv, datt, out.att, out.lse, q, k, v, &a)) {
        die("self-test: attention: %s does not do it on this GPU; install another version, or build with USE_CUDNN=0",
            attention_cudnn_name());
    }
    return out;
}

/* Columns col0 .. col0 + cols - 1: no element further apart than 1/64 of the largest; half is for BF16's rounding. */
static void compare(const Ops *ops, const char *what, Tensor is, Tensor expected, int64_t col0, int64_t cols)
{
    char *host[2] = {(char *)xmalloc(tensor_bytes(is)), (char *)xmalloc(tensor_bytes(is))};
    double largest = 0, value[2];
    ops->copy_out(host[0], is.data, tensor_bytes(is));
    ops->copy_out(host[1], expected.data, tensor_bytes(is));
    for (int pass = 0; pass < 2; pass++)
        for (int64_t i = 0; i < TOKENS * cols; i++) {
            int64_t row = i / cols, col = i % cols, at = row * is.ld + col0 + col;
            for (int j = 0; j < 2; j++)
                value[j] = (double)(is.dtype == DTYPE_BF16 ? bf16_to_f32(((uint16_t *)host[j])[at])
                                                           : ((float *)host[j])[at]);
            if (pass == 0)
                largest = fmax(largest, fabs(value[1]));
            else if (!(fabs(value[0] - value[1]) <= largest / 64))
                die("self-test: attention: %s[%d, %d] is %.9g by %s and %.9g by our kernels; install another version, "
                    "or build with USE_CUDNN=0",
                    what, (int)row, (int)col, value[0], attention_cudnn_name(), value[1]);
        }
    free(host[0]);
    free(host[1]);
}

static void try_attention(const Ops *ops)
{
    Need need = {};
    need.N = TOKENS;
    need.heads = HEADS;
    void *workspace = device_memory(ops->workspace_bytes(&need)), *first_key = device_memory(TOKENS * sizeof(int32_t));
    ops->workspace_set(workspace, &need);
    cuda_check(cudaMemsetAsync(first_key, 0, TOKENS * sizeof(int32_t), cuda.stream), "self-test");
    Tensor qkv = random_tensor(ops, W, 5), datt = random_tensor(ops, C, 6);
    Gradients by_cudnn = attend(ops, qkv, datt, NULL), ours = attend(ops, qkv, datt, (const int32_t *)first_key);
    compare(ops, "att", by_cudnn.att, ours.att, 0, C);
    compare(ops, "lse", by_cudnn.lse, ours.lse, 0, HEADS);
    compare(ops, "dq", by_cudnn.dqkv, ours.dqkv, 0, C);
    compare(ops, "dk", by_cudnn.dqkv, ours.dqkv, C, G);
    compare(ops, "dv", by_cudnn.dqkv, ours.dqkv, C + G, G);
    void *memory[] = {workspace,         first_key,          qkv.data,      datt.data,     by_cudnn.att.data,
                      by_cudnn.lse.data, by_cudnn.dqkv.data, ours.att.data, ours.lse.data, ours.dqkv.data};
    for (size_t i = 0; i < sizeof memory / sizeof *memory; i++) cuda_check(cudaFree(memory[i]), "self-test");
}

#endif

void self_test(const Ops *ops)
{
    static const Case CASES[] = {
        {"fprop in NVFP4", DTYPE_BF16, DTYPE_BF16, true, true, true, false, false},
        {"fprop in NVFP4 with a bias", DTYPE_BF16, DTYPE_BF16, true, true, true, true, false},
        {"wgrad in NVFP4", DTYPE_BF16, DTYPE_FP32, true, true, true, false, true},
        {"fprop in BF16", DTYPE_BF16, DTYPE_BF16, false, true, true, false, false},
        {"fprop in BF16 with a bias", DTYPE_BF16, DTYPE_BF16, false, true, true, true, false},
        {"dgrad in BF16", DTYPE_BF16, DTYPE_BF16, false, true, false, false, false},
        {"wgrad in BF16", DTYPE_BF16, DTYPE_FP32, false, false, false, false, true},
        {"fprop in FP32 with a bias", DTYPE_FP32, DTYPE_FP32, false, true, true, true, false},
        {"dgrad in FP32", DTYPE_FP32, DTYPE_FP32, false, true, false, false, false},
        {"wgrad in FP32", DTYPE_FP32, DTYPE_FP32, false, false, false, false, true},
    };
    Sample *m = (Sample *)xcalloc(4, sizeof *m);
    Need need = {};
    need.weight_rows = need.N = need.cols = DEPTH; /* room to expand NVFP4 */
    void *workspace = device_memory(ops->workspace_bytes(&need));
    ops->workspace_set(workspace, &need);
    for (int i = 0; i < 4; i++) m[i].device = device_memory(LARGEST * sizeof(float));
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++) try_product(ops, &CASES[i], &m[0], &m[1], &m[2], &m[3]);
    cuda.fast_sums = true; /* gradients added within the product */
    for (size_t i = 0; i < sizeof CASES / sizeof *CASES; i++)
        if (CASES[i].accumulate) try_product(ops, &CASES[i], &m[0], &m[1], &m[2], &m[3]);
    cuda.fast_sums = false;
    for (int i = 0; i < 4; i++) cuda_check(cudaFree(m[i].device), "self-test");
    cuda_check(cudaFree(workspace), "self-test");
    free(m);
    self_test_quantizers(ops);
    self_test_rounding(ops);
#ifdef LLMC_CUDNN
    try_attention(ops);
#endif
}
