/* What is tried before a run: that this machine's libraries and driver compute what they say. Floor 2. */
#ifndef LLMC_CUDA_SELF_TEST_CUH
#define LLMC_CUDA_SELF_TEST_CUH

#include "cuda.cuh"

/* Every kind of matrix product on small random data, alpha other than 1, against loops in double precision; dies with
 * the library's version on a wrong element. Less than a tenth of a second. With cuDNN also attention, both ways, against
 * our own kernels: two seconds, in which cuDNN builds its graphs. */
void self_test(const Ops *ops);

#endif
