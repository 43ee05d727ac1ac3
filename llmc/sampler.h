/* From logits to the next token: temperature, top-k, one random number.
 *
 *     weight of token i = exp((logit[i] - max) / temperature) among the top_k largest, 0 elsewhere
 *     token = the first i whose running sum of weights exceeds u * sum, u in [0, 1)
 *
 * Softmax and sums are FP64 in the order of the vocabulary, exp is the project's own (mathfn.h), and u is a pure
 * function of (seed, position): Philox with role ROLE_SAMPLE. The same logits give the same token everywhere.
 *
 * Floor 3.
 */
#ifndef LLMC_SAMPLER_H
#define LLMC_SAMPLER_H

#include "common.h"

C_BEGIN

/* One token of logits [V] (FP32, host). temperature >= 0: 0 is greedy; ties go to the lowest index. top_k 0 (or >= V):
 * all; among equal logits at the edge of the top_k the lower indices are in. scratch [V] FP32 is the caller's. NaN is
 * never picked; -1 when every logit is NaN or -Inf. */
int32_t sampler_pick(const float *logits, int64_t V, double temperature, int64_t top_k, uint64_t seed,
                     uint32_t position, float *scratch);

C_END
#endif
