/* Text from a model: the prompt in one pass, then token by token with a cache of keys and values. When the context is
 * full, generation goes on from its last half. Floor 4.
 */
#ifndef LLMC_GENERATE_H
#define LLMC_GENERATE_H

#include "model.h"

C_BEGIN

typedef struct {
    int64_t tokens, top_k; /* new tokens; top_k 0: all */
    double temperature;    /* 0: greedy */
    uint64_t seed;
} Sampling;

/* Calls `emit` with every new token. The model was opened with `generate` and is in a phase (gpt_enter_step); its
 * layout is for generation afterwards. prompt [length], length >= 1; of a longer one than the context the end counts. 0
 * or -1 (no finite logit). */
int generate(Model *model, const int32_t *prompt, int64_t length, const Sampling *sampling,
             void (*emit)(void *context, int32_t token), void *context, Error *error);

C_END
#endif
