/* The order of the data: a pure function of (seed, step, file list).
 *
 * The files are seen as one row of windows. A window is T + 1 consecutive tokens of one file: T inputs and, shifted by
 * one, T targets; windows of a file start every T tokens (so the last token of one is the first of the next), and a
 * file's tail shorter than T + 1 is left out. W windows in all. When every file is shorter than T + 1 there is one
 * window per file, wrapped around within that file (small corpora work).
 *
 * The run consumes windows in the order n = 0, 1, 2, ... : epoch e = n / W, place p = n % W. Every epoch visits every
 * window once, in a new order: a keyed permutation of [0, W) (a Feistel network over Philox with cycle walking), so no
 * table of indices exists and any n is found at once. `shuffle` false: plain order (validation).
 *
 *     sequence s of micro-batch j of step t has n = (t * micro_batches + j) * B + s      (global, for all ranks)
 *
 * So rank r of R at micro-step m reads j = m R + r, and any split of the same micro-batches reads the same data.
 *
 * Receipt. The hash of a step is the sum modulo 2^64, over its sequences n, of hash64(the window's T + 1 tokens as
 * int32, seed n). Each rank sums its own; the sum over ranks is the same for every split. Chained with the hash before,
 * it is logged, checkpointed and checked on resume.
 *
 * A thread reads one step ahead (dataloader_next waits for it; the wait is measured). Floor 1.
 */
#ifndef LLMC_DATALOADER_H
#define LLMC_DATALOADER_H

#include "token_file.h"

C_BEGIN

typedef struct DataLoader DataLoader;

typedef struct {
    const char *pattern;   /* as in token_files_open */
    int64_t B, T;          /* sequences of a micro-batch, tokens of a sequence */
    int64_t micro_batches; /* per step, of all ranks */
    int rank, ranks;       /* this rank reads micro-batches j with j % ranks == rank; micro_batches % ranks == 0 */
    uint64_t seed;
    bool shuffle;
    int64_t vocab; /* tokens at or beyond it are an error, found when read: names file and position */
} DataLoaderConfig;

/* Opens and checks every file; the first dataloader_next starts the reading thread, at step `first_step`. NULL with the reason on failure. */
DataLoader *dataloader_open(const DataLoaderConfig *config, int64_t first_step, Error *error);
void dataloader_close(DataLoader *loader); /* NULL is fine */

int64_t dataloader_windows(const DataLoader *loader);   /* W */
int64_t dataloader_tokens(const DataLoader *loader);    /* in all files */
int64_t dataloader_raw_files(const DataLoader *loader); /* files without a header, taken as uint16 */
/* Of names without folder, token counts, first and last tokens: does a resumed run read the same files? */
uint64_t dataloader_file_list_hash(const DataLoader *loader);

typedef struct {               /* one step of this rank; valid until the next call */
    int64_t step, micro_steps; /* micro_steps = micro_batches / ranks */
    const int32_t *tokens;     /* [micro_steps][B][T] */
    const int32_t *targets;    /* [micro_steps][B][T] */
    uint64_t hash;             /* of this step's tokens on this rank (not chained; add those of all ranks) */
    double wait_ms;            /* how long this call waited for the reader */
} StepData;

/* The next step's data. 0, or -1 with the reason (a token out of range); after -1 every call fails the same way. */
int dataloader_next(DataLoader *loader, StepData *data, Error *error);

/* The window that global sequence number n reads: a pure function. Exposed for tests and for `replay` messages. */
int64_t dataloader_window(const DataLoader *loader, int64_t n);
/* Tokens of one window, T + 1 of them. 0 or -1 (out of range). */
int dataloader_read_window(const DataLoader *loader, int64_t window, int32_t *out, Error *error);

C_END
#endif
