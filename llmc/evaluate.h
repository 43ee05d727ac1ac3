/* Validation: mean loss over the windows of a token file, in file order, and bits per byte where bytes are known (the
 * byte tokenizer: every token but end-of-text is one byte). Floor 4.
 */
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include "dataloader.h"
#include "model.h"

C_BEGIN

typedef struct {
    double loss;          /* nats per token */
    double bits_per_byte; /* NaN where bytes are not known */
    int64_t tokens;
} Evaluation;

/* The first batches x B windows, or all of them (batches 0 or more than there are). The last micro-batch is filled up
 * with windows whose losses do not count (in NVFP4 with amax scales they do enter the tensors' amax, as all sequences of
 * a micro-batch do: so a loss depends a little on B and on its neighbours). 0, or -1 with the reason (a token out of range). */
int evaluate(Model *model, const DataLoader *data, int64_t batches, Evaluation *result, Error *error);

C_END
#endif
