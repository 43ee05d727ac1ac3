/* The device, memory, the step: operations that are no kernels, and the table of all. Nothing here waits for the device
 * but cuda_copy_out and cuda_result_collect.
 */
#include "backend.h"

#include "attention_cudnn.h"
#include "gemm.cuh"
#include "quantize.cuh"
#include "self_test.cuh"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

CudaState cuda;

enum { RESULTS = 2, /* that may be on their way */ STAGING = 8 << 20 /* bytes: several steps of tokens */ };

static struct {
    Ops ops;
    char device[256], name[400], isa[16];
    int number, sharing; /* of the device; ranks that take one each */
    int threads;
    StepResult *result; /* [RESULTS] pinned host memory */
    cudaEvent_t result_there[RESULTS];
    unsigned posted, collected; /* counts since the backend was opened */
    /* What is copied to the device goes through pinned memory, so that the host need not wait: two halves by turns, each
     * with the event after which its copies have been read. */
    char *staging[2];
    cudaEvent_t staging_read[2];
    int half;
    size_t staged; /* bytes of the half in use */
} backend;

void cuda_check(cudaError_t status, const char *what)
{
    if (status != cudaSuccess)
        die("%s: CUDA says: %s (%s)", what, cudaGetErrorString(status), cudaGetErrorName(status));
}

/* Compute capability times 10: 90, 100 ... */
static int capability(void)
{
    int major = 0, minor = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, backend.number);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, backend.number);
    return 10 * major + minor;
}

static bool has_native_rounding(void)
{
#ifdef CUDA_ON_CPU /* where cvt.rs is not played */
    return false;
#else
    return capability() == 100 || capability() == 103;
#endif
}

static bool has_fp4(void) { return capability() / 10 == 10 || capability() / 10 == 12; } /* tensor cores for NVFP4 */

/* ---- memory ---- */

static void *cuda_alloc(size_t bytes)
{
    void *memory = NULL;
    size_t free_bytes = 0, all_bytes = 0;
    if (cudaMalloc(&memory, bytes) != cudaSuccess) {
        cudaMemGetInfo(&free_bytes, &all_bytes);
        die("out of device memory: %.2f GiB asked, %.2f of %.2f GiB free; make batch or seq_len smaller, or "
            "--recompute "
            "block, or give more ranks with a higher --zero_stage",
            (double)bytes / 0x1p30, (double)free_bytes / 0x1p30, (double)all_bytes / 0x1p30);
    }
    cuda_check(cudaMemsetAsync(memory, 0, bytes, cuda.stream), "alloc");
    return memory;
}

static void cuda_free(void *memory, size_t bytes)
{
    (void)bytes;
    cuda_check(cudaStreamSynchronize(cuda.stream), "free");
    cuda_check(cudaFree(memory), "free");
}

/* Room for `bytes`; waits where the copies of the half that comes next have not all been made yet. */
static char *stage(size_t bytes)
{
    if (backend.staged + bytes > STAGING) {
        cuda_check(cudaEventRecord(backend.staging_read[backend.half], cuda.stream), "copy_in");
        backend.half = 1 - backend.half;
        backend.staged = 0;
        cuda_check(cudaEventSynchronize(backend.staging_read[backend.half]), "copy_in");
    }
    char *at = backend.staging[backend.half] + backend.staged;
    backend.staged += (bytes + 63) / 64 * 64;
    return at;
}

static void cuda_copy_in(void *dst, const void *host, size_t bytes)
{
    for (size_t done = 0; done < bytes; done += STAGING) {
        size_t piece = (size_t)min_i64((int64_t)(bytes - done), STAGING);
        char *staged = stage(piece);
        memcpy(staged, (const char *)host + done, piece);
        cuda_check(cudaMemcpyAsync((char *)dst + done, staged, piece, cudaMemcpyHostToDevice, cuda.stream), "copy_in");
    }
}

static void cuda_copy_out(void *host, const void *src, size_t bytes)
{
    cuda_check(cudaMemcpyAsync(host, src, bytes, cudaMemcpyDeviceToHost, cuda.stream), "copy_out");
    cuda_check(cudaStreamSynchronize(cuda.stream), "copy_out");
}

/* ---- workspace: | cuBLASLt, added products | partial sums | sort | attention's sums | quantizing | cuDNN | ---- */

static size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

static size_t take(char **memory, size_t bytes, void **place)
{
    if (memory && place) *place = *memory;
    if (memory) *memory += aligned(bytes);
    return aligned(bytes);
}

/* Lays it out in `memory`, or with NULL counts. */
static size_t lay_out(char *memory, const Need *need)
{
    char *at = memory, **to = memory ? &at : NULL;
    void *gemm, *partial, *sorted, *attention, *quantize;
    size_t bytes = take(to, gemm_workspace_bytes(need), &gemm);
    bytes += take(to, (size_t)(ceil_div(need->N, SUM_ROWS) * 2 * need->cols) * sizeof(float), &partial);
    bytes += take(to, (size_t)(round_up(need->V, 128) + 1 + need->N) * sizeof(int32_t), &sorted);
    bytes += take(to, (size_t)(need->N * need->heads) * sizeof(float), &attention);
    bytes += take(to, quantize_workspace_bytes(need), &quantize);
#ifdef LLMC_CUDNN
    size_t cudnn_bytes = attention_cudnn_workspace_bytes(need);
    void *cudnn;
    bytes += take(to, cudnn_bytes, &cudnn);
    if (memory) attention_cudnn_workspace_set(cudnn, cudnn_bytes);
#endif
    if (!memory) return bytes;
    gemm_workspace_set(gemm, need);
    quantize_workspace_set(quantize);
    cuda.partial = gmem<float>(partial);
    cuda.sorted = gmem<int32_t>(sorted);
    cuda.attention = gmem<float>(attention);
    return bytes;
}

static size_t cuda_workspace_bytes(const Need *need) { return lay_out(NULL, need); }

static char *step_field(size_t offset) { return (char *)cuda.step.p + offset; }

static void cuda_workspace_set(void *memory, const Need *need)
{
    int32_t finite = 1;
    cuda.fast_sums = need->fast_sums;
    cuda.native_rounding = need->native_rounding;
    if (need->native_rounding) {
        if (!has_native_rounding())
            die_usage(
                "native_rounding: only sm_100 (B200) and sm_103 (B300) have the instruction, and no CPU plays it");
        self_test_rounding(&backend.ops);
    }
    lay_out((char *)memory, need);
    cuda_copy_in(step_field(offsetof(DeviceStep, finite)), &finite, sizeof finite);
}

static size_t cuda_view_bytes(const ViewFormat *format, unsigned view, int64_t rows, int64_t cols)
{
    if (format->format == FORMAT_NONE) return 0;
    if (format->format == FORMAT_NVFP4) return nvfp4_view_bytes(format, view, rows, cols);
    return (size_t)(rows * cols) * dtype_bytes(format->format == FORMAT_FP32 ? DTYPE_FP32 : DTYPE_BF16);
}

static void cuda_view_place(View *v, unsigned view, int64_t rows, int64_t cols, void *memory)
{
    v->data = memory;
    if (v->format.format != FORMAT_NVFP4 || !memory) return;
    v->tensor_scale = (float *)((char *)memory + nvfp4_before_tensor_scale(&v->format, view, rows, cols));
}

/* ---- the step ---- */

static void cuda_begin_step(const Step *step)
{
    cuda.seed = step->seed;
    cuda_copy_in(step_field(offsetof(DeviceStep, step)), step, sizeof *step);
}

static void cuda_begin_micro_step(int64_t row0)
{
    cuda_copy_in(step_field(offsetof(DeviceStep, row0)), &row0, sizeof row0);
}

static void cuda_result_post(const StepResult *result)
{
    unsigned slot = backend.posted++ % RESULTS;
    cuda_check(cudaMemcpyAsync(&backend.result[slot], result, sizeof *result, cudaMemcpyDeviceToHost, cuda.stream),
               "result_post");
    cuda_check(cudaEventRecord(backend.result_there[slot], cuda.stream), "result_post");
}

static void cuda_result_collect(StepResult *host)
{
    unsigned slot = backend.collected++ % RESULTS;
    cuda_check(cudaEventSynchronize(backend.result_there[slot]), "result_collect");
    *host = backend.result[slot];
}

static void cuda_product_counts(ProductCounts *counts) { *counts = cuda.counts; }

static char *cuda_choices(void) { return gemm_choices(backend.device); }
static int cuda_choices_set(const char *text, Error *error) { return gemm_choices_set(text, backend.device, error); }

static void cuda_measure(QuantStats *stats) { cuda.measure = stats; }

/* ---- the peak, from the data sheets: multiply-adds per SM and clock, FP32 accumulation ---- */

static double cuda_peak_flops(DType dtype)
{
    static const struct {
        int capability;
        double bf16, fp32;
    } SHEET[] = {{80, 1024, 64},   {86, 256, 128},   {89, 256, 128}, {90, 2048, 128},
                 {100, 4096, 128}, {103, 4096, 128}, {120, 256, 128}};
    int kilohertz = 0, processors = 0, best = 0;
    cudaDeviceGetAttribute(&kilohertz, cudaDevAttrClockRate, backend.number);
    cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, backend.number);
    for (int i = 0; i < (int)(sizeof SHEET / sizeof *SHEET); i++)
        if (SHEET[i].capability <= capability()) best = i;
    return 2 * (dtype == DTYPE_BF16 ? SHEET[best].bf16 : SHEET[best].fp32) * processors * kilohertz * 1e3;
}

/* ---- opening ---- */

void cuda_device(int local_rank, int local_ranks)
{
    backend.number = local_rank;
    backend.sharing = local_ranks;
}

static void open_device(void)
{
    int count = 0;
    cudaError_t status = cudaGetDeviceCount(&count);
    if (status != cudaSuccess || count == 0)
        die("no GPU: %s; train_gpt trains on the CPU", cudaGetErrorString(status ? status : cudaErrorNoDevice));
    if (backend.sharing > count)
        die("%d ranks on this machine, but %d GPUs here: start at most one a GPU, and let every rank see all of the "
            "machine's GPUs (CUDA_VISIBLE_DEVICES)",
            backend.sharing, count);
    cudaDeviceProp properties;
    cuda_check(cudaSetDevice(backend.number), "cudaSetDevice");
    cuda_check(cudaGetDeviceProperties(&properties, backend.number), "cudaGetDeviceProperties");
    if (properties.major < 8)
        die("%s has compute capability %d.%d; at least 8.0 (A100) is needed", properties.name, properties.major,
            properties.minor);
    snprintf(backend.isa, sizeof backend.isa, "sm_%d%d", properties.major, properties.minor);
    snprintf(backend.device, sizeof backend.device, "%s", properties.name);
#ifdef LLMC_CUDNN
    const char *attention = attention_cudnn_name();
#else
    const char *attention = "our own kernels";
#endif
    snprintf(backend.name, sizeof backend.name, "%s (%s), %s, NVFP4 %s, attention by %s", properties.name, backend.isa,
             gemm_library(), has_fp4() ? "native" : "emulated", attention);
}

int cuda_open(const Ops **ops, const char *isa, int64_t threads, Error *error)
{
    if (strcmp(isa, "auto")) return error_set(error, "isa %s: is of train_gpt; this program runs on a GPU", isa);
    open_device();
    cuda_check(cudaStreamCreateWithFlags(&cuda.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    cuda_check(cudaMallocHost((void **)&backend.result, RESULTS * sizeof *backend.result), "cudaMallocHost");
    for (int i = 0; i < RESULTS; i++)
        cuda_check(cudaEventCreateWithFlags(&backend.result_there[i], cudaEventDisableTiming), "cudaEventCreate");
    for (int i = 0; i < 2; i++) {
        cuda_check(cudaMallocHost((void **)&backend.staging[i], STAGING), "cudaMallocHost");
        cuda_check(cudaEventCreateWithFlags(&backend.staging_read[i], cudaEventDisableTiming), "cudaEventCreate");
    }
    backend.threads = 1;
#ifdef _OPENMP
    if (threads > 0) omp_set_num_threads((int)threads);
    backend.threads = omp_get_max_threads();
#endif
    void *step;
    cuda_check(cudaMalloc(&step, sizeof(DeviceStep)), "cudaMalloc");
    cuda.step = gmem<const DeviceStep>(step);
    bool native_fp4 = has_fp4();
    gemm_open(native_fp4);
    quantize_open();
#ifdef LLMC_CUDNN
    attention_cudnn_open();
#endif

    Ops *o = &backend.ops;
    *o = Ops();
    o->name = backend.name;
    o->native_fp4 = native_fp4;
    o->result_lag = 1;
    o->alloc = cuda_alloc;
    o->free = cuda_free;
    o->workspace_bytes = cuda_workspace_bytes;
    o->workspace_set = cuda_workspace_set;
    o->copy_in = cuda_copy_in;
    o->copy_out = cuda_copy_out;
    o->copy = cuda_copy;
    o->zero = cuda_zero;
    o->peak_flops = cuda_peak_flops;
    o->begin_step = cuda_begin_step;
    o->begin_micro_step = cuda_begin_micro_step;
    o->result_post = cuda_result_post;
    o->result_collect = cuda_result_collect;
    o->product_counts = cuda_product_counts;
    o->measure = cuda_measure;
    o->tune = cuda_tune;
    o->choices = cuda_choices;
    o->choices_set = cuda_choices_set;
    o->view_bytes = cuda_view_bytes;
    o->view_place = cuda_view_place;
    o->operand_from_tensor = cuda_operand_from_tensor;
    o->operand_from_norm = cuda_operand_from_norm;
    o->operand_from_activation = cuda_operand_from_activation;
    o->operand_from_gradient = cuda_operand_from_gradient;
    o->operand_from_activation_backward = cuda_operand_from_activation_backward;
    o->linear_forward = cuda_linear_forward;
    o->linear_backward_input = cuda_linear_backward_input;
    o->linear_backward_weight = cuda_linear_backward_weight;
    o->weight_prepare = cuda_weight_prepare;
    o->weight_amax = cuda_weight_amax;
    o->weight_pack = cuda_weight_pack;
    o->gather_bytes = cuda_gather_bytes;
    o->weight_pieces = cuda_weight_pieces;
    o->weight_unpack = cuda_weight_unpack;
    o->embedding_forward = cuda_embedding_forward;
    o->embedding_backward = cuda_embedding_backward;
    o->residual_add = cuda_residual_add;
    o->norm_backward = cuda_norm_backward;
    o->qk_norm_rope_forward = cuda_qk_norm_rope_forward;
    o->qk_norm_rope_backward = cuda_qk_norm_rope_backward;
    o->attention_forward = cuda_attention_forward;
    o->attention_backward = cuda_attention_backward;
    o->softmax_cross_entropy = cuda_softmax_cross_entropy;
    o->loss_sum = cuda_loss_sum;
    o->add = cuda_add;
    o->sum_squares = cuda_sum_squares;
    o->finish_step = cuda_finish_step;
    o->adamw = cuda_adamw;
    self_test(o);
    *ops = o;
    return 0;
}

const char *cuda_isa(void) { return backend.isa; }
int cuda_threads(void) { return backend.threads; }
