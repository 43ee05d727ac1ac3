/* The least that the operations of llmc/cuda need around them: state, memory, a table. For cuda_ops.c where there is no
 * llmc/cuda/backend.cu.
 */
#include "cuda/cuda.cuh"

#include <string.h>

CudaState cuda;
static Ops table;

void cuda_check(cudaError_t status, const char *what)
{
    if (status != cudaSuccess) die("%s: %s", what, cudaGetErrorString(status));
}

static void *device_alloc(size_t bytes)
{
    void *memory;
    cuda_check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}
static void device_free(void *memory, size_t) { cuda_check(cudaFree(memory), "cudaFree"); }

static void copy_in(void *device, const void *host, size_t bytes)
{
    cuda_check(cudaStreamSynchronize(cuda.stream), "cudaStreamSynchronize");
    cuda_check(cudaMemcpy(device, host, bytes, cudaMemcpyHostToDevice), "copy_in");
}
static void copy_out(void *host, const void *device, size_t bytes)
{
    cuda_check(cudaStreamSynchronize(cuda.stream), "cudaStreamSynchronize");
    cuda_check(cudaMemcpy(host, device, bytes, cudaMemcpyDeviceToHost), "copy_out");
}

static size_t partial_floats(const Need *need) { return (size_t)(ceil_div(need->N, SUM_ROWS) * 2 * need->cols); }
static size_t workspace_bytes(const Need *need)
{
    return round_up(partial_floats(need) * 4, 256) + round_up((round_up(need->V, 128) + 1 + need->N) * 4, 256) +
           need->N * need->heads * 4;
}
static void workspace_set(void *memory, const Need *need)
{
    cuda.partial = gmem<float>(memory);
    char *sorted = (char *)memory + round_up(partial_floats(need) * 4, 256);
    cuda.sorted = gmem<int32_t>((void *)sorted);
    cuda.attention = gmem<float>((void *)(sorted + round_up((round_up(need->V, 128) + 1 + need->N) * 4, 256)));
}

static void begin_step(const Step *step) { copy_in((void *)&cuda.step.p->step, step, sizeof *step); }

extern "C" int cuda_open(const Ops **ops, Error *)
{
    DeviceStep start = {};
    start.finite = 1;
    if (!cuda.stream) {
        cuda_check(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking), "cudaStreamCreate");
        cuda.step = gmem<const DeviceStep>(device_alloc(sizeof start));
    }
    copy_in((void *)cuda.step.p, &start, sizeof start);
    table.alloc = device_alloc;
    table.free = device_free;
    table.copy_in = copy_in;
    table.copy_out = copy_out;
    table.workspace_bytes = workspace_bytes;
    table.workspace_set = workspace_set;
    table.begin_step = begin_step;
    table.copy = cuda_copy;
    table.zero = cuda_zero;
    table.operand_from_tensor = cuda_operand_from_tensor;
    table.operand_from_norm = cuda_operand_from_norm;
    table.operand_from_activation = cuda_operand_from_activation;
    table.operand_from_gradient = cuda_operand_from_gradient;
    table.operand_from_activation_backward = cuda_operand_from_activation_backward;
    table.embedding_forward = cuda_embedding_forward;
    table.embedding_backward = cuda_embedding_backward;
    table.residual_add = cuda_residual_add;
    table.norm_backward = cuda_norm_backward;
    table.qk_norm_rope_forward = cuda_qk_norm_rope_forward;
    table.qk_norm_rope_backward = cuda_qk_norm_rope_backward;
    table.attention_forward = cuda_attention_forward;
    table.attention_backward = cuda_attention_backward;
    table.softmax_cross_entropy = cuda_softmax_cross_entropy;
    table.loss_sum = cuda_loss_sum;
    table.add = cuda_add;
    table.sum_squares = cuda_sum_squares;
    table.finish_step = cuda_finish_step;
    table.adamw = cuda_adamw;
    *ops = &table;
    return 0;
}
