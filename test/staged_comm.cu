/* comm.h over NCCL for a test whose data is in memory of the host (ranks_comm.c): each start copies what it is given to the
 * device, each finish copies all of it back, so also what should not have changed.
 */
#include "comm.h"

#include "cuda/backend.h"
#include "cuda/cuda.cuh"

#include <stdlib.h>

typedef struct {
    void *host, *device;
    size_t bytes;
} Staged;

typedef struct {
    Request request; /* 0: free */
    Staged staged[2];
    void *work;
} Started;

static struct {
    Comm inner; /* its functions */
    Started started[COMM_IN_FLIGHT];
} staging;

static void *device_memory(size_t bytes)
{
    void *memory;
    cuda_check(cudaMalloc(&memory, bytes ? bytes : 1), "cudaMalloc");
    return memory;
}

static Staged stage(void *host, size_t bytes)
{
    Staged s = {host, device_memory(bytes), bytes};
    if (bytes) cuda_check(cudaMemcpyAsync(s.device, host, bytes, cudaMemcpyHostToDevice, cuda.stream), "stage");
    return s;
}

/* From the start of a bucket's buffer to the end of its last piece. */
static Staged stage_bucket(const Comm *c, Bucket b)
{
    size_t extent = 0;
    for (int i = 0; i < b.pieces; i++) {
        size_t end = b.own ? b.piece[i].own + bucket_share(&b, i, c->rank, c->ranks).bytes
                           : b.piece[i].offset + b.piece[i].bytes;
        if (end > extent) extent = end;
    }
    return stage(b.data, extent);
}

static Bucket on_device(Bucket b, Staged s)
{
    b.data = (char *)s.device;
    return b;
}

static Request remember(Request request, Staged first, Staged second, void *work)
{
    int i = 0;
    while (staging.started[i].request) i++; /* the inner one counts */
    staging.started[i] = Started{request, {first, second}, work};
    return i + 1;
}

static Request reduce_scatter_start(Comm *c, Bucket sum, Bucket contribution, ReduceOrder order, void *)
{
    Staged to = stage_bucket(c, sum), from = to;
    if (sum.data != contribution.data) from = stage_bucket(c, contribution);
    void *work = device_memory(comm_reduce_scatter_work(&contribution, c->rank, c->ranks));
    Request request = staging.inner.reduce_scatter_start(c, on_device(sum, to), on_device(contribution, from), order,
                                                         work);
    return remember(request, to, from, work);
}

static Request all_gather_start(Comm *c, Bucket whole, Bucket own)
{
    Staged to = stage_bucket(c, whole), from = to;
    if (whole.data != own.data) from = stage_bucket(c, own);
    return remember(staging.inner.all_gather_start(c, on_device(whole, to), on_device(own, from)), to, from, NULL);
}

static Request all_reduce_max_start(Comm *c, float *x, int64_t n, void *)
{
    Staged s = stage(x, (size_t)n * sizeof *x);
    void *work = device_memory(comm_all_reduce_work(s.bytes, c->ranks));
    return remember(staging.inner.all_reduce_max_start(c, (float *)s.device, n, work), s, s, work);
}

static Request all_reduce_sum_start(Comm *c, double *x, int64_t n, void *)
{
    Staged s = stage(x, (size_t)n * sizeof *x);
    void *work = device_memory(comm_all_reduce_work(s.bytes, c->ranks));
    return remember(staging.inner.all_reduce_sum_start(c, (double *)s.device, n, work), s, s, work);
}

static void finish(Comm *c, Request request)
{
    if (!request) return;
    Started *k = &staging.started[request - 1];
    staging.inner.finish(c, k->request);
    for (const Staged &s : k->staged)
        if (s.bytes)
            cuda_check(cudaMemcpyAsync(s.host, s.device, s.bytes, cudaMemcpyDeviceToHost, cuda.stream), "stage");
    cuda_check(cudaStreamSynchronize(cuda.stream), "finish");
    cudaFree(k->staged[0].device);
    if (k->staged[1].device != k->staged[0].device) cudaFree(k->staged[1].device);
    cudaFree(k->work);
    k->request = 0;
}

C_BEGIN
void staged_open(Comm *c);
C_END

void staged_open(Comm *c)
{
    const Ops *ops;
    cuda_device(c->local_rank, c->local_ranks);
    cuda_open(&ops, "auto", 1, NULL);
    comm_nccl_open(c);
    c->bytes_sent = 0; /* of the set-up */
    staging.inner = *c;
    c->reduce_scatter_start = reduce_scatter_start;
    c->all_gather_start = all_gather_start;
    c->all_reduce_max_start = all_reduce_max_start;
    c->all_reduce_sum_start = all_reduce_sum_start;
    c->finish = finish;
}
