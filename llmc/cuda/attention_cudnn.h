/* Attention by cuDNN, where the program was built with it (LLMC_CUDNN; USE_CUDNN=0 leaves it out). On Hopper and
 * Blackwell it uses tensor core instructions that our kernels, one source for all GPUs, do not. Ours stay for every other
 * case, and att and lse mean the same, so that a backward pass by either follows a forward pass by either. Floor 2.
 */
#ifndef LLMC_CUDA_ATTENTION_CUDNN_H
#define LLMC_CUDA_ATTENTION_CUDNN_H

#include "../ops.h"

void attention_cudnn_open(void); /* after cuda.stream; dies when cuDNN does not work */

/* The deterministic backward pass needs memory that cuDNN counts: bytes of it, which are part of a run's workspace. */
size_t attention_cudnn_workspace_bytes(const Need *need);
void attention_cudnn_workspace_set(void *memory, size_t bytes);

/* As the operations of these names; false, and nothing done, when the case is not for cuDNN: FP32, documents, a cache,
 * rows or head sizes that do not fit, or a shape that cuDNN refuses (said once). */
bool attention_cudnn_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a);
bool attention_cudnn_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                              Tensor v, const Attention *a);

/* "cuDNN 9.19.0": for messages. */
const char *attention_cudnn_name(void);

#endif
