/* Where the time of a run goes, operation by operation: train's option `profile`.
 *
 * profile_open returns a table of operations (ops.h) that takes the time of each call and passes it on, so neither the
 * model nor the backend knows; without the option nothing of this runs. Each call's work follows from its arguments:
 * of products and attention the floating-point operations (causal; documents are not subtracted), of the rest the bytes
 * that it must at least read and write. The clock runs from the first step's begin_step to the end of the last
 * operation; the first step also touches the memory for the first time, so take ten or more. Where the host runs ahead
 * of the device (result_lag), it waits after every operation: the times are then those of a run that overlaps nothing.
 * Floor 2.
 */
#ifndef LLMC_PROFILE_H
#define LLMC_PROFILE_H

#include "ops.h"

C_BEGIN

/* The table to give to the model instead of `ops`, one per process. Measures what the rates are compared with, in under
 * a second: the backend's peak_flops, and its copy between two buffers of 64 MiB. */
const Ops *profile_open(const Ops *ops);
/* To stdout, the slowest first: operation (products with the format of their operands), calls, milliseconds a step,
 * share of the time, rate, share of the peak; then their sum and the rest: data, log, collectives, files. */
void profile_print(void);

C_END
#endif
