/* See attention_cudnn.h. cuDNN takes attention as a graph of one operation whose tensors have four dimensions and any
 * strides, so it reads and writes our matrices where they lie, q, k and v as columns of one matrix:
 *
 *     tensor                        [B, heads, T, HD]    strides T ld, HD, ld, 1
 *     lse, which the forward writes [B, NH, T, 1]        strides T ld, 1, ld, 1; natural logarithm, of scaled scores, as ours
 *     lse, which the backward reads [B, NH, T, 1]        dense: before 9.26 it reads no other, so a copy is made in
 *                                                        cuda.attention, which has room for one number a query and head
 *
 * To build a graph takes cuDNN up to a second, so each is kept, found by all that it depends on: a run has few. The
 * deterministic backward needs memory of a size that is known only then; but for sm_100, 2 bytes a query, key and head.
 * It is one buffer for all graphs: of the backend's workspace, for which a run's graph is built when memory is planned;
 * a graph that needs more (the self-test's) gets it beside.
 *
 * The library is the frontend, headers that are C++ with shared pointers and maps; they stay in this file, which takes
 * a minute to compile.
 */
#include "attention_cudnn.h"

#include "attention.cuh"

#define CUDNN_FRONTEND_SKIP_JSON_LIB /* half the time to compile */
#include <cstring>                   /* then missing in the frontend */
#include <cudnn.h>
#include <cudnn_frontend.h>

#include <stdio.h>

#if CUDNN_VERSION < 91200
#error "cuDNN 9.12 or newer is needed (older ones write lse in one order only): install one, or give USE_CUDNN=0"
#endif

namespace fe = cudnn_frontend;
using fe::graph::Tensor_attributes;

namespace
{

enum { Q, K, V, ATT, LSE, DATT, DQ, DK, DV, TENSORS }; /* also their numbers in a graph */

typedef struct {
    bool backward;
    const Attention *a;
    Tensor t[TENSORS]; /* absent: not of this direction */
} Call;

typedef struct {
    int64_t backward, B, T, NH, NKV, HD, ld[TENSORS];
} Key;

struct Plan {
    Key key;
    fe::graph::Graph graph;
    bool refused;
    Plan *next;
};

struct {
    cudnnHandle_t handle;
    Plan *plan; /* owned, newest first */
    void *workspace;
    int64_t workspace_bytes;
    bool own; /* workspace is not the backend's */
    char name[32];
} cudnn;

/* ---- which calls ---- */

bool is_size_for_cudnn(int64_t T, int64_t HD) { return T >= 2 && HD % 8 == 0 && HD <= 128; }

bool is_for_cudnn(const Call &c)
{
    const Attention *a = c.a;
    if (a->first_key || a->position0 || a->Tq != a->Tk || !is_size_for_cudnn(a->Tq, a->HD)) return false;
    for (int i = 0; i < TENSORS; i++)
        if (i != LSE && c.t[i].data && !attention::fits_tiles(c.t[i])) return false;
    return true;
}

Key key_of(const Call &c)
{
    Key key = {c.backward, c.a->B, c.a->Tq, c.a->NH, c.a->NKV, c.a->HD, {}};
    for (int i = 0; i < TENSORS; i++) key.ld[i] = c.t[i].data ? c.t[i].ld : 0;
    return key;
}

/* ---- graphs ---- */

/* Gives `t` the shape, the strides and the number of tensor `which`. */
Tensor_attributes &describe(Tensor_attributes &t, const Key &key, int which)
{
    int64_t ld = key.ld[which], heads = which == K || which == V || which == DK || which == DV ? key.NKV : key.NH;
    t.set_uid(which);
    if (which != LSE)
        t.set_dim({key.B, heads, key.T, key.HD}).set_stride({key.T * ld, key.HD, ld, 1});
    else if (key.backward)
        t.set_dim({key.B, heads, key.T, 1}).set_stride({heads * key.T, key.T, 1, 1});
    else
        t.set_dim({key.B, heads, key.T, 1}).set_stride({key.T * ld, 1, ld, 1});
    return t.set_data_type(which == LSE ? fe::DataType_t::FLOAT : fe::DataType_t::BFLOAT16);
}

fe::error_t build(Plan *plan)
{
    const Key &key = plan->key;
    float scale = 1.0f / sqrtf((float)key.HD);
    auto input = [&](int which) {
        Tensor_attributes t;
        return plan->graph.tensor(describe(t, key, which));
    };
    plan->graph.set_io_data_type(fe::DataType_t::BFLOAT16);
    plan->graph.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    if (key.backward) {
        fe::graph::SDPA_backward_attributes how;
        how.set_name("attention_backward").set_attn_scale(scale).set_deterministic_algorithm(true);
        how.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
        auto out = plan->graph.sdpa_backward(input(Q), input(K), input(V), input(ATT), input(DATT), input(LSE), how);
        for (int i = 0; i < 3; i++) describe(*out[i], key, DQ + i).set_output(true);
    } else {
        fe::graph::SDPA_attributes how;
        how.set_name("attention_forward").set_attn_scale(scale).set_generate_stats(true);
        how.set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT).set_diagonal_band_right_bound(0);
        auto out = plan->graph.sdpa(input(Q), input(K), input(V), how);
        describe(*out[0], key, ATT).set_output(true);
        describe(*out[1], key, LSE).set_output(true);
    }
    return plan->graph.build(cudnn.handle, {fe::HeurMode_t::A});
}

void use_workspace(void *memory, int64_t bytes, bool own)
{
    if (cudnn.own) {
        cuda_check(cudaStreamSynchronize(cuda.stream), "attention"); /* an earlier graph may be reading it */
        cuda_check(cudaFree(cudnn.workspace), "attention");
    }
    cudnn.workspace = memory;
    cudnn.workspace_bytes = bytes;
    cudnn.own = own;
}

void reserve_workspace(int64_t bytes)
{
    void *memory;
    if (bytes <= cudnn.workspace_bytes) return;
    use_workspace(NULL, 0, false);
    if (cudaMalloc(&memory, (size_t)bytes) != cudaSuccess)
        die("out of device memory: attention by %s needs %.2f GiB of its own; make batch or seq_len smaller, or build "
            "with USE_CUDNN=0",
            attention_cudnn_name(), (double)bytes / 0x1p30);
    use_workspace(memory, bytes, true);
}

/* The rest is about each engine that was tried; CUDNN_LOGLEVEL_DBG=2 in the environment makes cuDNN say it, and why. */
std::string first_line(fe::error_t error)
{
    std::string text = error.get_message();
    return text.substr(0, text.find('\n'));
}

Plan *plan_of(const Key &key)
{
    for (Plan *plan = cudnn.plan; plan; plan = plan->next)
        if (!memcmp(&plan->key, &key, sizeof key)) return plan;
    cudnn.plan = new Plan{key, {}, false, cudnn.plan};
    fe::error_t error = build(cudnn.plan);
    cudnn.plan->refused = error.is_bad();
    if (error.is_bad())
        note("attention %s of %ld x %ld tokens, %ld and %ld heads of %ld by our own kernels: %s says: %s",
             key.backward ? "backward" : "forward", (long)key.B, (long)key.T, (long)key.NH, (long)key.NKV, (long)key.HD,
             attention_cudnn_name(), first_line(error).c_str());
    return cudnn.plan;
}

/* ---- the calls ---- */

/* dense [B, NH, T] = lse [B T, NH]: a thread an element, 8 bytes. Writes are in order; the heads that share a sector of
 * lse find it in the L2 cache. */
__global__ void dense_lse_kernel(gmem<float> dense, Matrix<const float> lse, unsigned count, unsigned NH, unsigned T)
{
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x, t = i % T, h = i / T % NH, b = i / T / NH;
    if (i < count) dense.st(i, lse.row((int64_t)b * T + t).ld(h));
}

bool run(const Call &c)
{
    if (!is_for_cudnn(c)) return false;
    Plan *plan = plan_of(key_of(c));
    if (plan->refused) return false;
    reserve_workspace(plan->graph.get_workspace_size());
    std::unordered_map<int64_t, void *> at;
    for (int i = 0; i < TENSORS; i++)
        if (c.t[i].data) at[i] = c.t[i].data;
    if (c.backward) {
        unsigned count = (unsigned)(c.a->B * c.a->NH * c.a->Tq);
        dense_lse_kernel<<<(count + 255) / 256, 256, 0, cuda.stream>>>(cuda.attention, matrix<const float>(c.t[LSE]),
                                                                       count, (unsigned)c.a->NH, (unsigned)c.a->Tq);
        cuda_check(cudaGetLastError(), "attention_backward");
        at[LSE] = cuda.attention.p;
    }
    fe::error_t error = plan->graph.execute(cudnn.handle, at, cudnn.workspace);
    if (error.is_bad())
        die("%s: %s says: %s; build with USE_CUDNN=0", c.backward ? "attention_backward" : "attention_forward",
            attention_cudnn_name(), first_line(error).c_str());
    return true;
}

void check(cudnnStatus_t status, const char *what)
{
    if (status != CUDNN_STATUS_SUCCESS)
        die("%s: %s: %s; install another version, or build with USE_CUDNN=0", attention_cudnn_name(), what,
            cudnnGetErrorString(status));
}

} // namespace

/* The graph of a run's backward pass: q, k, v are columns of one matrix, as their gradients are. */
size_t attention_cudnn_workspace_bytes(const Need *need)
{
    int64_t NH = need->heads, HD = need->head_dim, NKV = NH / need->group, qkv = (NH + 2 * NKV) * HD, att = NH * HD;
    if (!need->attention_backward || !is_size_for_cudnn(need->T, HD) || qkv % 8) return 0;
    const Plan *plan = plan_of(
        Key{true, need->N / need->T, need->T, NH, NKV, HD, {qkv, qkv, qkv, att, NH, att, qkv, qkv, qkv}});
    return plan->refused ? 0 : (size_t)plan->graph.get_workspace_size();
}

void attention_cudnn_workspace_set(void *memory, size_t bytes) { use_workspace(memory, (int64_t)bytes, false); }

bool attention_cudnn_forward(Tensor att, Tensor lse, Tensor q, Tensor k, Tensor v, const Attention *a)
{
    return run(Call{false, a, {q, k, v, att, lse}});
}

bool attention_cudnn_backward(Tensor dq, Tensor dk, Tensor dv, Tensor datt, Tensor att, Tensor lse, Tensor q, Tensor k,
                              Tensor v, const Attention *a)
{
    return run(Call{true, a, {q, k, v, att, lse, datt, dq, dk, dv}});
}

const char *attention_cudnn_name(void)
{
    size_t version = cudnnGetVersion();
    snprintf(cudnn.name, sizeof cudnn.name, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return cudnn.name;
}

void attention_cudnn_open(void)
{
    if (cudnnGetVersion() < 91200)
        die("%s: 9.12 or newer is needed; install one, or build with USE_CUDNN=0", attention_cudnn_name());
    check(cudnnCreate(&cudnn.handle), "cudnnCreate");
    check(cudnnSetStream(cudnn.handle, cuda.stream), "cudnnSetStream");
}
