/* See comm.h: ranks that are processes of one MPI job.
 *
 * Every collective is an exchange: each rank posts a receive from and a send to every other rank, all at once, and
 * combines what has arrived on its own. That gives the order of additions, uneven shares, a wait that knows which rank
 * it waits for, and R - 1 R-ths of a bucket on the wire, which is the least possible. Messages of one exchange carry
 * its number as tag; those of one pair of ranks match in the order in which both post them.
 *
 *     start    posts; messages that fit the network's eager size are on their way
 *     finish   tests, adds what has come, sleeps a little, until all is done
 *
 * What overlaps. MPI moves large messages while it is called, so between start and finish a network adapter goes on by
 * itself with what it was given, and any other call of this file (each start, finish) moves all that are in flight; a
 * thread of its own would take a core from the products. Additions happen in the exchange's own finish.
 *
 * Failure. MPI's errors are returned, not fatal; nothing waits inside MPI but its initialisation and end.
 */
#include "comm.h"

#include <limits.h>
#include <math.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef enum { COMBINE_NONE, COMBINE_SHARES, COMBINE_MAX, COMBINE_SUM } Combine;

typedef struct {      /* one collective in flight */
    const char *name; /* NULL: free */
    int tag, messages, left, capacity;
    MPI_Request *request; /* [capacity], as the next three; kept for the exchanges to come */
    int *peer;            /* a receive from it; a send to p is ~p */
    int *done;            /* what MPI_Testsome found, and how that ended */
    MPI_Status *status;
    int *receiving; /* [ranks] messages still to come from each; -1: its contribution is added */

    Combine combine;
    ReduceOrder order;
    Bucket sum, contribution;
    void *x;
    int64_t n;
    char *work; /* what came from each other rank, in rank order */
    size_t work_each;
} Exchange;

static struct {
    MPI_Comm world;
    Exchange exchange[COMM_IN_FLIGHT];
    unsigned count;                           /* of exchanges so far */
    char prefix[MPI_MAX_PROCESSOR_NAME + 32]; /* "rank 3 on node7: " */
} mpi;

/* ---- failure ---- */

LLMC_NORETURN static void fail(const Comm *c, int code, const char *what, int peer)
{
    char text[MPI_MAX_ERROR_STRING + 1] = "", with[32] = "";
    int length;
    MPI_Error_string(code, text, &length);
    if (peer >= 0) snprintf(with, sizeof with, " with rank %d", peer);
    die("step %lld, %s%s: MPI says: %s", (long long)c->step, what, with, text);
}

static void check(const Comm *c, int code, const char *what)
{
    if (code != MPI_SUCCESS) fail(c, code, what, -1);
}

/* die()'s last act: the whole job ends. Where MPI does not let other threads call it, a launcher ends the job of one
 * that exits so. */
static void end_job(int code)
{
    int is_main = 0, level = MPI_THREAD_FUNNELED;
    MPI_Is_thread_main(&is_main);
    MPI_Query_thread(&level);
    if (is_main || level == MPI_THREAD_MULTIPLE) MPI_Abort(mpi.world, code);
    _exit(code);
}

/* Whom an exchange still waits for: "1, 3". */
static const char *waiting_for(const Comm *c, const Exchange *e)
{
    static char text[64];
    size_t length = 0;
    text[0] = 0;
    for (int peer = 0; peer < c->ranks && length < sizeof text; peer++) {
        bool waits = false;
        for (int i = 0; i < e->messages; i++)
            waits |= e->request[i] != MPI_REQUEST_NULL && (e->peer[i] == peer || e->peer[i] == ~peer);
        if (waits) length += (size_t)snprintf(text + length, sizeof text - length, length ? ", %d" : "%d", peer);
    }
    return text;
}

/* ---- exchanges ---- */

static Exchange *exchange_new(Comm *c, const char *name)
{
    Exchange *e = mpi.exchange;
    while (e < mpi.exchange + COMM_IN_FLIGHT && e->name) e++;
    if (e == mpi.exchange + COMM_IN_FLIGHT) die("%s: %d collectives in flight already", name, COMM_IN_FLIGHT);
    if (!e->receiving) e->receiving = xmalloc((size_t)c->ranks * sizeof *e->receiving);
    memset(e->receiving, 0, (size_t)c->ranks * sizeof *e->receiving);
    e->name = name;
    e->tag = (int)(mpi.count++ % 32768); /* MPI allows at least 32767 */
    e->messages = e->left = 0;
    e->combine = COMBINE_NONE;
    e->n = 0;
    return e;
}

static void post(Comm *c, Exchange *e, bool receive, int peer, void *data, size_t bytes)
{
    size_t done = 0;
    do { /* also one of no bytes */
        int i = e->messages++, count = (int)comm_message_bytes(bytes - done);
        if (e->messages > e->capacity) {
            e->capacity = 2 * e->messages + 16;
            e->request = xrealloc(e->request, (size_t)e->capacity * sizeof *e->request);
            e->peer = xrealloc(e->peer, (size_t)e->capacity * sizeof *e->peer);
            e->done = xrealloc(e->done, (size_t)e->capacity * sizeof *e->done);
            e->status = xrealloc(e->status, (size_t)e->capacity * sizeof *e->status);
        }
        char *place = data ? (char *)data + done : NULL;
        check(c,
              receive ? MPI_Irecv(place, count, MPI_BYTE, peer, e->tag, mpi.world, &e->request[i])
                      : MPI_Isend(place, count, MPI_BYTE, peer, e->tag, mpi.world, &e->request[i]),
              e->name);
        e->peer[i] = receive ? peer : ~peer;
        e->left++;
        if (receive)
            e->receiving[peer]++;
        else
            c->bytes_sent += (size_t)count;
        done += (size_t)count;
    } while (done < bytes);
}

static void post_shares(Comm *c, Exchange *e, bool receive, int peer, const Bucket *b, int owner)
{
    for (int i = 0; i < b->pieces; i++) {
        Share s = bucket_share(b, i, owner, c->ranks);
        if (s.bytes) post(c, e, receive, peer, s.data, s.bytes);
    }
}

/* What came from another rank: an own buffer without gaps, or n values. */
static char *work_of(const Comm *c, const Exchange *e, int peer)
{
    return e->work + (size_t)(peer < c->rank ? peer : peer - 1) * e->work_each;
}

static void add_shares(const Comm *c, const Exchange *e, int peer)
{
    const char *arrived = peer == c->rank ? NULL : work_of(c, e, peer);
    if (!arrived && e->sum.data == e->contribution.data) return;
    for (int i = 0; i < e->sum.pieces; i++) {
        Share to = bucket_share(&e->sum, i, c->rank, c->ranks);
        const char *from = arrived ? arrived : bucket_share(&e->contribution, i, c->rank, c->ranks).data;
        comm_add((float *)to.data, (const float *)from, to.bytes / sizeof(float));
        if (arrived) arrived += to.bytes;
    }
}

/* Adds the contributions whose turn it is: once each. */
static void combine_shares(const Comm *c, Exchange *e)
{
    for (int peer = 0; peer < c->ranks; peer++) {
        if (e->receiving[peer] > 0 && e->order == REDUCE_ORDERED) return;
        if (e->receiving[peer] == 0) {
            add_shares(c, e, peer);
            e->receiving[peer] = -1;
        }
    }
}

/* In rank order on every rank, once all is there: x is sent until then. */
static void combine_values(const Comm *c, const Exchange *e)
{
    for (int64_t i = 0; i < e->n; i++) {
        float max = -INFINITY;
        double sum = -0.0;
        for (int peer = 0; peer < c->ranks; peer++) {
            const void *x = peer == c->rank ? e->x : work_of(c, e, peer);
            if (e->combine == COMBINE_MAX) max = comm_max(max, ((const float *)x)[i]);
            if (e->combine == COMBINE_SUM) sum += ((const double *)x)[i];
        }
        if (e->combine == COMBINE_MAX) ((float *)e->x)[i] = max;
        if (e->combine == COMBINE_SUM) ((double *)e->x)[i] = sum;
    }
}

/* Takes note of what is done and combines it; whether anything was. */
static bool advance(const Comm *c, Exchange *e)
{
    int count = 0, code = MPI_SUCCESS;
    if (e->left) code = MPI_Testsome(e->messages, e->request, &count, e->done, e->status);
    if (count == MPI_UNDEFINED) count = 0;
    for (int i = 0; i < count; i++) {
        int peer = e->peer[e->done[i]];
        if (code == MPI_ERR_IN_STATUS && e->status[i].MPI_ERROR != MPI_SUCCESS)
            fail(c, e->status[i].MPI_ERROR, e->name, peer >= 0 ? peer : ~peer);
        if (peer >= 0) e->receiving[peer]--;
    }
    check(c, code, e->name);
    e->left -= count;
    if (e->combine == COMBINE_SHARES) combine_shares(c, e);
    return count > 0;
}

static void wait_for(Comm *c, Exchange *e)
{
    double last = now_seconds(), still = 0; /* seconds since something came */
    bool told = false;
    for (;;) {
        bool some = advance(c, e);
        if (e->left == 0) return;
        if (c->waiting) c->waiting(c);
        double now = now_seconds();
        still = some ? 0 : still + fmin(now - last, 0.1); /* while this process was stopped itself, nobody hung */
        last = now;
        if (c->hang_timeout_s > 0 && still > c->hang_timeout_s)
            die("step %lld, %s: no answer from rank %s for %g s (hang_timeout_s); see whether that process is still "
                "there",
                (long long)c->step, e->name, waiting_for(c, e), c->hang_timeout_s);
        if (!told && still > 0.1 && c->stopping && c->stopping()) { /* a launcher kills a second or so later */
            warn("step %lld, %s: told to stop while waiting for rank %s", (long long)c->step, e->name,
                 waiting_for(c, e));
            told = true;
        }
        if (still > 50e-6) /* an eighth of the wait so far, from 20 us to 1 ms */
            nanosleep(&(struct timespec){.tv_nsec = (long)(1e9 * fmin(fmax(still / 8, 20e-6), 1e-3))}, NULL);
    }
}

static Request started(const Comm *c, Exchange *e)
{
    advance(c, e);
    return (Request)(e - mpi.exchange) + 1;
}

/* ---- the interface ---- */

static Request reduce_scatter_start(Comm *c, Bucket sum, Bucket contribution, ReduceOrder order, void *work)
{
    if (order == REDUCE_ORDERED && sum.data == contribution.data)
        die("reduce_scatter: sum and contribution are one buffer in ordered mode");
    Exchange *e = exchange_new(c, "reduce_scatter");
    e->combine = COMBINE_SHARES;
    e->order = order;
    e->sum = sum;
    e->contribution = contribution;
    e->work = work;
    e->work_each = share_bytes(&contribution, c->rank, c->ranks);
    for (int i = 1; i < c->ranks; i++) {
        int from = (c->rank + c->ranks - i) % c->ranks;
        char *place = work_of(c, e, from);
        for (int p = 0; p < contribution.pieces; p++) {
            size_t bytes = bucket_share(&contribution, p, c->rank, c->ranks).bytes;
            if (bytes) post(c, e, true, from, place, bytes);
            place += bytes;
        }
    }
    for (int i = 1; i < c->ranks; i++) {
        int to = (c->rank + i) % c->ranks;
        post_shares(c, e, false, to, &contribution, to);
    }
    return started(c, e);
}

static Request all_gather_start(Comm *c, Bucket whole, Bucket own)
{
    Exchange *e = exchange_new(c, "all_gather");
    for (int i = 1; i < c->ranks; i++) {
        int from = (c->rank + c->ranks - i) % c->ranks;
        post_shares(c, e, true, from, &whole, from);
    }
    for (int i = 1; i < c->ranks; i++) post_shares(c, e, false, (c->rank + i) % c->ranks, &own, c->rank);
    for (int p = 0; p < whole.pieces && whole.data != own.data; p++) {
        Share to = bucket_share(&whole, p, c->rank, c->ranks), from = bucket_share(&own, p, c->rank, c->ranks);
        if (to.bytes) memcpy(to.data, from.data, to.bytes);
    }
    return started(c, e);
}

static Request all_reduce_start(Comm *c, const char *name, Combine combine, void *x, int64_t n, size_t size, void *work)
{
    Exchange *e = exchange_new(c, name);
    e->combine = combine;
    e->x = x;
    e->n = n;
    e->work = work;
    e->work_each = (size_t)n * size;
    for (int i = 1; i < c->ranks; i++) {
        int from = (c->rank + c->ranks - i) % c->ranks;
        post(c, e, true, from, work_of(c, e, from), e->work_each);
    }
    for (int i = 1; i < c->ranks; i++) post(c, e, false, (c->rank + i) % c->ranks, x, e->work_each);
    return started(c, e);
}

static Request all_reduce_max_start(Comm *c, float *x, int64_t n, void *work)
{
    return all_reduce_start(c, "all_reduce_max", COMBINE_MAX, x, n, sizeof *x, work);
}

static Request all_reduce_sum_start(Comm *c, double *x, int64_t n, void *work)
{
    return all_reduce_start(c, "all_reduce_sum", COMBINE_SUM, x, n, sizeof *x, work);
}

static void finish(Comm *c, Request request)
{
    if (request == 0) return;
    Exchange *e = &mpi.exchange[request - 1];
    if (request < 0 || request > COMM_IN_FLIGHT || !e->name) die("finish: request %d is not in flight", request);
    double start = now_seconds();
    wait_for(c, e);
    c->waited_s += now_seconds() - start;
    combine_values(c, e);
    e->name = NULL;
}

static void sum_host(Comm *c, double *x, int64_t n)
{
    void *work = xmalloc(comm_all_reduce_work((size_t)n * sizeof *x, c->ranks));
    finish(c, all_reduce_sum_start(c, x, n, work));
    free(work);
}

static void broadcast(Comm *c, void *data, size_t bytes, int root)
{
    Exchange *e = exchange_new(c, "broadcast");
    for (int peer = 0; peer < c->ranks; peer++)
        if (peer != c->rank && (c->rank == root || peer == root)) post(c, e, c->rank != root, peer, data, bytes);
    finish(c, started(c, e));
}

static void barrier(Comm *c) { finish(c, all_reduce_start(c, "barrier", COMBINE_NONE, NULL, 0, 0, NULL)); }

static void close_world(Comm *c)
{
    barrier(c);
    for (int i = 0; i < COMM_IN_FLIGHT; i++)
        if (mpi.exchange[i].name) die("comm_close: %s is still in flight", mpi.exchange[i].name);
    MPI_Comm_free(&mpi.world);
    MPI_Finalize();
    die_set_hook(NULL);
    die_set_prefix(NULL);
}

static void find_local_rank(Comm *c)
{
    MPI_Comm machine;
    check(c, MPI_Comm_split_type(mpi.world, MPI_COMM_TYPE_SHARED, c->rank, MPI_INFO_NULL, &machine),
          "MPI_Comm_split_type");
    check(c, MPI_Comm_rank(machine, &c->local_rank), "MPI_Comm_rank");
    check(c, MPI_Comm_size(machine, &c->local_ranks), "MPI_Comm_size");
    MPI_Comm_free(&machine);
}

void comm_mpi_open(Comm *c)
{
    int level, length = 0;
    char host[MPI_MAX_PROCESSOR_NAME + 1] = "";
    *c = (Comm){.ranks = 1,
                .hang_timeout_s = 600,
                .reduce_scatter_start = reduce_scatter_start,
                .all_gather_start = all_gather_start,
                .all_reduce_max_start = all_reduce_max_start,
                .all_reduce_sum_start = all_reduce_sum_start,
                .finish = finish,
                .sum_host = sum_host,
                .broadcast = broadcast,
                .barrier = barrier,
                .close = close_world};
    check(c, MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    check(c, MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(c, MPI_Comm_dup(MPI_COMM_WORLD, &mpi.world), "MPI_Comm_dup");
    check(c, MPI_Comm_set_errhandler(mpi.world, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
    check(c, MPI_Comm_rank(mpi.world, &c->rank), "MPI_Comm_rank");
    check(c, MPI_Comm_size(mpi.world, &c->ranks), "MPI_Comm_size");
    check(c, MPI_Get_processor_name(host, &length), "MPI_Get_processor_name");
    snprintf(mpi.prefix, sizeof mpi.prefix, "rank %d on %s: ", c->rank, host);
    die_set_prefix(mpi.prefix);
    die_set_hook(end_job);
    if (level < MPI_THREAD_FUNNELED) die("this MPI cannot be used by a program that has threads");
    if (c->ranks == 1 && comm_launched_ranks() > 1) /* another maker's launcher: every rank is alone */
        die("one of %d ranks, but alone in its MPI: use the mpirun of the MPI that this was built with",
            comm_launched_ranks());
    find_local_rank(c);
}
