/* See optimizer.h. */
#include "optimizer.h"

#include <math.h>
#include <stdlib.h>

void optimizer_create(Optimizer *optimizer, Zero *zero, int64_t micro_batches, Arena *arena)
{
    *optimizer = (Optimizer){.zero = zero, .micro_batches = micro_batches};
    for (int i = 0; i < zero->table->count; i++) optimizer->pieces += param_pieces(&zero->table->param[i]);
    size_t piece_bytes = (size_t)optimizer->pieces * sizeof **optimizer->piece;
    size_t loss_bytes = (size_t)micro_batches * sizeof **optimizer->loss;
    arena->purpose = PURPOSE_WORKSPACE;
    for (int i = 0; i < 2; i++) {
        bool own = i == 0 || zero->ops->result_lag;
        optimizer->piece[i] = own ? arena_take(arena, piece_bytes) : optimizer->piece[0];
        optimizer->loss[i] = own ? arena_take(arena, loss_bytes) : optimizer->loss[0];
    }
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

/* Micro-batch j = m R + r is rank r's. */
static void zero_losses_of_others(const Optimizer *optimizer)
{
    const Comm *c = optimizer->zero->sharding.comm;
    Tensor loss = {optimizer->loss[optimizer->turn], DTYPE_FP32, optimizer->micro_batches / c->ranks, 2 * c->ranks,
                   2 * c->ranks};
    Tensor before = tensor_cols(loss, 0, 2 * c->rank),
           after = tensor_cols(loss, 2 * (c->rank + 1), 2 * (c->ranks - 1 - c->rank));
    if (before.cols) optimizer->zero->ops->zero(before);
    if (after.cols) optimizer->zero->ops->zero(after);
}

void optimizer_step(Optimizer *optimizer, int64_t tokens)
{
    Zero *zero = optimizer->zero;
    const Ops *ops = zero->ops;
    double *pieces = optimizer->piece[optimizer->turn], *piece = pieces, *loss = optimizer->loss[optimizer->turn];

    zero_finish_gradients(zero);
    if (zero_sharded(zero)) zero_doubles(ops, pieces, optimizer->pieces);
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice slice = zero_slice(zero, i);
        ops->sum_squares(piece + slice.row0 / 16, slice.grad);
        piece += param_pieces(&zero->table->param[i]);
    }
    if (zero_sharded(zero)) sum_over_ranks(optimizer, pieces, optimizer->pieces);
    zero_losses_of_others(optimizer);
    sum_over_ranks(optimizer, loss, optimizer->micro_batches);
    ops->finish_step(optimizer->result, pieces, optimizer->pieces, loss, optimizer->micro_batches, tokens);
    for (int i = 0; i < zero->table->count; i++) {
        ParamSlice slice = zero_slice(zero, i);
        ops->adamw(&slice, optimizer->result);
    }
    ops->result_post(optimizer->result);
    optimizer->turn ^= 1;
    gpt_enter_step(zero->gpt, zero->gpt->step + 1);
}

StepResult optimizer_result(const Optimizer *optimizer)
{
    StepResult result;
    optimizer->zero->ops->result_collect(&result);
    return result;
}

int64_t optimizer_bad_loss(const Optimizer *optimizer, bool before)
{
    size_t bytes = (size_t)optimizer->micro_batches * sizeof(double);
    double *host = xmalloc(bytes);
    int64_t j = 0;
    optimizer->zero->ops->copy_out(host, optimizer->loss[optimizer->turn ^ !before], bytes);
    while (j < optimizer->micro_batches && isfinite(host[j])) j++;
    free(host);
    return j < optimizer->micro_batches ? j : -1;
}

GradientReport optimizer_gradient(const Optimizer *optimizer, int param, bool before)
{
    const ParamTable *table = optimizer->zero->table;
    int64_t first = 0, count = param_pieces(&table->param[param]);
    for (int i = 0; i < param; i++) first += param_pieces(&table->param[i]);

    double *host = xmalloc((size_t)count * sizeof *host), sum = 0;
    const double *piece = optimizer->piece[optimizer->turn ^ !before];
    optimizer->zero->ops->copy_out(host, piece + first, (size_t)count * sizeof *host);
    for (int64_t k = 0; k < count; k++) sum += host[k];
    free(host);
    return (GradientReport){.norm = sqrt(sum), .finite = isfinite(sum)};
}
