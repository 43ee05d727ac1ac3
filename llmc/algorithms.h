/* Algorithms that a backend chose by timing (--tune_gemm), kept in RUN/algorithms.json so that a resume has the same bits.
 * Floor 4. */
#ifndef LLMC_ALGORITHMS_H
#define LLMC_ALGORITHMS_H

#include "model.h"

C_BEGIN

/* Called by all ranks, who then use the same: on a resume those of the run's folder, where there are any; else, with
 * `tune`, what rank 0 times now and writes there; else the backend's own first choice. Those of another library or device
 * are left with a note. Dies when the file cannot be read or written. */
void algorithms_choose(Model *model, const char *run_dir, bool resumed, bool tune);

/* A run that begins anew has none yet. */
void algorithms_forget(const char *run_dir);

C_END
#endif
