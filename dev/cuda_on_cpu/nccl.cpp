/* A double of NCCL: the functions of nccl.h for processes that MPI started, one rank each, their devices this machine's
 * memory.
 *
 * It checks what the library leaves to the reader of its documentation: that buffers are device memory and overlap only in
 * the documented in-place manner, that all ranks call the same operation on the same number of elements, that nothing is
 * called on a communicator that is still joining, is finalized or has failed. An error found while a stream runs is given
 * by ncclCommGetAsyncError and printed. A communicator with blocking = 0 is ncclInProgress until the second poll, and after
 * every call that issues work until the next: a caller that does not poll is found out.
 *
 * Operations of all communicators run in the order in which they were issued, which must be the same on all ranks.
 */
#include "internal.h"
#include "nccl_comm.h"

#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

using namespace cuda_on_cpu::nccl;

struct ncclComm { /* the handle: gone with ncclCommDestroy or ncclCommAbort, which another thread may call */
    std::shared_ptr<Comm> state;
};
struct ncclWindow_vidmem {
    void *buffer;
};

static thread_local std::string last_text;

__attribute__((format(printf, 2, 3))) static ncclResult_t refuse(ncclResult_t result, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    last_text = text;
    const char *verbose = getenv("CUDA_ON_CPU_VERBOSE");
    if (verbose && strcmp(verbose, "1") == 0) fprintf(stderr, "NCCL: result %d: %s\n", (int)result, text);
    return result;
}

/* ---- groups: operations wait for the outermost ncclGroupEnd ---- */

struct Issued {
    std::shared_ptr<Comm> comm;
    cudaStream_t stream;
    Operation operation;
};
static thread_local int group_depth;
static thread_local ncclResult_t group_result; /* the first refusal inside of it */
static thread_local std::vector<Issued> group;

/* All operations of a process run in the order in which they were issued, whatever their streams: one thread plays all
 * streams, so an operation that waits for another rank holds up the rest. The library does the same when asked to
 * (NCCL_LAUNCH_ORDER_IMPLICIT). */
static void keep_order(cudaStream_t stream, bool before)
{
    static std::mutex guard;
    static cudaEvent_t last;
    static cudaStream_t last_stream;
    std::lock_guard<std::mutex> lock(guard);
    if (before) {
        if (last && stream != last_stream) cudaStreamWaitEvent(stream, last, 0);
        return;
    }
    if (!last) cudaEventCreateWithFlags(&last, cudaEventDisableTiming);
    cudaEventRecord(last, stream);
    last_stream = stream;
}

static void submit(const std::shared_ptr<Comm> &c, cudaStream_t stream, const std::vector<Operation> &operations)
{
    c->pending++;
    keep_order(stream, true);
    cuda_on_cpu::enqueue(stream, [c, operations] { run(c, operations); });
    keep_order(stream, false);
}

static bool is_message(const Operation &o) { return o.kind == SEND || o.kind == RECV; }

/* A message of a rank to itself needs both its ends in one group. */
static ncclResult_t check_messages(const Comm &c, const std::vector<Operation> &messages)
{
    int open = 0;
    for (const Operation &m : messages)
        if (m.root == c.rank) open += m.kind == SEND ? 1 : -1;
    if (open) return refuse(ncclInvalidUsage, "rank %d sends to itself without receiving, or receives without", c.rank);
    return ncclSuccess;
}

/* Of one communicator: its collectives one after the other, then all its sends and receives at once. */
static ncclResult_t submit_group_of(const std::shared_ptr<Comm> &comm)
{
    std::vector<Operation> messages;
    cudaStream_t stream = nullptr;
    bool any = false;
    for (const Issued &i : group) {
        if (i.comm != comm) continue;
        if (any && i.stream != stream) return refuse(ncclInvalidUsage, "two streams for one communicator in a group");
        stream = i.stream;
        any = true;
        if (is_message(i.operation)) messages.push_back(i.operation);
    }
    ncclResult_t result = check_messages(*comm, messages);
    if (result != ncclSuccess) return result;
    for (const Issued &i : group)
        if (i.comm == comm && !is_message(i.operation)) submit(comm, stream, {i.operation});
    if (!messages.empty()) submit(comm, stream, messages);
    if (comm->blocking) return ncclSuccess;
    comm->in_progress = true;
    return ncclInProgress;
}

static ncclResult_t end_group()
{
    ncclResult_t result = group_result;
    std::vector<const Comm *> seen;
    for (size_t i = 0; i < group.size() && (result == ncclSuccess || result == ncclInProgress); i++) {
        bool before = false;
        for (const Comm *c : seen) before = before || c == group[i].comm.get();
        if (before) continue;
        seen.push_back(group[i].comm.get());
        ncclResult_t one = submit_group_of(group[i].comm);
        if (one != ncclSuccess) result = one;
    }
    group.clear();
    group_result = ncclSuccess;
    return result;
}

/* ---- arguments ---- */

static ncclResult_t check_comm(ncclComm_t comm)
{
    if (!comm || !comm->state) return refuse(ncclInvalidArgument, "the communicator is NULL");
    Comm *c = comm->state.get();
    if (!c->joined) return refuse(ncclInvalidUsage, "the communicator is still joining: poll ncclCommGetAsyncError");
    if (c->finalized) return refuse(ncclInvalidUsage, "the communicator is finalized");
    if (c->in_progress) return refuse(ncclInvalidUsage, "the last call is in progress: poll ncclCommGetAsyncError");
    std::lock_guard<std::mutex> lock(c->guard);
    return c->error == ncclSuccess ? ncclSuccess : refuse(c->error, "%s", c->text.c_str());
}

static ncclResult_t check_buffer(const char *name, const Operation &o, const void *buffer, size_t bytes)
{
    if (!bytes) return ncclSuccess;
    if (bytes > INT_MAX) return refuse(ncclInvalidArgument, "%zu bytes: the double moves less than 2 GiB", bytes);
    if (!buffer) return refuse(ncclInvalidArgument, "%s: the %s buffer is NULL", name_of(o.kind), name);
    if (!cuda_on_cpu::is_device_address(buffer))
        return refuse(ncclInvalidArgument, "%s: the %s buffer %p is not device memory", name_of(o.kind), name, buffer);
    if ((uintptr_t)buffer % bytes_of(o.type))
        return refuse(ncclInvalidArgument, "%s: the %s buffer is not aligned to its type", name_of(o.kind), name);
    cuda_on_cpu::device_memory(buffer, bytes, name_of(o.kind));
    return ncclSuccess;
}

/* In place: where the rank's part lies in the longer buffer, and nowhere else. */
static ncclResult_t check_overlap(const Comm &c, const Operation &o, size_t send_bytes, size_t recv_bytes)
{
    const char *send = (const char *)o.send, *recv = (const char *)o.recv;
    if (!send_bytes || !recv_bytes || send >= recv + recv_bytes || recv >= send + send_bytes) return ncclSuccess;
    size_t part = o.count * bytes_of(o.type) * (size_t)c.rank;
    if (o.kind == REDUCE_SCATTER) send += part;
    if (o.kind == ALL_GATHER) recv += part;
    if (send == recv) return ncclSuccess;
    return refuse(ncclInvalidArgument, "%s: the buffers overlap and are not in place", name_of(o.kind));
}

static ncclResult_t check(const Comm &c, const Operation &o)
{
    size_t size = bytes_of(o.type);
    bool reduction = o.kind == ALL_REDUCE || o.kind == REDUCE || o.kind == REDUCE_SCATTER;
    if (!size) return refuse(ncclInvalidArgument, "data type %d", (int)o.type);
    if (o.op < 0 || o.op >= ncclNumOps) return refuse(ncclInvalidArgument, "operation %d", (int)o.op);
    if (o.root < 0 || o.root >= c.ranks) return refuse(ncclInvalidArgument, "rank %d of %d", o.root, c.ranks);
    if (reduction && !reduces(o.type))
        return refuse(ncclInvalidArgument, "the double does not add type %d", (int)o.type);
    if (o.count > SIZE_MAX / 16 / (size_t)c.ranks) return refuse(ncclInvalidArgument, "%zu elements", o.count);
    size_t send = send_count(c, o) * size, recv = recv_count(c, o) * size;
    ncclResult_t result = check_buffer("send", o, o.send, send);
    if (result == ncclSuccess) result = check_buffer("receive", o, o.recv, recv);
    if (result == ncclSuccess && !is_message(o)) result = check_overlap(c, o, send, recv);
    return result;
}

static ncclResult_t issue(ncclComm_t comm, cudaStream_t stream, Operation o)
{
    ncclResult_t result = check_comm(comm);
    if (result == ncclSuccess) result = check(*comm->state, o);
    if (result != ncclSuccess) {
        if (group_depth && group_result == ncclSuccess) group_result = result;
        return result;
    }
    if (!is_message(o)) o.number = comm->state->issued++;
    group.push_back({comm->state, stream, o});
    return group_depth ? ncclSuccess : end_group();
}

/* ---- communicators ---- */

static ncclResult_t start(ncclComm_t *comm, int ranks, const ncclUniqueId &id, int rank, bool blocking)
{
    IdContent content;
    memcpy(&content, &id, sizeof content);
    if (!comm) return refuse(ncclInvalidArgument, "no place for the communicator");
    *comm = nullptr;
    if (ranks < 1 || rank < 0 || rank >= ranks) return refuse(ncclInvalidArgument, "rank %d of %d", rank, ranks);
    if (content.magic != ID_MAGIC) return refuse(ncclInvalidArgument, "not an id of ncclGetUniqueId");
    std::unique_ptr<ncclComm> made(new ncclComm);
    made->state = std::make_shared<Comm>();
    Comm &c = *made->state;
    c.rank = rank, c.ranks = ranks, c.id = id, c.blocking = blocking;
    if (cudaGetDevice(&c.device) != cudaSuccess) return refuse(ncclUnhandledCudaError, "no device is set");
    if (!blocking) {
        *comm = made.release();
        return ncclInProgress;
    }
    ncclResult_t result = join(&c);
    if (result != ncclSuccess) return refuse(result, "%s", c.text.c_str());
    *comm = made.release();
    return ncclSuccess;
}

/* Until the streams have run all that was issued, since there is nothing else to wait for. */
static void finish(Comm *c)
{
    if (c->pending) cudaDeviceSynchronize();
    c->finalized = true;
}

static void free_comm(ncclComm_t comm)
{
    int over = 0;
    Comm &c = *comm->state;
    MPI_Finalized(&over);
    if (c.mpi != MPI_COMM_NULL && !over && !c.pending) MPI_Comm_free(&c.mpi);
    delete comm;
}

extern "C" {

ncclResult_t ncclGetVersion(int *version)
{
    if (!version) return refuse(ncclInvalidArgument, "no place for the version");
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id)
{
    static std::atomic<int> made{0};
    if (!id) return refuse(ncclInvalidArgument, "no place for the id");
    IdContent content = {ID_MAGIC, 0, made++};
    int initialized = 0;
    MPI_Initialized(&initialized);
    if (initialized) MPI_Comm_rank(MPI_COMM_WORLD, &content.creator);
    memset(id, 0, sizeof *id);
    memcpy(id, &content, sizeof content);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank)
{
    return start(comm, ranks, id, rank, true);
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank, ncclConfig_t *config)
{
    ncclConfig_t standard = NCCL_CONFIG_INITIALIZER;
    if (config && (config->magic != standard.magic || config->size != standard.size))
        return refuse(ncclInvalidArgument, "the configuration did not begin as NCCL_CONFIG_INITIALIZER");
    int blocking = config ? config->blocking : NCCL_CONFIG_UNDEF_INT;
    if (blocking != NCCL_CONFIG_UNDEF_INT && blocking != 0 && blocking != 1)
        return refuse(ncclInvalidArgument, "blocking is %d", blocking);
    return start(comm, ranks, id, rank, blocking != 0);
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error)
{
    if (!comm || !error) return refuse(ncclInvalidArgument, "a pointer is NULL");
    Comm &c = *comm->state;
    *error = ncclInProgress;
    if (!c.joined && c.polls++ == 0) return ncclSuccess;
    if (!c.joined) join(&c);
    c.in_progress = false;
    std::lock_guard<std::mutex> lock(c.guard);
    *error = c.error;
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm)
{
    ncclResult_t result = check_comm(comm);
    if (result != ncclSuccess) return result;
    finish(comm->state.get());
    comm->state->in_progress = !comm->state->blocking;
    return comm->state->in_progress ? ncclInProgress : ncclSuccess;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    finish(comm->state.get());
    free_comm(comm);
    return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm)
{
    if (!comm) return ncclSuccess;
    tell_aborted(comm->state.get());
    delete comm; /* what is in flight keeps the rest alive */
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count)
{
    if (!comm || !count) return refuse(ncclInvalidArgument, "a pointer is NULL");
    *count = comm->state->ranks;
    return ncclSuccess;
}

ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device)
{
    if (!comm || !device) return refuse(ncclInvalidArgument, "a pointer is NULL");
    *device = comm->state->device;
    return ncclSuccess;
}

ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank)
{
    if (!comm || !rank) return refuse(ncclInvalidArgument, "a pointer is NULL");
    *rank = comm->state->rank;
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result)
{
    static const char *const texts[ncclNumResults] = {
        "no error",         "a call of CUDA failed", "a call of the system failed", "the library failed",
        "invalid argument", "invalid usage",         "another rank failed",         "in progress"};
    return result >= 0 && result < ncclNumResults ? texts[result] : "unknown result";
}

const char *ncclGetLastError(ncclComm_t comm)
{
    if (!comm) return last_text.c_str();
    std::lock_guard<std::mutex> lock(comm->state->guard);
    return comm->state->text.empty() ? last_text.c_str() : comm->state->text.c_str();
}

/* ---- memory ---- */

ncclResult_t ncclMemAlloc(void **p, size_t bytes)
{
    if (!p) return refuse(ncclInvalidArgument, "no place for the address");
    return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : refuse(ncclUnhandledCudaError, "%zu bytes", bytes);
}

ncclResult_t ncclMemFree(void *p) { return cudaFree(p) == cudaSuccess ? ncclSuccess : ncclUnhandledCudaError; }

static ncclResult_t check_registered(ncclComm_t comm, void *buffer, size_t bytes, const void *out)
{
    ncclResult_t result = check_comm(comm);
    if (result != ncclSuccess) return result;
    if (!out || !buffer || !cuda_on_cpu::is_device_address(buffer))
        return refuse(ncclInvalidArgument, "%p is not device memory", buffer);
    cuda_on_cpu::device_memory(buffer, bytes, "registration");
    return ncclSuccess;
}

ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buffer, size_t bytes, void **handle)
{
    ncclResult_t result = check_registered(comm, buffer, bytes, handle);
    if (result == ncclSuccess) *handle = buffer;
    return result;
}

ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle)
{
    return handle ? check_comm(comm) : refuse(ncclInvalidArgument, "the handle is NULL");
}

ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buffer, size_t bytes, ncclWindow_t *window, int)
{
    ncclResult_t result = check_registered(comm, buffer, bytes, window);
    if (result == ncclSuccess) *window = new ncclWindow_vidmem{buffer};
    return result;
}

ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window)
{
    delete window;
    return check_comm(comm);
}

/* ---- operations ---- */

ncclResult_t ncclGroupStart()
{
    group_depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd()
{
    if (!group_depth) return refuse(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --group_depth ? ncclSuccess : end_group();
}

ncclResult_t ncclAllReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream)
{
    return issue(comm, stream, {ALL_REDUCE, send, recv, count, type, op, 0, 0});
}

ncclResult_t ncclReduce(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op, int root,
                        ncclComm_t comm, cudaStream_t stream)
{
    return issue(comm, stream, {REDUCE, send, recv, count, type, op, root, 0});
}

ncclResult_t ncclReduceScatter(const void *send, void *recv, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream)
{
    return issue(comm, stream, {REDUCE_SCATTER, send, recv, count, type, op, 0, 0});
}

ncclResult_t ncclAllGather(const void *send, void *recv, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(comm, stream, {ALL_GATHER, send, recv, count, type, ncclSum, 0, 0});
}

ncclResult_t ncclBroadcast(const void *send, void *recv, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream)
{
    return issue(comm, stream, {BROADCAST, send, recv, count, type, ncclSum, root, 0});
}

ncclResult_t ncclSend(const void *send, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream)
{
    return issue(comm, stream, {SEND, send, nullptr, count, type, ncclSum, peer, 0});
}

ncclResult_t ncclRecv(void *recv, size_t count, ncclDataType_t type, int peer, ncclComm_t comm, cudaStream_t stream)
{
    return issue(comm, stream, {RECV, nullptr, recv, count, type, ncclSum, peer, 0});
}

} /* extern "C" */
