/* The CUDA backend's door. Floor 2. */
#ifndef LLMC_CUDA_BACKEND_H
#define LLMC_CUDA_BACKEND_H

#include "../ops.h"

C_BEGIN

/* Before cuda_open, on several ranks: of the devices that the process sees it takes number local_rank. Else 0. */
void cuda_device(int local_rank, int local_ranks);

/* isa must be "auto"; threads: of the host's loops, 0 all. Runs the self-test (self_test.cu). Dies where there is no GPU
 * that can be used, or the self-test fails. 0 and *ops, or -1: the arguments. */
int cuda_open(const Ops **ops, const char *isa, int64_t threads, Error *error);

const char *cuda_isa(void); /* of the open backend: "sm_90" */
int cuda_threads(void);
/* Of a weight in 16 x 16 blocks, from complete codes by rows and block scales, which are what ranks gather
 * (weight_pieces): the other parts of its memory. */
void cuda_weight_unpack(Linear *w);

C_END
#endif
