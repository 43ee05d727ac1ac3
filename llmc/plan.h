/* What a run will take: memory by purpose, printed by the verb `plan` and in the header of a run. Floor 4. */
#ifndef LLMC_PLAN_H
#define LLMC_PLAN_H

#include "model.h"

C_BEGIN

/* "1.23 GiB", "45.6 MiB" */
void plan_bytes_text(char text[32], double bytes);

/* One line: "memory 2.95 GiB: master weights 237 MiB, ..." */
void plan_print_line(const Model *model);

/* "precision ...": the census in short, before it for precision auto the reason, and after it every kind of product
 * that reads NVFP4. */
void plan_print_precision(const Model *model, bool automatic, const char *reason);

/* The table of `plan`: model, parameters, memory by purpose with shares, FLOPs a token, tokens a step; on several ranks
 * what they send, and what a checkpoint needs beside. */
void plan_print(const Model *model, int64_t global_batch_tokens, bool checkpoint_async);

C_END
#endif
