/* See comm.h: one rank, which owns everything and talks to nobody. Every collective is done when it is started. */
#include "comm.h"

#include <string.h>

static Request reduce_scatter_start(Comm *c, Bucket sum, Bucket contribution, ReduceOrder order, void *work)
{
    (void)work;
    if (order == REDUCE_ORDERED && sum.data == contribution.data)
        die("reduce_scatter: sum and contribution are one buffer in ordered mode");
    for (int i = 0; i < sum.pieces && sum.data != contribution.data; i++) {
        Share to = bucket_share(&sum, i, c->rank, c->ranks), from = bucket_share(&contribution, i, c->rank, c->ranks);
        comm_add((float *)to.data, (const float *)from.data, to.bytes / sizeof(float));
    }
    return 0;
}

static Request all_gather_start(Comm *c, Bucket whole, Bucket own)
{
    for (int i = 0; i < whole.pieces && whole.data != own.data; i++) {
        Share to = bucket_share(&whole, i, c->rank, c->ranks), from = bucket_share(&own, i, c->rank, c->ranks);
        if (to.bytes) memcpy(to.data, from.data, to.bytes);
    }
    return 0;
}

static Request all_reduce_max_start(Comm *c, float *x, int64_t n, void *work)
{
    (void)c, (void)work;
    for (int64_t i = 0; i < n; i++) x[i] = comm_max(x[i], x[i]);
    return 0;
}

static Request all_reduce_sum_start(Comm *c, double *x, int64_t n, void *work)
{
    (void)c, (void)x, (void)n, (void)work;
    return 0;
}

static void finish(Comm *c, Request request) { (void)c, (void)request; }

static void sum_host(Comm *c, double *x, int64_t n) { (void)c, (void)x, (void)n; }

static void broadcast(Comm *c, void *data, size_t bytes, int root) { (void)c, (void)data, (void)bytes, (void)root; }

static void nothing(Comm *c) { (void)c; }

static const Comm ALONE = {.ranks = 1,
                           .local_ranks = 1,
                           .hang_timeout_s = 600,
                           .reduce_scatter_start = reduce_scatter_start,
                           .all_gather_start = all_gather_start,
                           .all_reduce_max_start = all_reduce_max_start,
                           .all_reduce_sum_start = all_reduce_sum_start,
                           .finish = finish,
                           .sum_host = sum_host,
                           .broadcast = broadcast,
                           .barrier = nothing,
                           .close = nothing};

void comm_self_open(Comm *c)
{
    if (comm_launched_ranks() > 1)
        die("started as one of %d ranks, but built without MPI: install OpenMPI (apt-get install libopenmpi-dev "
            "openmpi-bin) and build again, or start without mpirun",
            comm_launched_ranks());
    *c = ALONE;
}

Comm *comm_alone(void)
{
    static Comm alone;
    alone = ALONE;
    return &alone;
}
