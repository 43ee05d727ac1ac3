/* See tensor.h. */
#include "tensor.h"

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
    if (bytes > (size_t)1 << 60 || start > (size_t)1 << 60)
        die("this model and batch would take more than 2^60 bytes; make them smaller");
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
