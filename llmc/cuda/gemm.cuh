/* Matrix products by cuBLASLt, row-major, FP32 accumulation, of FP32, BF16 or NVFP4.
 *
 *     out [M, N] (+)= A B^T,  both summed over K, each stored with k contiguous ([M, K]) or not ([K, M])
 *
 * Row-major is column-major of the transpose, so cuBLASLt computes out^T [N, M] = B A^T; its first matrix is our second.
 * A plan (descriptors and the algorithm) is made once for every shape, layout and alignment and kept. The algorithm is
 * the heuristic's first, or the fastest of several where they were timed. Of those that split K only such are admitted as
 * add the parts in FP32 and in a fixed order, so a plan's results are deterministic.
 *
 * NVFP4 on tensor cores that have it (compute capability 10 and 12): codes and block scales as they are, the two tensor
 * scales in alpha, which a kernel of one thread makes on the device. Elsewhere emulated: code x block scale is exact in
 * BF16, so both operands are expanded and multiplied as BF16 with the same alpha; only the order of sums differs.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_GEMM_CUH
#define LLMC_CUDA_GEMM_CUH

#include "cuda.cuh"

typedef struct {
    const void *data;
    DType dtype; /* of NVFP4: BF16, what codes x block scales are exactly */
    int64_t ld;
    bool k_contiguous;
    const uint8_t
        *scales; /* NVFP4: tiles of block scales; data are codes, ld counts k with its padding, k is contiguous */
    const float *tensor_scale; /* NVFP4: [1] on the device */
    Nvfp4Form form;
} GemmInput;

typedef struct {
    void *data;
    DType dtype;
    int64_t ld;
    const void *bias; /* FP32 [N], or NULL; to a BF16 output it is added in BF16, before the one rounding */
    bool accumulate;  /* FP32 only; the product is rounded to FP32 before it is added, unless cuda.fast_sums */
} GemmOutput;

void gemm_open(bool native_fp4); /* after cuda.stream; dies when cuBLASLt does not work */
size_t gemm_workspace_bytes(const Need *need);
void gemm_workspace_set(void *memory, const Need *need); /* 256-byte aligned */

/* While tuning is on, a product whose plan was not timed yet times CANDIDATES algorithms and takes the fastest. Choices
 * made so are kept as text (JSON) and apply to plans that are made later. 0, or -1: of another library or device. */
void gemm_tuning(bool on);
char *gemm_choices(const char *device);
int gemm_choices_set(const char *text, const char *device, Error *error);

void cuda_gemm(int64_t M, int64_t N, int64_t K, GemmInput a, GemmInput b, GemmOutput out, float alpha);

/* "cuBLASLt 13.1.0": for messages. */
const char *gemm_library(void);

#endif
