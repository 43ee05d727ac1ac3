/* The CPU backend's door: which instruction set, how many threads, the table of operations. Floor 2. */
#ifndef LLMC_CPU_BACKEND_H
#define LLMC_CPU_BACKEND_H

#include "ops.h"

C_BEGIN

/* isa: "auto" (the best this machine has), "portable", "avx2", "avx512", "amx"; threads 0: all cores that this process
 * may use. Once per process, or again after a change of mind in tests. 0 and *ops, or -1 with the reason: an
 * instruction set that this machine or this build does not have names those that it has. */
int cpu_open(const Ops **ops, const char *isa, int64_t threads, Error *error);

/* First thing in main: makes OpenMP's threads sleep soon when they wait, by starting the program again with the setting in
 * its environment (OpenMP reads it before main). Without it a thread that spins takes the core from the one it waits for
 * whenever another program wants a share: 30 steps of the demo beside three busy loops on 2 cores took over 40 s, with it
 * 15 s, and alone the same as before. Does nothing when the user has set OMP_WAIT_POLICY, GOMP_SPINCOUNT or KMP_BLOCKTIME. */
void cpu_share_cores(char **argv);

const char *cpu_isa(void); /* of the open backend */
int cpu_threads(void);

C_END
#endif
