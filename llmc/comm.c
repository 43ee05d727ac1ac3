/* See comm.h: what does not depend on how the ranks talk. */
#include "comm.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- who owns what ---- */

Share bucket_share(const Bucket *b, int piece, int rank, int ranks)
{
    const Piece *p = &b->piece[piece];
    int64_t units = ceil_div((int64_t)p->bytes, (int64_t)p->unit);
    size_t start = (size_t)share_first(units, rank, ranks) * p->unit;
    size_t end = (size_t)share_first(units, rank + 1, ranks) * p->unit;
    if (end > p->bytes) end = p->bytes;
    if (start >= end) return (Share){0};
    return (Share){b->data + (b->own ? p->own : p->offset + start), end - start};
}

size_t bucket_bytes(const Bucket *b)
{
    size_t sum = 0;
    for (int i = 0; i < b->pieces; i++) sum += b->piece[i].bytes;
    return sum;
}

size_t share_bytes(const Bucket *b, int rank, int ranks)
{
    size_t sum = 0;
    for (int i = 0; i < b->pieces; i++) sum += bucket_share(b, i, rank, ranks).bytes;
    return sum;
}

size_t comm_reduce_scatter_work(const Bucket *b, int rank, int ranks)
{
    return (size_t)(ranks - 1) * share_bytes(b, rank, ranks);
}

size_t comm_all_reduce_work(size_t bytes, int ranks) { return (size_t)(ranks - 1) * bytes; }

/* ---- arithmetic ---- */

void comm_add(float *sum, const float *x, size_t n)
{
#pragma omp parallel for simd schedule(static) if (n > 65536)
    for (size_t i = 0; i < n; i++) sum[i] += x[i];
}

/* ---- set-up ---- */

int comm_launched_ranks(void)
{
    static const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        const char *value = getenv(names[i]); /* the first that is set is of the innermost launcher */
        if (value) return (int)max_i64(1, atoi(value));
    }
    return 1;
}

void comm_open(Comm *c)
{
#ifdef LLMC_MPI
    if (comm_launched_ranks() > 1) {
        comm_mpi_open(c);
        return;
    }
#endif
    comm_self_open(c);
}

void comm_close(Comm *c)
{
    c->close(c);
    *c = (Comm){0};
}

uint64_t comm_sum_u64(Comm *c, uint64_t value)
{
    double limb[4]; /* sums of 16 bits are exact */
    for (int i = 0; i < 4; i++) limb[i] = (double)(value >> 16 * i & 0xffff);
    c->sum_host(c, limb, 4);
    value = 0;
    for (int i = 0; i < 4; i++) value += (uint64_t)limb[i] << 16 * i;
    return value;
}

bool comm_any(Comm *c, bool flag) { return comm_sum_u64(c, flag) > 0; }

void comm_await_end(Comm *c, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    warn("%s", text);
    c->barrier(c);
    die("no rank has ended the job; this is a bug");
}

void comm_check_equal(Comm *c, const char *what, uint64_t hash)
{
    uint64_t first = hash;
    c->broadcast(c, &first, sizeof first, 0);
    if (hash != first)
        die("another %s than rank 0 (hash %016llx, there %016llx): all ranks must run the same program with the same "
            "options and files",
            what, (unsigned long long)hash, (unsigned long long)first);
    c->barrier(c);
}
