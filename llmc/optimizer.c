/* See optimizer.h. */
#include "optimizer.h"

#include <math.h>
#include <stdlib.h>

void optimizer_create(Optimizer *optimizer, Zero *zero, int64_t micro_batches, Arena *arena)
{
    *optimizer = (Optimizer){.zero = zero, .micro_batches = micro_batches};
    for (int i = 0; i < zero->table->count; i++) optimizer->pieces += param_pieces(&zero->table->param[i]);
    size_t piece_bytes = (size_t)optimizer->pieces * sizeof *optimizer->piece;
    size_t loss_bytes = (size_t)micro_batches * sizeof *optimizer->loss;
    arena->purpose = PURPOSE_WORKSPACE;
    optimizer->piece = arena_take(arena, piece_bytes);
    optimizer->loss = arena_take(arena, loss_bytes);
    optimizer->result = arena_take(arena, sizeof *optimizer->result);
    optimizer->work = arena_take(
        arena, comm_all_reduce_work(piece_bytes > loss_bytes ? piece_bytes : loss_bytes, zero->sharding.comm->ranks));
}

/* Every value is one rank's, and zero on the others. */
static void sum_over_ranks(const Optimizer *optimizer, double *x, int64_t n)
{
    Comm *c = optimizer->zero->sharding.comm;
    c->finish(c, c->all_reduce_sum_start(c, x, n, optimizer->work));
}

static void zero_doubles(const Ops *ops, double *x, int64_t n) { ops->zero((Tensor){x, DTYPE_FP32, 1, 2 * n, 2 * n}); }

StepResult optimizer_step(Optimizer *optimizer, int64_t tokens)
{
    Zero *zero = optimizer->zero;
    const Ops *ops = zero->ops;
    double *piece = optimizer->piece;
    StepResult result;

    zero_finish_gradients(zero);
    if (zero_sharded(zero)) zero_doubles(ops, piece, optimizer->pieces);
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice slice = zero_slice(zero, i);
        ops->sum_squares(piece + slice.row0 / 16, slice.grad);
        piece += param_pieces(&zero->table->param[i]);
    }
    if (zero_sharded(zero)) sum_over_ranks(optimizer, optimizer->piece, optimizer->pieces);
    sum_over_ranks(optimizer, optimizer->loss, optimizer->micro_batches);
    ops->finish_step(optimizer->result, optimizer->piece, optimizer->pieces, optimizer->loss, optimizer->micro_batches,
                     tokens);
    zero_doubles(ops, optimizer->loss, optimizer->micro_batches); /* the next step's: each rank fills its own */
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice slice = zero_slice(zero, i);
        ops->adamw(&slice, optimizer->result);
    }
    gpt_enter_step(zero->gpt, zero->gpt->step + 1);
    ops->copy_out(&result, optimizer->result, sizeof result);
    return result;
}

GradientReport optimizer_gradient(const Optimizer *optimizer, int param)
{
    const ParamTable *table = optimizer->zero->table;
    int64_t first = 0, count = param_pieces(&table->param[param]);
    for (int i = 0; i < param; i++) first += param_pieces(&table->param[i]);

    double *host = xmalloc((size_t)count * sizeof *host), sum = 0;
    optimizer->zero->ops->copy_out(host, optimizer->piece + first, (size_t)count * sizeof *host);
    for (int64_t k = 0; k < count; k++) sum += host[k];
    free(host);
    return (GradientReport){.norm = sqrt(sum), .finite = isfinite(sum)};
}
