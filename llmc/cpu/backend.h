/* The CPU backend's door: which instruction set, how many threads, the table of operations. Floor 2. */
#ifndef LLMC_CPU_BACKEND_H
#define LLMC_CPU_BACKEND_H

#include "ops.h"

C_BEGIN

/* isa: "auto" (the best this machine has), "portable", "avx2", "avx512", "amx"; threads 0: all cores that this process
 * may use. Once per process, or again after a change of mind in tests. 0 and *ops, or -1 with the reason: an
 * instruction set that this machine or this build does not have names those that it has. */
int cpu_open(const Ops **ops, const char *isa, int64_t threads, Error *error);

const char *cpu_isa(void); /* of the open backend */
int cpu_threads(void);

C_END
#endif
