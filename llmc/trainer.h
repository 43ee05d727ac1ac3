/* A training run from options to the last step: opens and checks everything, lays out memory, starts or resumes, loops.
 *
 * Order at the start: data files, run folder (a folder that holds a run is refused unless --resume or --overwrite),
 * model and memory, checkpoint; only then the header is printed. A step: data, gradients, optimizer, then, when due,
 * validation, sample, state_hash, one line on the console and one in RUN/log.jsonl, checkpoint. "Step" counts steps
 * done: the first line is step 1.
 *
 * SIGINT or SIGTERM: the step is finished, a checkpoint is written, exit code 0; a second signal ends at once. A loss
 * or gradient norm that is not finite ends the run with weights and moments as they were before that step. Floor 4.
 */
#ifndef LLMC_TRAINER_H
#define LLMC_TRAINER_H

#include "comm.h"
#include "options.h"

C_BEGIN

typedef struct { /* what the program knows of its machine */
    const Ops *ops;
    const char *isa; /* "amx" ... */
    int threads;
    Comm *comm; /* train only */
} Machine;

/* Dies on errors; returns when the run is complete or was interrupted and saved. */
void trainer_run(const Options *options, const Machine *machine);

C_END
#endif
