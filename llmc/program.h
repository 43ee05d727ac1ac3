/* main() of every program of the project: command line, machine, verb. Floor 4. */
#ifndef LLMC_PROGRAM_H
#define LLMC_PROGRAM_H

#include "ops.h"

C_BEGIN

typedef struct { /* what a program brings: cpu/backend.h, or later CUDA */
    int (*open)(const Ops **ops, const char *isa, int64_t threads, Error *error);
    const char *(*isa)(void);
    int (*threads)(void);
} Backend;

int program_main(int argc, char **argv, const Backend *backend); /* returns the exit code */

C_END
#endif
