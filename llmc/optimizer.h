/* One optimizer step over the parameter table: global gradient norm, clipping, AdamW, fresh weights.
 *
 * AdamW (Loshchilov, Hutter 1711.05101), decoupled weight decay, every matrix decays (embeddings included), vectors
 * never. The norm is summed in FP64 over 16-row pieces in table order, so it does not depend on who owns which rows.
 * When loss or norm is not finite nothing changes: the caller reads the result and stops the run. Floor 3.
 */
#ifndef LLMC_OPTIMIZER_H
#define LLMC_OPTIMIZER_H

#include "zero.h"

C_BEGIN

typedef struct {
    Zero *zero;
    double *piece[2]; /* [pieces] backend memory. Steps take turns where the host may run ahead, so that what a result
                         was made of is there when it is known; else both are one, as of loss */
    int64_t pieces;
    double *loss[2];       /* [micro_batches] backend memory: what gpt_gradients fills through Batch.loss */
    int turn;              /* of the step that comes next */
    int64_t micro_batches; /* of all ranks: j = m R + r */
    void *work;            /* of the sums over ranks */
    StepResult *result;    /* backend memory */
} Optimizer;

void optimizer_create(Optimizer *optimizer, Zero *zero, int64_t micro_batches, Arena *arena);

/* After gpt_gradients: updates masters, m and v, and prepares the weights. `tokens` of the global batch. */
void optimizer_step(Optimizer *optimizer, int64_t tokens);
/* Of the oldest step whose result was not asked for yet; at most ops->result_lag steps may follow before. */
StepResult optimizer_result(const Optimizer *optimizer);

/* For messages about the last step, or the one before it (`before`, where result_lag allows that): the first
 * micro-batch whose loss was not finite, or -1; the gradient of one parameter. */
int64_t optimizer_bad_loss(const Optimizer *optimizer, bool before);
typedef struct {
    double norm;
    bool finite;
} GradientReport;
GradientReport optimizer_gradient(const Optimizer *optimizer, int param, bool before);

C_END
#endif
