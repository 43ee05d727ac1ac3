/* See comm.h: ranks that are processes of one MPI job, each with a GPU of its own, whose memory NCCL moves. What concerns
 * memory of the host stays with comm_mpi.c.
 *
 *     start     the communication stream waits for what the compute stream (cuda.cuh) was given; one group of NCCL calls
 *     finish    the compute stream waits for the collective's end; the host waits for nothing
 *
 * Collectives run one after the other in their stream, beside the compute stream. Nothing is copied together first: a
 * bucket is one group of calls, one or R for each piece.
 *
 *     all_gather               AllGather where all shares of a piece are equal, else a Broadcast from each owner
 *     reduce_scatter, ordered  every share to its owner's `work` (Send, Recv); a kernel adds in rank order
 *     reduce_scatter, fast     ReduceScatter where shares are equal, else a Reduce to each owner
 *     all_reduce               all values to all (Send, Recv); a kernel combines in rank order: NaN survives, and the
 *                              bits do not depend on the way that values took
 *
 * NCCL itself sends less than comm.h's formulas count where it goes around a ring or lets a switch add.
 *
 * Failure. When a peer is gone the device waits for ever, and so does a host that asks for a result, or that gives a full
 * queue one kernel more. So a thread watches: each collective's end writes its number to memory of the host; when one was
 * started and none ends for hang_timeout_s, or NCCL reports an error, the job ends. hang_timeout_s must also exceed what
 * the device computes between two collectives.
 *
 * Floor 2.
 */
#include "comm.h"

#include "cuda/rows.cuh"

#include <math.h>
#include <nccl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUN_AHEAD = 1024 }; /* so many collectives may be given to the device before the oldest of them is over */

typedef struct {
    const char *name;
    int64_t step;
    double hang_timeout_s; /* as it was at the start, and the next */
    bool (*stopping)(void);
    bool started;              /* and not finished */
    cudaEvent_t arrived, over; /* the compute stream came to its finish; its end */
} Collective;

static struct {
    ncclComm_t comm; /* NULL once aborted */
    cudaStream_t stream;
    cudaEvent_t ready;                /* the compute stream, at a start */
    Collective collective[RUN_AHEAD]; /* number n at n % RUN_AHEAD */
    int in_flight;
    uint64_t measured; /* waits up to this number are in waited_s */

    uint32_t *numbers;       /* [RUN_AHEAD] device memory: 1, 2, ... RUN_AHEAD - 1, 0 */
    volatile uint32_t *last; /* pinned: number + 1 of the last that is over, modulo RUN_AHEAD */

    pthread_mutex_t guard; /* of comm and all that follows; held for moments */
    pthread_t watchdog;
    uint64_t count; /* given to the device so far */
    bool closing;

    DieHook die_before; /* comm_mpi.c's, as the next */
    void (*close_before)(Comm *c);
} nccl;

/* ---- failure ---- */

/* die()'s last act, in whichever thread. Another may be inside of NCCL, which returns then. */
static void abort_collectives(int code)
{
    pthread_mutex_lock(&nccl.guard);
    ncclComm_t comm = nccl.comm;
    nccl.comm = NULL;
    pthread_mutex_unlock(&nccl.guard);
    alarm(3); /* ends the process should what follows hang */
    if (comm) ncclCommAbort(comm);
    nccl.die_before(code);
    _exit(code);
}

static void pause_for(double seconds)
{
    struct timespec time = {0, (long)(1e9 * seconds)};
    nanosleep(&time, NULL);
}

/* State of the communicator; whoever finds that another thread is ending the job waits for the end. */
static ncclResult_t communicator_state(void)
{
    ncclResult_t state = ncclSuccess;
    pthread_mutex_lock(&nccl.guard);
    bool aborted = !nccl.comm;
    if (!aborted) ncclCommGetAsyncError(nccl.comm, &state);
    pthread_mutex_unlock(&nccl.guard);
    while (aborted) pause();
    return state;
}

static void check(int64_t step, const char *name, ncclResult_t result)
{
    if (result == ncclSuccess || result == ncclInProgress) return;
    communicator_state();
    die("step %lld, %s: NCCL says: %s: %s (NCCL_DEBUG=INFO in the environment says more)", (long long)step, name,
        ncclGetErrorString(result), ncclGetLastError(nccl.comm));
}

/* The communicator does not block: a call is over when its state says so. */
static void settle(const Comm *c, const char *name)
{
    ncclResult_t state;
    double start = now_seconds();
    while ((state = communicator_state()) == ncclInProgress) {
        if (c->hang_timeout_s > 0 && now_seconds() - start > c->hang_timeout_s)
            die("step %lld, %s: NCCL is not ready for %g s (hang_timeout_s)", (long long)c->step, name,
                c->hang_timeout_s);
        pause_for(20e-6);
    }
    check(c->step, name, state);
}

static uint64_t count_over(void) /* with the guard, or in the main thread */
{
    return nccl.count - (uint32_t)(nccl.count - *nccl.last) % RUN_AHEAD;
}

/* The oldest collective that is not over, or the last one of all; whether it is not over. */
static bool oldest(Collective *out, uint64_t *over)
{
    pthread_mutex_lock(&nccl.guard);
    *over = count_over();
    bool any = *over < nccl.count;
    *out = nccl.collective[(any ? *over : *over - 1) % RUN_AHEAD];
    if (!nccl.count) out->name = "comm_open";
    pthread_mutex_unlock(&nccl.guard);
    return any;
}

static void *watch(void *unused)
{
    double last = now_seconds(), still = 0; /* seconds since a collective ended */
    uint64_t before = 0, over;
    bool told = false;
    (void)unused;
    while (!__atomic_load_n(&nccl.closing, __ATOMIC_ACQUIRE)) {
        Collective k;
        double now = now_seconds();
        bool waits = oldest(&k, &over) && over == before;
        still = waits ? still + fmin(now - last, 0.1) : 0; /* while this process was stopped itself, nobody hung */
        last = now;
        before = over;
        check(k.step, k.name, communicator_state());
        if (waits && k.hang_timeout_s > 0 && still > k.hang_timeout_s)
            die("step %lld, %s: no end for %g s (hang_timeout_s); see whether the processes of all ranks are still "
                "there",
                (long long)k.step, k.name, k.hang_timeout_s);
        if (!told && still > 0.1 && k.stopping && k.stopping()) { /* a launcher kills a second or so later */
            warn("step %lld, %s: told to stop while it waits for the other ranks", (long long)k.step, k.name);
            told = true;
        }
        pause_for(20e-3);
    }
    return unused;
}

/* Of an answer to a query. One that says no is also remembered as an error, which a later launch must not find. */
static bool is_over(cudaError_t status)
{
    if (status == cudaErrorNotReady) {
        cudaGetLastError();
        return false;
    }
    cuda_check(status, "a collective or what came before it");
    return true;
}

/* While the host waits for a rank by MPI: what failed on the device ends the job. The question also lets a device that is
 * played by this process go on (dev/cuda_on_cpu), for the ranks that wait for it. */
static void look_at_device(Comm *c)
{
    (void)c;
    is_over(cudaStreamQuery(nccl.stream));
}

/* ---- a collective ---- */

/* How long the compute stream stood in each finish, of those that are over. */
static void measure_waits(Comm *c)
{
    for (; nccl.measured < count_over(); nccl.measured++) {
        const Collective *k = &nccl.collective[nccl.measured % RUN_AHEAD];
        float ms = 0;
        if (k->started || !is_over(cudaEventQuery(k->arrived)) || !is_over(cudaEventQuery(k->over))) return;
        cuda_check(cudaEventElapsedTime(&ms, k->arrived, k->over), "finish");
        if (ms > 0) c->waited_s += 1e-3 * (double)ms;
    }
}

static Collective *begin(Comm *c, const char *name)
{
    if (nccl.in_flight == COMM_IN_FLIGHT) die("%s: %d collectives in flight already", name, COMM_IN_FLIGHT);
    while (nccl.count - count_over() >= RUN_AHEAD - 1) {
        look_at_device(c);
        pause_for(50e-6);
    }
    measure_waits(c);
    Collective *k = &nccl.collective[nccl.count % RUN_AHEAD];
    if (k->started) die("%s: one of %d collectives before is still in flight", k->name, RUN_AHEAD);
    pthread_mutex_lock(&nccl.guard);
    k->name = name;
    k->step = c->step;
    k->started = true;
    nccl.count++;
    k->hang_timeout_s = c->hang_timeout_s;
    k->stopping = c->stopping;
    pthread_mutex_unlock(&nccl.guard);
    nccl.in_flight++;
    cuda_check(cudaEventRecord(nccl.ready, cuda.stream), name);
    cuda_check(cudaStreamWaitEvent(nccl.stream, nccl.ready, 0), name);
    check(c->step, name, ncclGroupStart());
    return k;
}

/* The group is given to the device. */
static void launch(const Comm *c, const Collective *k)
{
    check(c->step, k->name, ncclGroupEnd());
    settle(c, k->name);
}

static Request end(const Collective *k)
{
    int i = (int)(k - nccl.collective);
    cuda_check(cudaEventRecord(k->over, nccl.stream), k->name);
    cuda_check(
        cudaMemcpyAsync((void *)nccl.last, nccl.numbers + i, sizeof *nccl.numbers, cudaMemcpyDeviceToHost, nccl.stream),
        k->name);
    return i + 1;
}

static void finish(Comm *c, Request request)
{
    if (request == 0) return;
    Collective *k = &nccl.collective[request - 1];
    if (request < 0 || request > RUN_AHEAD || !k->started) die("finish: request %d is not in flight", request);
    cuda_check(cudaEventRecord(k->arrived, cuda.stream), k->name);
    cuda_check(cudaStreamWaitEvent(cuda.stream, k->over, 0), k->name);
    k->started = false;
    nccl.in_flight--;
    (void)c;
}

static void send(const Comm *c, const char *name, const void *data, size_t bytes, int peer)
{
    check(c->step, name, ncclSend(data, bytes, ncclUint8, peer, nccl.comm, nccl.stream));
}

static void receive(const Comm *c, const char *name, void *data, size_t bytes, int peer)
{
    check(c->step, name, ncclRecv(data, bytes, ncclUint8, peer, nccl.comm, nccl.stream));
}

/* Bytes of every rank's share, where all are equal and thus lie one after the other; else 0. */
static size_t equal_share(const Bucket *b, int piece, int ranks)
{
    const Piece *p = &b->piece[piece];
    return p->bytes % (p->unit * (size_t)ranks) ? 0 : p->bytes / (size_t)ranks;
}

static void *piece_data(const Bucket *whole, int piece) { return whole->data + whole->piece[piece].offset; }

/* ---- all_gather ---- */

static void gather_piece(const Comm *c, const Bucket *whole, const Bucket *own, int piece)
{
    size_t equal = equal_share(whole, piece, c->ranks);
    const char *mine = bucket_share(own, piece, c->rank, c->ranks).data;
    if (equal) {
        check(c->step, "all_gather",
              ncclAllGather(mine, piece_data(whole, piece), equal, ncclUint8, nccl.comm, nccl.stream));
        return;
    }
    for (int r = 0; r < c->ranks; r++) {
        Share to = bucket_share(whole, piece, r, c->ranks);
        const void *from = r == c->rank ? mine : to.data; /* read by the owner only */
        if (to.bytes)
            check(c->step, "all_gather", ncclBroadcast(from, to.data, to.bytes, ncclUint8, r, nccl.comm, nccl.stream));
    }
}

static Request all_gather_start(Comm *c, Bucket whole, Bucket own)
{
    Collective *k = begin(c, "all_gather");
    for (int i = 0; i < whole.pieces; i++) gather_piece(c, &whole, &own, i);
    launch(c, k);
    c->bytes_sent += (size_t)(c->ranks - 1) * share_bytes(&own, c->rank, c->ranks);
    return end(k);
}

/* ---- reduce_scatter ---- */

/* A lane has W floats: sum + contribution of rank 0 + that of rank 1 ... Of this rank it is `own`, of the others in
 * `work`, `stride` floats from one to the next. 4 (R + 2) bytes a float; the R reads do not wait for each other. */
template <int W>
__global__ void __launch_bounds__(BLOCK)
    add_contributions(gmem<float> sum, gmem<const float> own, gmem<const float> work, int64_t n, int64_t stride,
                      int rank, int ranks)
{
    int64_t i = ((int64_t)warp_number() * WARP + lane_number()) * W;
    float total[W];
    if (i >= n) return;
    load_row<W>(total, sum, i, n);
#pragma unroll 4
    for (int r = 0; r < ranks; r++) {
        float x[W];
        load_row<W>(x, r == rank ? own : work + (r < rank ? r : r - 1) * stride, i, n);
#pragma unroll
        for (int j = 0; j < W; j++) total[j] += x[j];
    }
    store_row<W>(sum, i, n, total);
}

static void add_piece(Share sum, const char *own, const char *work, size_t stride, int rank, int ranks)
{
    int64_t n = (int64_t)(sum.bytes / sizeof(float));
    bool aligned = ((uintptr_t)sum.data | (uintptr_t)own | (uintptr_t)work | stride) % 16 == 0;
    if (!n) return;
    BY_WIDTH(aligned, float, W,
             add_contributions<W><<<blocks_for_warps(ceil_div(n, WARP * W)), BLOCK, 0, nccl.stream>>>(
                 gmem<float>((void *)sum.data), gmem<const float>((const float *)own),
                 gmem<const float>((const float *)work), n, (int64_t)(stride / sizeof(float)), rank, ranks));
    cuda_check(cudaGetLastError(), "reduce_scatter");
}

/* Every share to its owner: `work` holds an own buffer without gaps of each other rank. */
static void reduce_ordered(const Comm *c, const Collective *k, const Bucket *sum, const Bucket *contribution,
                           char *work)
{
    size_t stride = share_bytes(contribution, c->rank, c->ranks);
    for (int i = 1; i < c->ranks; i++) {
        int to = (c->rank + i) % c->ranks, from = (c->rank + c->ranks - i) % c->ranks;
        char *place = work + (size_t)(from < c->rank ? from : from - 1) * stride;
        for (int p = 0; p < contribution->pieces; p++) {
            Share theirs = bucket_share(contribution, p, to, c->ranks);
            size_t mine = bucket_share(contribution, p, c->rank, c->ranks).bytes;
            if (theirs.bytes) send(c, k->name, theirs.data, theirs.bytes, to);
            if (mine) receive(c, k->name, place, mine, from);
            place += mine;
        }
    }
    launch(c, k);
    for (int p = 0; p < sum->pieces; p++) {
        Share to = bucket_share(sum, p, c->rank, c->ranks);
        add_piece(to, bucket_share(contribution, p, c->rank, c->ranks).data, work, stride, c->rank, c->ranks);
        work += to.bytes;
    }
}

static void reduce_piece(const Comm *c, const Bucket *contribution, int piece, void *total)
{
    size_t equal = equal_share(contribution, piece, c->ranks);
    if (equal) {
        check(c->step, "reduce_scatter",
              ncclReduceScatter(piece_data(contribution, piece), total, equal / sizeof(float), ncclFloat32, ncclSum,
                                nccl.comm, nccl.stream));
        return;
    }
    for (int r = 0; r < c->ranks; r++) {
        Share from = bucket_share(contribution, piece, r, c->ranks);
        if (from.bytes)
            check(c->step, "reduce_scatter",
                  ncclReduce(from.data, total, from.bytes / sizeof(float), ncclFloat32, ncclSum, r, nccl.comm,
                             nccl.stream));
    }
}

/* The total of each own share in place, or in `work` and added from there. */
static void reduce_fast(const Comm *c, const Collective *k, const Bucket *sum, const Bucket *contribution, char *work)
{
    bool in_place = sum->data == contribution->data;
    char *place = work;
    for (int p = 0; p < contribution->pieces; p++) {
        Share mine = bucket_share(contribution, p, c->rank, c->ranks);
        reduce_piece(c, contribution, p, in_place ? mine.data : place);
        place += mine.bytes;
    }
    launch(c, k);
    for (int p = 0; p < sum->pieces && !in_place; p++) {
        Share to = bucket_share(sum, p, c->rank, c->ranks);
        add_piece(to, work, NULL, 0, 0, 1);
        work += to.bytes;
    }
}

static Request reduce_scatter_start(Comm *c, Bucket sum, Bucket contribution, ReduceOrder order, void *work)
{
    if (order == REDUCE_ORDERED && sum.data == contribution.data)
        die("reduce_scatter: sum and contribution are one buffer in ordered mode");
    Collective *k = begin(c, "reduce_scatter");
    if (order == REDUCE_ORDERED)
        reduce_ordered(c, k, &sum, &contribution, (char *)work);
    else
        reduce_fast(c, k, &sum, &contribution, (char *)work);
    c->bytes_sent += bucket_bytes(&contribution) - share_bytes(&contribution, c->rank, c->ranks);
    return end(k);
}

/* ---- all_reduce ---- */

__device__ inline float combine(float a, float b) { return comm_max(a, b); }
__device__ inline double combine(double a, double b) { return a + b; }

/* A thread has one value, and combines it from rank 0 on. Some thousand values: the time is that of the messages. */
template <class T>
__global__ void __launch_bounds__(BLOCK)
    combine_values(gmem<T> x, gmem<const T> work, int64_t n, T first, int rank, int ranks)
{
    int64_t i = (int64_t)blockIdx.x * BLOCK + threadIdx.x;
    if (i >= n) return;
    T own = x.ld(i), result = first;
    for (int r = 0; r < ranks; r++) result = combine(result, r == rank ? own : work.ld((r < rank ? r : r - 1) * n + i));
    x.st(i, result);
}

template <class T> static Request all_reduce_start(Comm *c, const char *name, T *x, int64_t n, T first, void *work)
{
    size_t bytes = (size_t)n * sizeof *x;
    Collective *k = begin(c, name);
    for (int i = 1; i < c->ranks && n; i++) {
        int to = (c->rank + i) % c->ranks, from = (c->rank + c->ranks - i) % c->ranks;
        send(c, name, x, bytes, to);
        receive(c, name, (char *)work + (size_t)(from < c->rank ? from : from - 1) * bytes, bytes, from);
    }
    launch(c, k);
    if (n)
        combine_values<T><<<(unsigned)ceil_div(n, BLOCK), BLOCK, 0, nccl.stream>>>(
            gmem<T>(x), gmem<const T>((const T *)work), n, first, c->rank, c->ranks);
    cuda_check(cudaGetLastError(), name);
    c->bytes_sent += (size_t)(c->ranks - 1) * bytes;
    return end(k);
}

static Request all_reduce_max_start(Comm *c, float *x, int64_t n, void *work)
{
    return all_reduce_start(c, "all_reduce_max", x, n, -(float)INFINITY, work);
}

static Request all_reduce_sum_start(Comm *c, double *x, int64_t n, void *work)
{
    return all_reduce_start(c, "all_reduce_sum", x, n, -0.0, work);
}

/* ---- set-up ---- */

static void close_nccl(Comm *c)
{
    for (int i = 0; i < RUN_AHEAD; i++)
        if (nccl.collective[i].started) die("comm_close: %s is still in flight", nccl.collective[i].name);
    cuda_check(cudaStreamSynchronize(nccl.stream), "comm_close"); /* the watchdog is still there */
    __atomic_store_n(&nccl.closing, true, __ATOMIC_RELEASE);
    pthread_join(nccl.watchdog, NULL);
    check(c->step, "comm_close", ncclCommFinalize(nccl.comm));
    settle(c, "comm_close");
    check(c->step, "comm_close", ncclCommDestroy(nccl.comm));
    for (int i = 0; i < RUN_AHEAD; i++) {
        cudaEventDestroy(nccl.collective[i].arrived);
        cudaEventDestroy(nccl.collective[i].over);
    }
    cudaEventDestroy(nccl.ready);
    cudaStreamDestroy(nccl.stream);
    cudaFreeHost((void *)nccl.last);
    cudaFree(nccl.numbers);
    die_set_hook(nccl.die_before);
    c->waiting = NULL;
    nccl.close_before(c);
}

static void open_events(void)
{
    int least, greatest;
    uint32_t numbers[RUN_AHEAD];
    for (uint32_t i = 0; i < RUN_AHEAD; i++) numbers[i] = (i + 1) % RUN_AHEAD;
    cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cuda_check(cudaStreamCreateWithPriority(&nccl.stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
    cuda_check(cudaEventCreateWithFlags(&nccl.ready, cudaEventDisableTiming), "cudaEventCreate");
    for (int i = 0; i < RUN_AHEAD; i++) {
        cuda_check(cudaEventCreate(&nccl.collective[i].arrived), "cudaEventCreate");
        cuda_check(cudaEventCreate(&nccl.collective[i].over), "cudaEventCreate");
    }
    cuda_check(cudaMallocHost((void **)&nccl.last, sizeof *nccl.last), "cudaMallocHost");
    *nccl.last = 0;
    cuda_check(cudaMalloc((void **)&nccl.numbers, sizeof numbers), "cudaMalloc");
    cuda_check(cudaMemcpyAsync(nccl.numbers, numbers, sizeof numbers, cudaMemcpyHostToDevice, nccl.stream), "numbers");
    cuda_check(cudaStreamSynchronize(nccl.stream), "numbers");
}

void comm_nccl_open(Comm *c)
{
    ncclUniqueId id;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    nccl = {};
    pthread_mutex_init(&nccl.guard, NULL);
    if (c->rank == 0) {
        ncclResult_t result = ncclGetUniqueId(&id);
        if (result != ncclSuccess) die("ncclGetUniqueId: %s", ncclGetLastError(NULL));
    }
    c->broadcast(c, &id, sizeof id, 0);
    ncclResult_t result = ncclCommInitRankConfig(&nccl.comm, c->ranks, id, c->rank, &config);
    if (result != ncclSuccess && result != ncclInProgress)
        die("ncclCommInitRankConfig: %s: %s", ncclGetErrorString(result), ncclGetLastError(NULL));
    nccl.die_before = die_set_hook(abort_collectives);
    settle(c, "comm_open");
    open_events();
    nccl.close_before = c->close;
    c->close = close_nccl;
    c->waiting = look_at_device;
    c->reduce_scatter_start = reduce_scatter_start;
    c->all_gather_start = all_gather_start;
    c->all_reduce_max_start = all_reduce_max_start;
    c->all_reduce_sum_start = all_reduce_sum_start;
    c->finish = finish;
    if (pthread_create(&nccl.watchdog, NULL, watch, NULL)) die("comm_open: cannot start a thread");
}
