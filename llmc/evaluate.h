/* Validation: mean loss over the windows of a token file, in file order, and bits per byte where bytes are known (the
 * byte tokenizer: every token but end-of-text is one byte). And multiple choice, HellaSwag: which of the continuations of
 * a text the model holds the likeliest. Floor 4.
 */
#ifndef LLMC_EVALUATE_H
#define LLMC_EVALUATE_H

#include "dataloader.h"
#include "hellaswag.h"
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

typedef struct {
    int64_t examples; /* that were judged */
    int64_t skipped;  /* longer than the model's context */
    int64_t
        by_mean; /* right by the smallest mean loss over the completion's tokens: acc_norm, the number llm.c prints */
    int64_t by_sum; /* right by the smallest sum: acc */
} ChoiceEvaluation;

/* All questions of the file. A sequence of a batch holds one context and completion, from its first token, and whatever
 * fills it up stands behind and cannot be seen from it (but for NVFP4's amax, as above). Of equal losses the first
 * completion's counts. 0, or -1 with the reason: an id beyond the vocabulary, or not one question that fits. */
int evaluate_choices(Model *model, const HellaSwag *questions, ChoiceEvaluation *result, Error *error);

C_END
#endif
