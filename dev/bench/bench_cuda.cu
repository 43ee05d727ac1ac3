/* What the GPU backend's operations reach: matrix products, attention, the operations that move memory, quantizers.
 *
 *     bench_cuda [--quick]        --quick: tiny shapes, to see that it runs (on a CPU)
 *
 * One row each, as it finishes: what, shape, microseconds (median of RUNS, device time), TFLOP/s or GB/s, share of the peak
 * (products: the data sheet's; memory: a device-to-device copy measured beside it).
 */
#include "cuda/backend.h"
#include "cuda/cuda.cuh"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { RUNS = 7 };

static const Ops *ops;
static double copy_bytes_per_s;

typedef struct { /* one thing to time, with its own memory */
    const char *name;
    char shape[64];
    void (*run)(void *context);
    void *context;
    double flops, bytes; /* one of them 0 */
} Item;

static int by_size(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

/* Median of RUNS, after one that is not counted. */
static double microseconds(void (*run)(void *context), void *context)
{
    float ms[RUNS];
    cudaEvent_t start, end;
    cuda_check(cudaEventCreate(&start), "event");
    cuda_check(cudaEventCreate(&end), "event");
    run(context);
    for (int i = 0; i < RUNS; i++) {
        cuda_check(cudaEventRecord(start, cuda.stream), "event");
        run(context);
        cuda_check(cudaEventRecord(end, cuda.stream), "event");
        cuda_check(cudaEventSynchronize(end), "event");
        cuda_check(cudaEventElapsedTime(&ms[i], start, end), "event");
    }
    cudaEventDestroy(start);
    cudaEventDestroy(end);
    qsort(ms, RUNS, sizeof *ms, by_size);
    return (double)ms[RUNS / 2] * 1e3;
}

static void report(const Item *item)
{
    double us = microseconds(item->run, item->context);
    if (item->flops > 0)
        printf("%-22s %-30s %10.1f us %8.1f TFLOP/s %5.1f%% of peak\n", item->name, item->shape, us,
               item->flops / us * 1e-6, 100 * item->flops / us * 1e6 / ops->peak_flops(DTYPE_BF16));
    else
        printf("%-22s %-30s %10.1f us %8.1f GB/s    %5.1f%% of a copy\n", item->name, item->shape, us,
               item->bytes / us * 1e-3, 100 * item->bytes / us * 1e6 / copy_bytes_per_s);
    fflush(stdout);
}

/* ---- memory: BF16 values near 1e-2 ---- */

static void *filled(size_t bytes)
{
    enum { PIECE = 1 << 16 };
    static uint16_t piece[PIECE];
    char *memory = (char *)ops->alloc(bytes);
    for (int i = 0; i < PIECE; i++) piece[i] = bf16_from_f32((float)((i * 2654435761u >> 16) % 200) * 1e-4f - 1e-2f);
    for (size_t done = 0; done < bytes; done += sizeof piece)
        ops->copy_in(memory + done, piece, bytes - done < sizeof piece ? bytes - done : sizeof piece);
    return memory;
}

static Tensor tensor(DType dtype, int64_t rows, int64_t cols)
{
    Tensor t = {NULL, dtype, rows, cols, cols};
    t.data = dtype == DTYPE_BF16 ? filled(tensor_bytes(t)) : ops->alloc(tensor_bytes(t));
    return t;
}

static void drop(Tensor t) { ops->free(t.data, tensor_bytes(t)); }

/* ---- linear layers ---- */

typedef struct {
    Tensor x, y, w, dw;
    Operand in, out;
    Linear layer;
} Layer;

static void fprop(void *p) { ops->linear_forward(((Layer *)p)->y, &((Layer *)p)->in, &((Layer *)p)->layer); }
static void dgrad(void *p) { ops->linear_backward_input(((Layer *)p)->x, &((Layer *)p)->out, &((Layer *)p)->layer); }
static void wgrad(void *p) { ops->linear_backward_weight(&((Layer *)p)->layer, &((Layer *)p)->out, &((Layer *)p)->in); }

static Operand operand_of(Tensor t)
{
    Operand o = {};
    o.rows = t.rows, o.cols = t.cols;
    o.row.format.format = o.col.format.format = FORMAT_BF16;
    o.row.data = o.col.data = t.data;
    return o;
}

static void bench_layer(int64_t N, int64_t in, int64_t out)
{
    Layer p = {};
    p.x = tensor(DTYPE_BF16, N, in), p.y = tensor(DTYPE_BF16, N, out);
    p.w = tensor(DTYPE_BF16, out, in), p.dw = tensor(DTYPE_FP32, out, in);
    p.in = operand_of(p.x), p.out = operand_of(p.y);
    p.layer.weight = operand_of(p.w);
    p.layer.dW = p.dw;
    Item items[] = {
        {"fprop", "", fprop, &p, 0, 0}, {"dgrad", "", dgrad, &p, 0, 0}, {"wgrad + add", "", wgrad, &p, 0, 0}};
    for (int i = 0; i < 3; i++) {
        snprintf(items[i].shape, sizeof items[i].shape, "%lld x %lld x %lld", (long long)N, (long long)out,
                 (long long)in);
        items[i].flops = 2.0 * (double)N * (double)in * (double)out;
        report(&items[i]);
    }
    drop(p.x), drop(p.y), drop(p.w), drop(p.dw);
}

/* ---- attention ---- */

typedef struct {
    Attention a;
    Tensor qkv, att, lse, datt, dqkv;
} Heads;

static Tensor part(Tensor qkv, const Attention *a, int which)
{
    int64_t first[] = {0, a->NH, a->NH + a->NKV}, heads[] = {a->NH, a->NKV, a->NKV};
    return tensor_cols(qkv, first[which] * a->HD, heads[which] * a->HD);
}

static void attention_forward(void *p)
{
    Heads *h = (Heads *)p;
    ops->attention_forward(h->att, h->lse, part(h->qkv, &h->a, 0), part(h->qkv, &h->a, 1), part(h->qkv, &h->a, 2),
                           &h->a);
}

static void attention_backward(void *p)
{
    Heads *h = (Heads *)p;
    ops->attention_backward(part(h->dqkv, &h->a, 0), part(h->dqkv, &h->a, 1), part(h->dqkv, &h->a, 2), h->datt, h->att,
                            h->lse, part(h->qkv, &h->a, 0), part(h->qkv, &h->a, 1), part(h->qkv, &h->a, 2), &h->a);
}

static void bench_attention(int64_t B, int64_t T, int64_t NH, int64_t NKV, int64_t HD)
{
    Heads h = {};
    h.a.B = B, h.a.Tq = h.a.Tk = T, h.a.NH = NH, h.a.NKV = NKV, h.a.HD = HD;
    h.qkv = tensor(DTYPE_BF16, B * T, (NH + 2 * NKV) * HD), h.dqkv = tensor(DTYPE_BF16, B * T, (NH + 2 * NKV) * HD);
    h.att = tensor(DTYPE_BF16, B * T, NH * HD), h.datt = tensor(DTYPE_BF16, B * T, NH * HD);
    h.lse = tensor(DTYPE_FP32, B * T, NH);
    double flops = 2.0 * (double)(B * NH * HD) * (double)T * (double)T; /* two products, half of them masked */
    Item items[] = {{"attention forward", "", attention_forward, &h, flops, 0},
                    {"attention backward", "", attention_backward, &h, 2.5 * flops, 0}};
    for (int i = 0; i < 2; i++) {
        snprintf(items[i].shape, sizeof items[i].shape, "B %lld T %lld heads %lld/%lld x %lld", (long long)B,
                 (long long)T, (long long)NH, (long long)NKV, (long long)HD);
        report(&items[i]);
    }
    drop(h.qkv), drop(h.dqkv), drop(h.att), drop(h.datt), drop(h.lse);
}

/* ---- what moves memory ---- */

typedef struct {
    Tensor x, y, z, stats, vector, master, m, v, grad;
    Operand o;
    Norm norm;
    ParamSlice slice;
    StepResult *result;
} Moves;

static void copy(void *p)
{
    Moves *k = (Moves *)p;
    cuda_check(cudaMemcpyAsync(k->y.data, k->x.data, tensor_bytes(k->x), cudaMemcpyDeviceToDevice, cuda.stream),
               "copy");
}
static void residual(void *p)
{
    Moves *k = (Moves *)p;
    ops->residual_add(k->z, k->stats, k->x, k->y, &k->norm);
}
static void norm_operand(void *p)
{
    Moves *k = (Moves *)p;
    ops->operand_from_norm(&k->o, k->x, k->stats, &k->norm, VIEW_ROW);
}
static void norm_backward(void *p)
{
    Moves *k = (Moves *)p;
    ops->norm_backward(k->z, &k->norm, k->y, k->x, k->stats);
}
static void adamw(void *p) { ops->adamw(&((Moves *)p)->slice, ((Moves *)p)->result); }

static void bench_moves(int64_t N, int64_t C)
{
    Moves k = {};
    StepResult good = {};
    good.clip = 1, good.finite = 1;
    k.x = tensor(DTYPE_BF16, N, C), k.y = tensor(DTYPE_BF16, N, C), k.z = tensor(DTYPE_BF16, N, C);
    k.stats = tensor(DTYPE_FP32, N, 1), k.vector = tensor(DTYPE_FP32, 1, C);
    k.m = tensor(DTYPE_FP32, N, C), k.v = tensor(DTYPE_FP32, N, C), k.grad = tensor(DTYPE_FP32, N, C);
    k.norm.kind = NORM_RMSNORM, k.norm.eps = 1e-5f;
    k.norm.gain = k.norm.dgain = k.vector;
    k.o = operand_of(k.z);
    k.result = (StepResult *)ops->alloc(sizeof good);
    ops->copy_in(k.result, &good, sizeof good);
    k.slice.master = k.x, k.slice.grad = k.grad, k.slice.m = k.m, k.slice.v = k.v;
    double element = (double)(N * C);
    copy_bytes_per_s = 4 * element / microseconds(copy, &k) * 1e6;
    Item items[] = {{"copy", "", copy, &k, 0, 4 * element},
                    {"residual + statistics", "", residual, &k, 0, 6 * element},
                    {"norm", "", norm_operand, &k, 0, 4 * element},
                    {"norm backward", "", norm_backward, &k, 0, 8 * element},
                    {"adamw", "", adamw, &k, 0, 28 * element}};
    for (int i = 0; i < 5; i++) {
        snprintf(items[i].shape, sizeof items[i].shape, "%lld x %lld", (long long)N, (long long)C);
        report(&items[i]);
    }
    drop(k.x), drop(k.y), drop(k.z), drop(k.stats), drop(k.vector), drop(k.m), drop(k.v), drop(k.grad);
    ops->free(k.result, sizeof good);
}

/* ---- quantizers: both copies of an operand, with either kind of tensor scale ---- */

typedef struct {
    Tensor x;
    Linear w; /* its weight is the operand that is made */
} Quantized;

static void quantize_activation(void *p)
{
    Quantized *q = (Quantized *)p;
    ops->operand_from_tensor(&q->w.weight, q->x, VIEW_ROW | VIEW_COL);
}
static void quantize_gradient(void *p)
{
    Quantized *q = (Quantized *)p;
    ops->operand_from_gradient(&q->w.weight, q->x, Tensor{});
}
static void quantize_weight(void *p)
{
    Quantized *q = (Quantized *)p;
    ops->weight_prepare(&q->w, q->x, 0, 0);
}

/* Bytes an element: 2 read, once more where the tensor's scale comes first, and copies of 0.5625 written; a power of
 * two comes last, and block scales are read and written once more. */
static void bench_quantizer(const char *name, void (*run)(void *), Tensor x, Rounding rounding, ScaleBlock block,
                            TensorScaleMode scale)
{
    bool square = block == SCALE_16X16, late = scale == TENSOR_SCALE_POW2 && !square;
    Quantized q = {};
    Operand *o = &q.w.weight;
    View *view[2] = {&o->row, &o->col};
    void *memory[2];
    size_t bytes[2];
    q.x = x;
    o->rows = x.rows, o->cols = x.cols;
    for (int i = 0; i < 2; i++) {
        view[i]->format.format = FORMAT_NVFP4;
        view[i]->format.nvfp4 = Nvfp4Form{rounding, block, scale, FOUR_OVER_SIX_OFF, 1};
        view[i]->format.rht = i == 1 && !square;
        view[i]->format.role = (uint8_t)(ROLE_OPERAND + i);
        bytes[i] = ops->view_bytes(&view[i]->format, i ? VIEW_COL : VIEW_ROW, o->rows, o->cols);
        memory[i] = ops->alloc(bytes[i]);
        ops->view_place(view[i], i ? VIEW_COL : VIEW_ROW, o->rows, o->cols, memory[i]);
    }
    Item item = {name, "", run, &q, 0, (double)(x.rows * x.cols) * (late ? 3.375 : 5.125)};
    snprintf(item.shape, sizeof item.shape, "%lld x %lld, %s", (long long)x.rows, (long long)x.cols,
             scale == TENSOR_SCALE_POW2 ? "pow2" : "amax");
    report(&item);
    for (int i = 0; i < 2; i++) ops->free(memory[i], bytes[i]);
}

static void bench_quantizers(int64_t N, int64_t C)
{
    Tensor x = tensor(DTYPE_BF16, N, C);
    for (int scale = 0; scale < 2; scale++) {
        bench_quantizer("quantize activation", quantize_activation, x, ROUND_NEAREST, SCALE_1X16,
                        (TensorScaleMode)scale);
        bench_quantizer("quantize gradient", quantize_gradient, x, ROUND_STOCHASTIC, SCALE_1X16,
                        (TensorScaleMode)scale);
    }
    bench_quantizer("quantize weight", quantize_weight, x, ROUND_NEAREST, SCALE_16X16, TENSOR_SCALE_AMAX);
    drop(x);
}

int main(int argc, char **argv)
{
    bool quick = argc > 1 && !strcmp(argv[1], "--quick");
    Error error;
    Step step = {};
    Need need = {};
    if (argc > 2 || (argc == 2 && !quick)) die_usage("bench_cuda [--quick]");
    if (cuda_open(&ops, "auto", 0, &error)) die("%s", error.text);
    need.N = 32768, need.T = 8192, need.cols = 28672, need.V = 50304, need.head_dim = 128, need.heads = 32,
    need.group = 4, need.weight_rows = 128, need.weight_elements = 128 * 128;
    if (quick) need.N = 256, need.cols = 512;
    void *workspace = ops->alloc(ops->workspace_bytes(&need));
    ops->workspace_set(workspace, &need);
    step.lr = 1e-6f, step.correction1 = step.correction2 = 1, step.eps = 1e-8f;
    ops->begin_step(&step);
    printf("device: %s\n", ops->name);
    if (quick) {
        bench_layer(128, 64, 96);
        bench_attention(1, 64, 2, 1, 64);
        bench_moves(64, 128);
        bench_quantizers(64, 128);
        return 0;
    }
    static const int64_t LAYERS[][3] = {{16384, 768, 2304},  {16384, 768, 3072},  {16384, 3072, 768},
                                        {16384, 768, 50304}, {16384, 1600, 4800}, {8192, 4096, 6144},
                                        {8192, 4096, 28672}};
    for (int i = 0; i < 7; i++) bench_layer(LAYERS[i][0], LAYERS[i][1], LAYERS[i][2]);
    bench_attention(16, 1024, 12, 12, 64);
    bench_attention(4, 4096, 32, 8, 128);
    bench_attention(2, 8192, 32, 8, 128);
    bench_moves(32768, 768);
    bench_quantizers(32768, 768);
    bench_moves(16384, 4096);
    bench_quantizers(16384, 4096);
    return 0;
}
