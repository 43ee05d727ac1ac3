/* main() of every program of the project: command line, machine, verb. Floor 4. */
#ifndef LLMC_PROGRAM_H
#define LLMC_PROGRAM_H

#include "comm.h"
#include "ops.h"

C_BEGIN

typedef struct { /* what a program brings: cpu/backend.h or cuda/backend.h */
    int (*open)(const Ops **ops, const char *isa, int64_t threads, Error *error);
    const char *(*isa)(void);
    int (*threads)(void);
    /* Of a backend with memory of its own, else NULL. Before open: which of the machine's devices it takes; after it, and
     * only on several ranks: collectives on that memory, on a Comm that is open for the host's. */
    void (*device)(int local_rank, int local_ranks);
    void (*comm_open)(Comm *comm);
} Backend;

int program_main(int argc, char **argv, const Backend *backend); /* returns the exit code */

C_END
#endif
