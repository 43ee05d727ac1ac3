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
    double *piece; /* [pieces] backend memory */
    int64_t pieces;
    double *loss;          /* [micro_batches] backend memory: what gpt_gradients fills through Batch.loss */
    int64_t micro_batches; /* of all ranks: j = m R + r */
    void *work;            /* of the sums over ranks */
    StepResult *result;    /* backend memory */
} Optimizer;

void optimizer_create(Optimizer *optimizer, Zero *zero, int64_t micro_batches, Arena *arena);

/* After gpt_gradients: updates masters, m and v, and prepares the weights. `tokens` of the global batch. */
void optimizer_step(Optimizer *optimizer, int64_t tokens);
/* Of the oldest step whose result was not asked for yet; at most ops->result_lag steps may follow before. */
StepResult optimizer_result(const Optimizer *optimizer);

int64_t optimizer_bad_loss(const Optimizer *optimizer); /* first micro-batch whose loss was not finite, or -1 */

typedef struct { /* gradient of one parameter, for messages; of the last optimizer_step */
    double norm;
    bool finite;
} GradientReport;
GradientReport optimizer_gradient(const Optimizer *optimizer, int param); /* from the pieces of the last step */

C_END
#endif
