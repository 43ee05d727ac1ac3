/* Matrix products by cuBLASLt: plain formats, row-major, FP32 accumulation.
 *
 *     out [M, N] (+)= A B^T,  both summed over K, each stored with k contiguous ([M, K]) or not ([K, M])
 *
 * Row-major is column-major of the transpose, so cuBLASLt computes out^T [N, M] = B A^T; its first matrix is our second.
 * A plan (descriptors and the algorithm) is made once for every shape, layout and alignment and kept. The algorithm is
 * the heuristic's first, or the fastest of several where they were timed. Of those that split K only such are admitted as
 * add the parts in FP32 and in a fixed order, so a plan's results are deterministic.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_GEMM_CUH
#define LLMC_CUDA_GEMM_CUH

#include "cuda.cuh"

typedef struct {
    const void *data;
    DType dtype;
    int64_t ld;
    bool k_contiguous;
} GemmInput;

typedef struct {
    void *data;
    DType dtype;
    int64_t ld;
    const void *bias; /* FP32 [N], or NULL; to a BF16 output it is added in BF16, before the one rounding */
    bool accumulate;  /* FP32 only; the product is rounded to FP32 before it is added, unless cuda.fast_sums */
} GemmOutput;

void gemm_open(void); /* after cuda.stream; dies when cuBLASLt does not work */
void gemm_close(void);
size_t gemm_workspace_bytes(void);
void gemm_workspace_set(void *memory); /* 256-byte aligned */

/* While tuning is on, a product whose plan was not timed yet times CANDIDATES algorithms and takes the fastest. Choices
 * made so are kept as text (JSON) and apply to plans that are made later. 0, or -1: of another library or device. */
void gemm_tuning(bool on);
char *gemm_choices(const char *device);
int gemm_choices_set(const char *text, const char *device, Error *error);

void cuda_gemm(int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b, GemmOutput out, float alpha);

/* "cuBLASLt 13.1.0": for messages. */
const char *gemm_library(void);

#endif
