/* `compare RUN_A RUN_B`: does B learn as well as A?
 *
 * Loss is noisy from step to step, but two runs with the same data order see the same batches, so their difference is
 * not: the gap is taken step by step (paired), averaged over blocks of consecutive steps, and the scatter of the block
 * means gives its standard error. Blocks are laid from the last common step backwards; what is left over at the start,
 * where runs are noisiest, is not used.
 *
 *     gap[k]  = mean over block k of (loss_B - loss_A)       nats per token; positive: B is worse
 *     mean    = mean of gap[k]
 *     error   = sqrt(sum (gap[k] - mean)^2 / (n - 1) / n)    n blocks; unknown with one block
 *
 * Floor 4.
 */
#ifndef LLMC_COMPARE_H
#define LLMC_COMPARE_H

#include "common.h"

C_BEGIN

typedef struct {
    int64_t blocks, first; /* first: index of the first value used */
    double mean, error;    /* error is NaN with fewer than two blocks */
} Gap;

/* Of gap [n], n >= 1. Fewer than block_steps values make one shorter block. */
Gap gap_of_blocks(const double *gap, int64_t n, int64_t block_steps);

/* Prints the comparison to stdout: of the last part of the common steps, last_fraction of them (1: all). a, b: a run's folder, or several separated by commas, whose losses are averaged over
 * the steps that all of them have. Bits per byte are printed where every run's config.json has the same
 * "bytes_per_token". Returns 0; EXIT_GAP when max_gap >= 0 and mean > max_gap (a better B is never a failure); -1 with
 * the reason when there is nothing to compare: a log is missing, no common step, a loss that is not finite. */
int compare_runs(const char *a, const char *b, int64_t block_steps, double last_fraction, double max_gap, Error *error);

C_END
#endif
