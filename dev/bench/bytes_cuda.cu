/* The bytes of device memory that quantization moves, counted by cuda_on_cpu (CUDA_ON_CPU_STATS=1) and compared with what
 * has to be moved: the source once, in amax mode twice, codes and scales of each copy (9/16 byte an element) once, with pow2
 * tensor scales the block scales twice more. `make bytes` prints the table:
 *
 *     what | bytes an element | minimum | ratio | sectors used
 *
 * and fails when a row moves more than 1.05 times its minimum. Sectors: bytes over 32 times the 32-byte sectors touched. The
 * minimum holds no gains nor statistics of norms: those are once a tile of 128 x 128.
 */
#include "cuda/backend.h"
#include "cuda/cuda.cuh"

#include <stdio.h>
#include <string.h>

static const Ops *ops;
static int over;

enum { ROWS = 512, COLS = 1024 };

static Tensor tensor(DType dtype, int64_t rows, int64_t cols)
{
    Tensor t = {NULL, dtype, rows, cols, cols};
    t.data = ops->alloc(tensor_bytes(t));
    return t;
}

static Operand operand(int64_t rows, int64_t cols, Rounding rounding, TensorScaleMode mode, unsigned views)
{
    Operand o = {};
    o.rows = rows, o.cols = cols;
    View *view[2] = {&o.row, &o.col};
    for (int col = 0; col < 2; col++) {
        ViewFormat *f = &view[col]->format;
        if (!(views >> col & 1)) continue;
        f->format = FORMAT_NVFP4;
        f->rht = col;
        f->role = (uint8_t)(ROLE_OPERAND + col);
        f->nvfp4.rounding = rounding, f->nvfp4.tensor_scale = mode, f->nvfp4.headroom = 1;
        size_t bytes = ops->view_bytes(f, 1u << col, rows, cols);
        ops->view_place(view[col], 1u << col, rows, cols, ops->alloc(bytes));
    }
    return o;
}

typedef struct {
    double bytes, sectors;
} Moved;

static Moved moved(const char *kernel)
{
    cuda_on_cpu::KernelStats s = cuda_on_cpu::kernel_stats(kernel);
    return Moved{(double)(s.bytes_read + s.bytes_written), (double)(s.sectors_read + s.sectors_written)};
}

/* What all kernels of an operation moved, against `least` bytes an element. */
static void report(const char *what, double elements, double least)
{
    static const char *const KERNELS[] = {"find_amax", "quantize_tile", "finish_block_scales", "quantize_squares",
                                          "unpack_squares"};
    Moved sum = {0, 0};
    for (size_t i = 0; i < sizeof KERNELS / sizeof *KERNELS; i++) {
        Moved m = moved(KERNELS[i]);
        sum.bytes += m.bytes, sum.sectors += m.sectors;
    }
    double counted = sum.bytes / elements, ratio = counted / least;
    bool bad = ratio > 1.05;
    over += bad;
    printf("%-58s %8.3f %8.3f %7.3f %6.0f%%%s\n", what, counted, least, ratio, 100 * sum.bytes / (32 * sum.sectors),
           bad ? "  OVER" : "");
    cuda_on_cpu::reset_stats();
}

static void begin(void)
{
    cuda_check(cudaDeviceSynchronize(), "bytes");
    cuda_on_cpu::reset_stats();
}

static double minimum(double source, TensorScaleMode mode, unsigned views)
{
    double copies = (views & 1) + (views >> 1);
    return mode == TENSOR_SCALE_POW2 ? source + copies * (0.5625 + 0.125) : 2 * source + copies * 0.5625;
}

static void tensors(void)
{
    static const char *const ROUNDING[] = {"nearest", "stochastic"}, *const MODE[] = {"amax", "pow2"},
                             *const VIEWS[] = {"", "rows", "columns", "rows, columns"};
    Tensor x = tensor(DTYPE_BF16, ROWS, COLS);
    char what[128];
    for (int mode = 0; mode < 2; mode++)
        for (int rounding = 0; rounding < 2; rounding++)
            for (unsigned views = 1; views <= 3; views++) {
                Operand o = operand(ROWS, COLS, (Rounding)rounding, (TensorScaleMode)mode, views);
                snprintf(what, sizeof what, "tensor, %s, %s, %s", VIEWS[views], MODE[mode], ROUNDING[rounding]);
                begin();
                ops->operand_from_tensor(&o, x, views);
                report(what, (double)ROWS * COLS, minimum(2, (TensorScaleMode)mode, views));
            }
    Tensor dbias = tensor(DTYPE_FP32, 1, COLS);
    Operand o = operand(ROWS, COLS, ROUND_STOCHASTIC, TENSOR_SCALE_AMAX, 3);
    begin();
    ops->operand_from_gradient(&o, x, dbias);
    report("gradient with bias sums, rows, columns, amax, stochastic", (double)ROWS * COLS,
           minimum(2, TENSOR_SCALE_AMAX, 3) + 4.0 / SUM_ROWS);
}

static void computed(void)
{
    Tensor x = tensor(DTYPE_BF16, ROWS, COLS), h = tensor(DTYPE_BF16, ROWS, 2 * COLS);
    Tensor gain = tensor(DTYPE_FP32, 1, COLS), bias = tensor(DTYPE_FP32, 1, COLS), none = {};
    for (int mode = 0; mode < 2; mode++) {
        const char *name = mode ? "pow2" : "amax";
        TensorScaleMode scale = (TensorScaleMode)mode;
        char what[128];
        Operand o = operand(ROWS, COLS, ROUND_NEAREST, scale, 3);
        Operand dh = operand(ROWS, 2 * COLS, ROUND_STOCHASTIC, scale, 3);
        for (int kind = 0; kind < 2; kind++) {
            Norm norm = {};
            norm.kind = kind ? NORM_LAYERNORM : NORM_RMSNORM, norm.gain = gain, norm.bias = bias;
            Tensor stats = tensor(DTYPE_FP32, ROWS, 1 + kind);
            begin();
            ops->operand_from_norm(&o, x, stats, &norm, 3);
            snprintf(what, sizeof what, "%s, rows, columns, %s, nearest", kind ? "LayerNorm" : "RMSNorm", name);
            report(what, (double)ROWS * COLS, minimum(2, scale, 3));
        }
        begin();
        ops->operand_from_activation(&o, h, ACTIVATION_SWIGLU, 3);
        snprintf(what, sizeof what, "SwiGLU, rows, columns, %s, nearest", name);
        report(what, (double)ROWS * COLS, minimum(4, scale, 3));
        begin();
        ops->operand_from_activation_backward(&dh, x, h, ACTIVATION_SWIGLU, none);
        snprintf(what, sizeof what, "SwiGLU backward, rows, columns, %s, stochastic", name);
        report(what, 2.0 * ROWS * COLS, minimum(3, scale, 3));
    }
}

/* Both views are one set of codes and scales. The master twice, for its amax and for its codes; codes by rows written, read
 * back and written by columns; a scale a square written and read; a scale a block in the tiles of both views. */
static void weights(void)
{
    Tensor master = tensor(DTYPE_BF16, ROWS, COLS);
    for (int mode = 0; mode < 2; mode++) {
        Linear w = {};
        View *view[2] = {&w.weight.row, &w.weight.col};
        void *memory = NULL;
        w.weight.rows = ROWS, w.weight.cols = COLS;
        for (int i = 0; i < 2; i++) {
            ViewFormat *f = &view[i]->format;
            f->format = FORMAT_NVFP4, f->role = ROLE_OPERAND + COPY_W_ROW;
            f->nvfp4.block = SCALE_16X16, f->nvfp4.tensor_scale = (TensorScaleMode)mode, f->nvfp4.headroom = 1;
            if (!memory) memory = ops->alloc(ops->view_bytes(f, VIEW_ROW, ROWS, COLS));
            ops->view_place(view[i], 1u << i, ROWS, COLS, memory);
        }
        begin();
        ops->weight_prepare(&w, master, 0, 0);
        report(mode ? "weight in 16 x 16 blocks, pow2" : "weight in 16 x 16 blocks, amax", (double)ROWS * COLS,
               2 * 2 + 3 * 0.5 + 2 / 256.0 + 2 / 16.0);
    }
}

int main(void)
{
    if (cuda_open(&ops, "auto", 0, NULL)) return 1;
    Need need = {};
    need.N = need.weight_rows = ROWS, need.cols = 2 * COLS;
    ops->workspace_set(ops->alloc(ops->workspace_bytes(&need)), &need);
    Step step = {};
    ops->begin_step(&step);
    ops->begin_micro_step(0);
    printf("%-58s %8s %8s %7s %7s\n", "what", "bytes", "minimum", "ratio", "sectors");
    tensors();
    computed();
    weights();
    if (over) printf("%d rows move more than 1.05 times what they must\n", over);
    return over > 0;
}
