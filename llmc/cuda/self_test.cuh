/* What is tried before a run: that this machine's libraries and driver compute what they say. Floor 2. */
#ifndef LLMC_CUDA_SELF_TEST_CUH
#define LLMC_CUDA_SELF_TEST_CUH

#include "cuda.cuh"

/* Every kind of matrix product on small random data, alpha other than 1, against loops in double precision; dies with
 * the library's version on a wrong element. Then the quantizers. Less than a tenth of a second. With cuDNN also attention,
 * both ways, against our own kernels: two seconds, in which cuDNN builds its graphs. */
void self_test(const Ops *ops);

/* Every way to quantize against the reference quantizer, bit by bit, and the reciprocals that it divides with. */
void self_test_quantizers(const Ops *ops);

/* Whether values go up as often as they should and independently of their neighbours, by the stochastic rounding that
 * cuda.native_rounding asks for. */
void self_test_rounding(const Ops *ops);

#endif
