/* Ranks that talk: the second interface, a struct of functions with one body for each way to talk: comm_self.c (one
 * rank), comm_mpi.c (MPI), comm_nccl.cu (NCCL between GPUs, beside MPI between their hosts).
 *
 * Memory. What the operations (ops.h) compute on is in the backend's memory, and so are the buffers of collectives that
 * start and finish. Functions that say so take memory of the host, whatever the backend. Nothing guesses from a pointer.
 *
 * A bucket is one contiguous buffer that holds all parameters (or gradients) of one block; a piece is the part of one
 * parameter. Each piece is cut on its own at whole units of 16 rows, the last of which may be shorter: rank r of R owns
 * units [units * r / R, units * (r + 1) / R). So any R works, also with fewer units than ranks; a vector is one unit,
 * which the last rank owns.
 *
 *     whole   | qkv: r0 r1 r2 | o: r0 r1 r2 | up: r0 r1 r2 | down: r0 r1 r2 | gain: r2 | bias: r2 |
 *     own of rank 1            | qkv: r1 | o: r1 | up: r1 | down: r1 |
 *
 * Start and finish. A collective is called by all ranks, in the same order of starts; it sees all that the ops were
 * given before, and its result is there after finish, in whatever order the finishes come. Between the two its memory
 * is neither written (what is sent) nor read (what is received). Up to COMM_IN_FLIGHT may be in flight.
 *
 * No call allocates memory that grows with a bucket: what a collective receives into, beside its result, is `work`, the
 * caller's, of the size below. Payload that a rank sends, counted in bytes_sent (whole, own: see bucket_bytes,
 * share_bytes), which `plan` relies on:
 *
 *     reduce_scatter       whole - own       each other rank gets its share of the contribution
 *     all_gather           (R - 1) own       each other rank gets the own share
 *     all_reduce_max/sum   (R - 1) bytes     n floats or doubles to each other rank; sum_host too
 *     broadcast            (R - 1) bytes     from the root only
 *     barrier              0
 *
 * Failure. A wrong call is a bug and dies. A peer that is gone, or that moves nothing for hang_timeout_s while this
 * rank waits for it, is an error: die() with rank, host, step and operation, and the whole job ends with exit code 1.
 * hang_timeout_s must exceed what ranks may lag behind one another: a checkpoint, a validation, data that comes late.
 *
 * Floor 2.
 */
#ifndef LLMC_COMM_H
#define LLMC_COMM_H

#include "common.h"
#include "numerics.h"

C_BEGIN

/* ---- buckets ---- */

typedef struct {
    size_t offset; /* bytes from the start of a whole buffer; of floats: a multiple of 4, as the next three */
    size_t own;    /* bytes from the start of a buffer that holds only this rank's shares */
    size_t unit;   /* bytes of 16 rows */
    size_t bytes;  /* of the piece; the last unit is shorter where this is no multiple of `unit` */
} Piece;

typedef struct {
    char *data;
    bool own; /* data holds only this rank's shares, at Piece.own; else everything, at Piece.offset */
    int pieces;
    const Piece *piece; /* [pieces] the caller's */
} Bucket;

typedef struct { /* what one rank owns of one piece; bytes 0: nothing */
    char *data;
    size_t bytes;
} Share;

/* First unit of rank's share of `units` units; the share ends where the next rank's begins. */
static inline int64_t share_first(int64_t units, int rank, int ranks) { return units * rank / ranks; }

Share bucket_share(const Bucket *b, int piece, int rank, int ranks); /* of an own buffer: only this rank's */
size_t bucket_bytes(const Bucket *b);                                /* of all pieces, whole, without gaps */
size_t share_bytes(const Bucket *b, int rank, int ranks);            /* of one rank's shares of all pieces */

/* Bytes of `work`, aligned to 8, for the collectives that need it; 0 on one rank. */
size_t comm_reduce_scatter_work(const Bucket *b, int rank, int ranks); /* (R - 1) own */
size_t comm_all_reduce_work(size_t bytes, int ranks);                  /* (R - 1) bytes, of all n values */

/* ---- collectives ---- */

typedef enum {
    REDUCE_ORDERED, /* rank 0's contribution is added first, then rank 1's, ...: j = m R + r over micro-batches */
    REDUCE_FAST     /* each as it arrives: not the same bits from run to run */
} ReduceOrder;

enum { COMM_IN_FLIGHT = 64 };

typedef int Request; /* one started collective; 0: none, which finish takes too */

typedef struct Comm Comm;
struct Comm {
    int rank, ranks;
    int local_rank, local_ranks; /* among those of this machine */
    int64_t step;                /* the caller's, for messages: the step that is running */
    double hang_timeout_s;       /* the caller's; 600 after comm_open, 0: waits for ever */
    bool (*stopping)(void);   /* the caller's, or NULL: whether SIGTERM has come. Then a wait says what it waits for */
    void (*waiting)(Comm *c); /* a body's own, or NULL: called again and again while the host waits for a rank */
    size_t bytes_sent;        /* payload that this rank has sent so far, see above */
    double waited_s; /* seconds that this rank has waited in finish: who waits least is what the others wait for */

    /* Own shares of `sum` += own shares of every rank's `contribution`, one IEEE FP32 addition per element and rank.
     * Both are floats and have the same pieces; contribution is whole. In fast order both may be one whole buffer: its
     * own shares become the total, the rest stays. */
    Request (*reduce_scatter_start)(Comm *c, Bucket sum, Bucket contribution, ReduceOrder order, void *work);
    /* Own shares of `own` -> all shares of `whole` on all ranks; bytes of any type. Both may be one whole buffer. */
    Request (*all_gather_start)(Comm *c, Bucket whole, Bucket own);
    /* x[i] = largest x[i] of all ranks; NaN (0x7fc00000) where a rank has NaN; +0 is larger than -0. */
    Request (*all_reduce_max_start)(Comm *c, float *x, int64_t n, void *work);
    /* x[i] = rank 0's x[i] + rank 1's + ...: exact where all but one are zeros (but -0 + 0 = +0). */
    Request (*all_reduce_sum_start)(Comm *c, double *x, int64_t n, void *work);
    void (*finish)(Comm *c, Request request);

    /* Host memory; these return when this rank is done. */
    void (*sum_host)(Comm *c, double *x, int64_t n); /* as all_reduce_sum */
    void (*broadcast)(Comm *c, void *data, size_t bytes, int root);
    void (*barrier)(Comm *c);
    void (*close)(Comm *c);
};

/* ---- set-up: from the main thread, which is also the only one to call the functions above ---- */

/* Ranks of this job as its launcher (mpirun, mpiexec, srun) tells in the environment; 1 without one. */
int comm_launched_ranks(void);
/* MPI when the launcher started several ranks, else one rank. Dies where that needs MPI and the build has none. From
 * here to comm_close, die() names rank and host and ends all ranks. */
void comm_open(Comm *c);
void comm_close(Comm *c); /* waits for all ranks */
void comm_self_open(Comm *c);
Comm *comm_alone(void);      /* one rank, whatever the launcher says: what works by itself; needs no close */
void comm_mpi_open(Comm *c); /* only in a build with MPI */
void comm_nccl_open(
    Comm *c); /* only in a build with NCCL: on an open MPI one, after the backend; device memory from now on */

/* Over all ranks: the sum modulo 2^64; whether any has the flag set. Blocking. */
uint64_t comm_sum_u64(Comm *c, uint64_t value);
bool comm_any(Comm *c, bool flag);

/* For a rank that finds the run at its end for a reason that another rank tells, ending the job: says what it knows, as
 * "rank 3 on node7: ...", and waits for that. */
LLMC_NORETURN void comm_await_end(Comm *c, const char *format, ...) LLMC_PRINTF(2, 3);

/* Dies on every rank whose hash is not rank 0's: "rank 3 on node7: another <what> than rank 0 ...". */
void comm_check_equal(Comm *c, const char *what, uint64_t hash);

/* The next message of `left` bytes that are left: counts of MPI are int, and a wait sees progress by whole messages. */
static inline size_t comm_message_bytes(size_t left) { return left < ((size_t)1 << 26) ? left : (size_t)1 << 26; }

/* What the bodies share: sum[i] += x[i]; one more value into a maximum. */
void comm_add(float *sum, const float *x, size_t n);
LLMC_INLINE float comm_max(float a, float b)
{
    uint32_t x = f32_bits(a), y = f32_bits(b);
    if ((x & 0x7fffffff) > 0x7f800000 || (y & 0x7fffffff) > 0x7f800000) return f32_from_bits(0x7fc00000);
    if (a == b) return x >> 31 ? b : a;
    return a > b ? a : b;
}

C_END
#endif
