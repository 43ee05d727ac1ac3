/* See tensor.h. */
#include "tensor.h"

size_t dtype_bytes(DType dtype) { return dtype == DTYPE_BF16 ? 2 : 4; }

size_t tensor_bytes(Tensor t) { return (size_t)t.rows * (size_t)t.cols * dtype_bytes(t.dtype); }

static Tensor tensor_at(Tensor t, int64_t row, int64_t col)
{
    if (t.data) t.data = (char *)t.data + (size_t)(row * t.ld + col) * dtype_bytes(t.dtype);
    return t;
}

Tensor tensor_rows(Tensor t, int64_t row0, int64_t rows)
{
    t = tensor_at(t, row0, 0);
    t.rows = rows;
    return t;
}

Tensor tensor_cols(Tensor t, int64_t col0, int64_t cols)
{
    t = tensor_at(t, 0, col0);
    t.cols = cols;
    return t;
}

const char *purpose_name(Purpose purpose)
{
    static const char *const NAMES[PURPOSE_COUNT] = {"master weights",  "prepared weights", "gradients",
                                                     "optimizer state", "residual stream",  "saved for backward",
                                                     "scratch",         "workspace"};
    return NAMES[purpose];
}

void *arena_take(Arena *arena, size_t bytes)
{
    size_t start = arena->used;
    arena->used += (bytes + 255) / 256 * 256;
    if (arena->used > arena->peak) {
        arena->bytes[arena->purpose] += arena->used - arena->peak;
        arena->peak = arena->used;
    }
    if (!arena->base) return NULL;
    if (arena->used > arena->capacity)
        die("arena over capacity: %zu of %zu bytes, in %s; this is a bug", arena->used, arena->capacity,
            purpose_name(arena->purpose));
    return arena->base + start;
}

Tensor arena_tensor(Arena *arena, DType dtype, int64_t rows, int64_t cols)
{
    Tensor t = {NULL, dtype, rows, cols, cols};
    t.data = arena_take(arena, tensor_bytes(t));
    return t;
}
