/* Tensors, operands, linear layers and the arena: the nouns that the model, the operations and `plan` share.
 *
 * Why an Operand. A matrix product reads its inputs in a number format; in NVFP4 an input exists as two copies, because
 * the tensor cores want the summed dimension contiguous and each copy is quantized from the BF16 source on its own:
 *
 *     Y[N,out] = X W^T     fprop   X by row   (1x16 along in)        W by row
 *     dX[N,in] = dY W      dgrad   dY by row  (1x16 along out)       W by column (stored transposed)
 *     dW[out,in] = dY^T X  wgrad   dY by column (RHT along tokens)   X by column (RHT along tokens)
 *
 * So an Operand has a row view and a column view, each with its own ViewFormat. The model asks for views; it never asks
 * what is in them. Three rules keep memory small, all applied by the layout in gpt.c:
 *   1. a plain (FP32/BF16) view is stored as the source, never transposed, so plain row and column views are one
 *      memory, written once; so are those of a weight in 16 x 16 blocks, whose transposed codes are the same codes
 *      (views_are_one; a backend that needs them transposed keeps both within the one memory);
 *   2. a plain view of a tensor that already has that dtype is that tensor;
 *   3. a view that the backward pass makes itself is `late`: the forward pass leaves it out.
 *
 * Floor 0.
 */
#ifndef LLMC_TENSOR_H
#define LLMC_TENSOR_H

#include "nvfp4.h"

C_BEGIN

typedef enum { DTYPE_FP32, DTYPE_BF16, DTYPE_INT32 } DType;

/* A matrix in the backend's memory that it does not own: element (r, c) is data[r * ld + c]. Activations are [N, cols]
 * with N = B * T tokens; a vector has one column or one row. A slice of columns (q, k, v of qkv) keeps ld. */
typedef struct {
    void *data; /* NULL: absent, or the arena is only counting */
    DType dtype;
    int64_t rows, cols, ld;
} Tensor;

static inline size_t dtype_bytes(DType dtype) { return dtype == DTYPE_BF16 ? 2 : 4; }

static inline size_t tensor_bytes(Tensor t) /* of a contiguous tensor */
{
    return (size_t)t.rows * (size_t)t.cols * dtype_bytes(t.dtype);
}

static inline Tensor tensor_rows(Tensor t, int64_t row0, int64_t rows)
{
    if (t.data) t.data = (char *)t.data + (size_t)(row0 * t.ld) * dtype_bytes(t.dtype);
    t.rows = rows;
    return t;
}

static inline Tensor tensor_cols(Tensor t, int64_t col0, int64_t cols)
{
    if (t.data) t.data = (char *)t.data + (size_t)col0 * dtype_bytes(t.dtype);
    t.cols = cols;
    return t;
}

/* ---- number formats: filled by recipe.c, one LinearFormats per block x projection x range of steps ---- */

typedef enum { FORMAT_NONE, FORMAT_FP32, FORMAT_BF16, FORMAT_NVFP4, FORMAT_COUNT } Format;

typedef struct { /* how one copy of one operand is made; all but `format` is for NVFP4 */
    Format format;
    Nvfp4Form nvfp4;
    bool rht;     /* random Hadamard transform over 16 rows of the source; column views only */
    uint8_t role; /* Philox field: ROLE_OPERAND + projection * OPERAND_COPIES + copy */
} ViewFormat;

typedef struct { /* fprop = x_row . w_row, dgrad = dy_row . w_col, wgrad = dy_col . x_col */
    ViewFormat x_row, x_col, w_row, w_col, dy_row, dy_col;
} LinearFormats;

/* ---- operands ---- */

enum { VIEW_ROW = 1, VIEW_COL = 2 }; /* a set of views is an unsigned */

typedef struct {
    ViewFormat format;
    void *data;           /* plain: [rows, cols] of the source, contiguous; NVFP4: E2M1 codes, 8 bytes a block of 16 */
    uint8_t *block_scale; /* NVFP4: E4M3, one a block, in the order of the blocks (the backend's own) */
    float *tensor_scale;  /* NVFP4: [1] amax, or S_dec in pow2 mode (Nvfp4Scale.stored) */
} View;

typedef struct {
    int64_t rows, cols; /* of the source: [N, in], [N, out] or [out, in] */
    int layer;          /* Philox field */
    int64_t row0;       /* first row within the micro-batch: 0 but for classifier chunks; Philox row */
    unsigned late;      /* views that the backward pass makes again from saved tensors */
    View row, col;
    void *gathered; /* of a weight that is sharded: what ranks gather and is no view's own memory; or NULL */
} Operand;

static inline bool format_is_plain(Format f) { return f == FORMAT_FP32 || f == FORMAT_BF16; }

static inline DType view_dtype(const View *v) { return v->format.format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16; }

/* Row and column view in one memory: rule 1 above. */
static inline bool views_are_one(const ViewFormat *row, const ViewFormat *col)
{
    return row->format == col->format &&
           (format_is_plain(row->format) || (row->format == FORMAT_NVFP4 && row->nvfp4.block == SCALE_16X16));
}

/* One weight matrix with everything that its three products need. The masters live with the optimizer (whole or
 * sharded); a Linear is what the products read and where the gradient goes. Fused QKV and gate+up are one Linear. */
typedef struct {
    LinearFormats formats;
    Operand weight; /* [out, in]; views fresh after ops->weight_prepare */
    Tensor bias;    /* [1, out] FP32, or absent */
    Tensor dW;      /* [out, in] FP32; the products ADD here (see hooks in gpt.h for whose memory it is) */
    Tensor dbias;   /* [1, out] FP32, or absent */
} Linear;

/* ---- the arena: one allocation, laid out once, by code that can also only count ---- */

typedef enum {
    PURPOSE_MASTER,    /* BF16 or FP32 parameters that the optimizer updates */
    PURPOSE_PREPARED,  /* weights in the form that the products read, where that is not the master itself */
    PURPOSE_GRADIENT,  /* FP32 sums, and the contribution of embedding and head */
    PURPOSE_OPTIMIZER, /* m and v */
    PURPOSE_RESIDUAL,  /* x of every block: lives from forward to backward whatever is recomputed */
    PURPOSE_SAVED,     /* the rest that a block saves for its backward */
    PURPOSE_SCRATCH,   /* lives within one block or one classifier chunk; KV cache */
    PURPOSE_WORKSPACE, /* panels of matrix products, partial sums, batches, RoPE table, pieces of sums */
    PURPOSE_COUNT
} Purpose;

const char *purpose_name(Purpose purpose);

/* A stack of bytes. Scratch of blocks that never live together is laid over itself by setting `used` back to an earlier
 * value; `peak` remembers. Every rise of the peak is booked to the current purpose, so the bookings add up to it. */
typedef struct {
    char *base; /* NULL: count only (this is `plan`) */
    size_t capacity, used, peak;
    Purpose purpose;
    size_t bytes[PURPOSE_COUNT];
} Arena;

void *arena_take(Arena *arena, size_t bytes); /* 256-byte aligned; dies when over capacity; NULL when counting */
Tensor arena_tensor(Arena *arena, DType dtype, int64_t rows, int64_t cols);

C_END
#endif
