/* Learning-rate schedules: lr of a step, as a pure function.
 *
 *     warm-up: step t = 0 .. warmup-1 has lr * (t + 1) / warmup
 *     then, with x = (t + 1 - warmup) / (steps - warmup) in (0, 1] and f = final_lr_fraction:
 *     cosine    lr * (f + (1 - f) * (1 + cos(pi x)) / 2)                        (Loshchilov, Hutter, 1608.03983)
 *     linear    lr * (f + (1 - f) * (1 - x))
 *     constant  lr
 *     wsd       lr until the last wsd_decay_fraction of all steps, then with y in (0, 1] over those:
 *               lr * (f + (1 - f) * (1 - sqrt(y)))                              (1-sqrt; Haegele et al., 2405.18392)
 *
 * The last step has exactly lr * final_lr_fraction: all but `constant`, and a run that is warm-up to its end. The
 * decay of wsd is at least one step and never reaches into the warm-up. cos is the project's own (mathfn.h), so the
 * value has the same bits on every machine. Floor 3.
 */
#ifndef LLMC_SCHEDULE_H
#define LLMC_SCHEDULE_H

#include "common.h"

C_BEGIN

typedef enum { SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD } LrSchedule;

typedef struct {
    LrSchedule kind;
    double lr, final_lr_fraction, wsd_decay_fraction;
    int64_t steps, warmup_steps;
} Schedule;

/* step >= 0; steps beyond the last have the last one's lr. */
float schedule_lr(const Schedule *schedule, int64_t step);

C_END
#endif
