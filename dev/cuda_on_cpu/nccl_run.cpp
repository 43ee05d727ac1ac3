/* Operations of the double of NCCL, over MPI.
 *
 * A collective begins with a header from every rank to every other: what it calls, on how many elements of which type.
 * Where they differ every rank sees that and none moves data, so a mismatch is reported and does not hang. A rank that does
 * not come at all is reported after CUDA_ON_CPU_NCCL_TIMEOUT seconds (120), and one that aborts at once.
 *
 * Sums: the elements are divided over the ranks, each receives its share from all and adds. FP32, FP64 and integers are
 * added in order of ranks, so that all ways of dividing give the same bits. BF16 goes around the ring as the library's
 * kernels do it: the sum of rank r's share begins at rank r + 1 and is rounded to BF16 at every one of the N - 1 hops.
 */
#include "convert.h"
#include "internal.h"
#include "nccl_comm.h"

#include <algorithm>
#include <chrono>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <thread>

namespace cuda_on_cpu
{
namespace nccl
{

enum { ABORT_TAG = 1, HELLO_TAG = 20000, TABLE_TAG = 24000, OPERATION_TAG = 16, PHASES = 4, NUMBERS = 4096 };

size_t bytes_of(ncclDataType_t type)
{
    static const size_t bytes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return type >= 0 && type < ncclNumTypes ? bytes[type] : 0;
}

const char *name_of(Kind kind)
{
    static const char *const names[] = {"AllReduce", "Reduce", "ReduceScatter", "AllGather",
                                        "Broadcast", "Send",   "Recv"};
    return names[kind];
}

bool reduces(ncclDataType_t type)
{
    return bytes_of(type) && type != ncclFloat16 && type != ncclFloat8e4m3 && type != ncclFloat8e5m2;
}

size_t send_count(const Comm &c, const Operation &o)
{
    if (o.kind == RECV || (o.kind == BROADCAST && o.root != c.rank)) return 0;
    return o.kind == REDUCE_SCATTER ? o.count * (size_t)c.ranks : o.count;
}

size_t recv_count(const Comm &c, const Operation &o)
{
    if (o.kind == SEND || (o.kind == REDUCE && o.root != c.rank)) return 0;
    return o.kind == ALL_GATHER ? o.count * (size_t)c.ranks : o.count;
}

void set_error(Comm *c, ncclResult_t error, const char *format, ...)
{
    char text[256];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    std::lock_guard<std::mutex> lock(c->guard);
    if (c->error != ncclSuccess) return; /* the first one is the cause */
    fprintf(stderr, "NCCL: rank %d of %d: %s\n", c->rank, c->ranks, text);
    c->error = error;
    c->text = text;
}

static bool failed(Comm *c)
{
    std::lock_guard<std::mutex> lock(c->guard);
    return c->error != ncclSuccess || c->aborted;
}

/* ---- messages ---- */

static std::mutex mpi_guard; /* an abort comes from another thread: MPI_THREAD_SERIALIZED is enough for both */

static double seconds()
{
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

static double patience()
{
    const char *set = getenv("CUDA_ON_CPU_NCCL_TIMEOUT");
    return set ? atof(set) : 120;
}

/* A message of this communicator's abort from a peer, or this rank's own. */
static bool told_to_stop(Comm *c)
{
    if (c->aborted) return true;
    int there = 0;
    MPI_Status status;
    MPI_Iprobe(MPI_ANY_SOURCE, ABORT_TAG, c->mpi, &there, &status);
    if (there) set_error(c, ncclRemoteError, "rank %d aborted the communicator", status.MPI_SOURCE);
    return there != 0;
}

/* Until all requests are done; false when it was told to stop or nothing came for too long. The peers: who is waited for. */
static bool wait(Comm *c, const char *what, std::vector<MPI_Request> *requests, const std::vector<int> &peers)
{
    double start = seconds(), limit = patience();
    for (;;) {
        {
            std::lock_guard<std::mutex> lock(mpi_guard);
            int done = 0;
            MPI_Testall((int)requests->size(), requests->data(), &done, MPI_STATUSES_IGNORE);
            if (done) return true;
            if (told_to_stop(c)) break;
        }
        if (seconds() - start > limit) {
            int late = -1;
            for (size_t i = 0; i < peers.size() && late < 0; i++)
                if ((*requests)[i] != MPI_REQUEST_NULL) late = peers[i];
            set_error(c, ncclRemoteError, "%s: nothing from rank %d for %g s", what, late, limit);
            break;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
    std::lock_guard<std::mutex> lock(mpi_guard);
    for (MPI_Request &r : *requests)
        if (r != MPI_REQUEST_NULL) MPI_Cancel(&r), MPI_Request_free(&r);
    return false;
}

struct Message {
    int peer;
    void *bytes;
    size_t size;
};

/* All at the same time. What goes to this rank itself is copied, in order. What is sent stays as it is until it is over:
 * `keep` holds it, and is leaked when the exchange fails, since MPI may still read it. */
static bool exchange(Comm *c, const char *what, int tag, const std::vector<Message> &in,
                     const std::vector<Message> &out)
{
    std::vector<MPI_Request> requests;
    std::vector<int> peers;
    auto *keep = new std::vector<std::vector<char>>;
    std::vector<void *> own;
    std::unique_lock<std::mutex> lock(mpi_guard);
    for (const Message &m : in) {
        if (m.peer == c->rank) {
            own.push_back(m.bytes);
            continue;
        }
        requests.emplace_back();
        peers.push_back(m.peer);
        MPI_Irecv(m.bytes, (int)m.size, MPI_BYTE, m.peer, tag, c->mpi, &requests.back());
    }
    size_t copied = 0;
    for (const Message &m : out) {
        if (m.peer == c->rank) {
            if (m.size) memmove(own[copied], m.bytes, m.size);
            copied++;
            continue;
        }
        keep->emplace_back((const char *)m.bytes, (const char *)m.bytes + m.size);
        requests.emplace_back();
        peers.push_back(m.peer);
        MPI_Isend(keep->back().data(), (int)m.size, MPI_BYTE, m.peer, tag, c->mpi, &requests.back());
    }
    lock.unlock();
    if (!wait(c, what, &requests, peers)) return false;
    delete keep;
    return true;
}

/* ---- joining ---- */

ncclResult_t join(Comm *c)
{
    IdContent id;
    memcpy(&id, &c->id, sizeof id);
    if (c->ranks == 1) {
        c->joined = true;
        return ncclSuccess;
    }
    int initialized = 0, world;
    MPI_Initialized(&initialized);
    if (!initialized) {
        set_error(c, ncclSystemError, "more than one rank, and MPI is not initialized");
        return ncclSystemError;
    }
    MPI_Comm_rank(MPI_COMM_WORLD, &world);
    std::vector<int> table((size_t)c->ranks, -1); /* ranks in MPI_COMM_WORLD; -1: nobody, or two */
    int hello_tag = HELLO_TAG + id.number % 1000, table_tag = TABLE_TAG + id.number % 1000;
    MPI_Request hello;
    MPI_Isend(&c->rank, 1, MPI_INT, id.creator, hello_tag, MPI_COMM_WORLD, &hello);
    if (world == id.creator) {
        std::vector<int> who;
        for (int i = 0; i < c->ranks; i++) {
            int rank;
            MPI_Status status;
            MPI_Recv(&rank, 1, MPI_INT, MPI_ANY_SOURCE, hello_tag, MPI_COMM_WORLD, &status);
            table[(size_t)rank % table.size()] = status.MPI_SOURCE;
            who.push_back(status.MPI_SOURCE);
        }
        for (int peer : who)
            if (peer != world) MPI_Send(table.data(), c->ranks, MPI_INT, peer, table_tag, MPI_COMM_WORLD);
    } else {
        MPI_Recv(table.data(), c->ranks, MPI_INT, id.creator, table_tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    MPI_Wait(&hello, MPI_STATUS_IGNORE);
    if (std::find(table.begin(), table.end(), -1) != table.end()) {
        set_error(c, ncclInvalidUsage, "two processes join as the same rank");
        return ncclInvalidUsage;
    }
    MPI_Group all, members;
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, c->ranks, table.data(), &members);
    MPI_Comm_create_group(MPI_COMM_WORLD, members, table_tag, &c->mpi);
    MPI_Group_free(&all);
    MPI_Group_free(&members);
    c->joined = true;
    return ncclSuccess;
}

void tell_aborted(Comm *c)
{
    c->aborted = true;
    if (c->mpi == MPI_COMM_NULL) return;
    std::lock_guard<std::mutex> lock(mpi_guard);
    for (int peer = 0; peer < c->ranks; peer++) {
        MPI_Request request;
        if (peer == c->rank) continue;
        MPI_Isend(nullptr, 0, MPI_BYTE, peer, ABORT_TAG, c->mpi, &request);
        MPI_Request_free(&request);
    }
}

/* ---- sums ---- */

struct Bf16 {
    uint16_t bits;
};

template <class T> T combine(ncclRedOp_t op, T a, T b)
{
    if (op == ncclProd) return (T)(a * b);
    if (op == ncclMax) return a < b ? b : a;
    if (op == ncclMin) return b < a ? b : a;
    return (T)(a + b);
}
template <> Bf16 combine(ncclRedOp_t op, Bf16 a, Bf16 b)
{
    return {bf16_code(combine(op, bf16_value(a.bits), bf16_value(b.bits)))};
}

/* An average: of floats the ranks' values are divided before they are added, of integers the sum is. */
template <class T> T before(T x, int ranks) { return std::is_integral<T>::value ? x : (T)(x * (T)(1.0 / ranks)); }
template <> Bf16 before(Bf16 x, int ranks) { return {bf16_code(bf16_value(x.bits) * (float)(1.0 / ranks))}; }
template <class T> T after(T x, int ranks) { return std::is_integral<T>::value ? (T)(x / (T)ranks) : x; }
template <> Bf16 after(Bf16 x, int) { return x; }

template <class T>
static void combine_shares(T *to, const std::vector<std::vector<char>> &from, size_t count, ncclRedOp_t op, int first)
{
    int ranks = (int)from.size();
    for (size_t i = 0; i < count; i++) {
        T sum = {};
        for (int hop = 0; hop < ranks; hop++) {
            T x = ((const T *)from[(size_t)((first + hop) % ranks)].data())[i];
            if (op == ncclAvg) x = before(x, ranks);
            sum = hop ? combine(op, sum, x) : x;
        }
        to[i] = op == ncclAvg ? after(sum, ranks) : sum;
    }
}

static void combine_type(const Operation &o, void *to, const std::vector<std::vector<char>> &from, size_t count,
                         int owner)
{
    switch (o.type) {
    case ncclInt8:
        return combine_shares((int8_t *)to, from, count, o.op, 0);
    case ncclUint8:
        return combine_shares((uint8_t *)to, from, count, o.op, 0);
    case ncclInt32:
        return combine_shares((int32_t *)to, from, count, o.op, 0);
    case ncclUint32:
        return combine_shares((uint32_t *)to, from, count, o.op, 0);
    case ncclInt64:
        return combine_shares((int64_t *)to, from, count, o.op, 0);
    case ncclUint64:
        return combine_shares((uint64_t *)to, from, count, o.op, 0);
    case ncclFloat32:
        return combine_shares((float *)to, from, count, o.op, 0);
    case ncclFloat64:
        return combine_shares((double *)to, from, count, o.op, 0);
    default:
        return combine_shares((Bf16 *)to, from, count, o.op, owner + 1);
    }
}

/* ---- collectives ---- */

struct Header {
    int32_t kind, type, op, root;
    uint64_t count, number;
};

static int tag_of(const Operation &o, int phase) { return OPERATION_TAG + (int)(o.number % NUMBERS) * PHASES + phase; }

static std::string in_words(const Header &h)
{
    char text[96];
    snprintf(text, sizeof text, "%s of %llu x type %d, op %d, root %d", name_of((Kind)h.kind),
             (unsigned long long)h.count, h.type, h.op, h.root);
    return text;
}

/* Whether all ranks call the same. */
static bool agree(Comm *c, const Operation &o)
{
    Header mine = {o.kind, o.type, o.op, o.root, o.count, o.number};
    std::vector<Header> all((size_t)c->ranks);
    std::vector<Message> in, out;
    for (int r = 0; r < c->ranks; r++) {
        in.push_back({r, &all[(size_t)r], sizeof mine});
        out.push_back({r, &mine, sizeof mine});
    }
    if (!exchange(c, name_of(o.kind), tag_of(o, 0), in, out)) return false;
    for (int r = 1; r < c->ranks; r++)
        if (memcmp(&all[0], &all[(size_t)r], sizeof mine) != 0) {
            set_error(c, ncclInvalidUsage, "operation %llu: rank 0 calls %s; rank %d %s", (unsigned long long)o.number,
                      in_words(all[0]).c_str(), r, in_words(all[(size_t)r]).c_str());
            return false;
        }
    return true;
}

struct Buffers { /* of the host */
    char *send, *recv;
};

/* Looked up when the stream gets there: memory may have been freed since. */
static void find_buffers(const Comm &c, const Operation &o, Buffers *b)
{
    size_t send = send_count(c, o) * bytes_of(o.type), recv = recv_count(c, o) * bytes_of(o.type);
    b->send = send ? (char *)device_memory(o.send, send, name_of(o.kind)) : nullptr;
    b->recv = recv ? (char *)device_memory(o.recv, recv, name_of(o.kind)) : nullptr;
}

/* Elements [first(r), first(r + 1)) are rank r's share of the sums. */
static size_t first_of(const Comm &c, const Operation &o, int rank)
{
    return o.kind == REDUCE_SCATTER ? o.count * (size_t)rank : o.count * (size_t)rank / (size_t)c.ranks;
}

static bool reduce_share(Comm *c, const Operation &o, const char *send, std::vector<char> *share)
{
    size_t size = bytes_of(o.type), begin = first_of(*c, o, c->rank), count = first_of(*c, o, c->rank + 1) - begin;
    std::vector<std::vector<char>> from((size_t)c->ranks, std::vector<char>(count * size));
    std::vector<Message> in, out;
    for (int r = 0; r < c->ranks; r++) {
        size_t at = first_of(*c, o, r), n = first_of(*c, o, r + 1) - at;
        in.push_back({r, from[(size_t)r].data(), count * size});
        out.push_back({r, (void *)(send + at * size), n * size});
    }
    if (!exchange(c, name_of(o.kind), tag_of(o, 1), in, out)) return false;
    share->resize(count * size);
    combine_type(o, share->data(), from, count, c->rank);
    return true;
}

/* Everyone's share to all, or to the root only. */
static void gather_shares(Comm *c, const Operation &o, char *recv, std::vector<char> *share)
{
    size_t size = bytes_of(o.type);
    std::vector<Message> in, out;
    for (int r = 0; r < c->ranks; r++) {
        size_t at = first_of(*c, o, r), n = first_of(*c, o, r + 1) - at;
        if (o.kind == ALL_REDUCE || c->rank == o.root) in.push_back({r, recv + at * size, n * size});
        if (o.kind == ALL_REDUCE || r == o.root) out.push_back({r, share->data(), share->size()});
    }
    exchange(c, name_of(o.kind), tag_of(o, 2), in, out);
}

static void copy_to_all(Comm *c, const Operation &o, const Buffers &b)
{
    size_t bytes = o.count * bytes_of(o.type);
    std::vector<Message> in, out;
    for (int r = 0; r < c->ranks; r++) {
        if (o.kind == ALL_GATHER || c->rank == o.root) out.push_back({r, b.send, bytes});
        if (o.kind == ALL_GATHER) in.push_back({r, b.recv + (size_t)r * bytes, bytes});
    }
    if (o.kind == BROADCAST) in.push_back({o.root, b.recv, bytes});
    exchange(c, name_of(o.kind), tag_of(o, 1), in, out);
}

static void run_collective(Comm *c, const Operation &o)
{
    Buffers b;
    find_buffers(*c, o, &b);
    if (!agree(c, o) || o.count == 0) return;
    if (o.kind == ALL_GATHER || o.kind == BROADCAST) return copy_to_all(c, o, b);
    std::vector<char> share;
    if (!reduce_share(c, o, b.send, &share)) return;
    if (o.kind == REDUCE_SCATTER)
        memcpy(b.recv, share.data(), share.size());
    else
        gather_shares(c, o, b.recv, &share);
}

/* ---- sends and receives ---- */

/* Headers first, then the bytes; what does not match is received aside, so that the sender does not wait for ever. */
static void run_messages(Comm *c, const std::vector<Operation> &all)
{
    std::vector<Header> headers(all.size());
    std::vector<Buffers> buffers(all.size());
    std::vector<Message> in, out;
    int tag = OPERATION_TAG + NUMBERS * PHASES; /* the same for all: order decides which send meets which receive */
    for (size_t i = 0; i < all.size(); i++) {
        const Operation &o = all[i];
        find_buffers(*c, o, &buffers[i]);
        if (o.kind == SEND) headers[i] = {SEND, o.type, 0, 0, o.count, 0};
        (o.kind == SEND ? out : in).push_back({o.root, &headers[i], sizeof(Header)});
    }
    if (!exchange(c, "Send and Recv", tag, in, out)) return;
    in.clear();
    out.clear();
    std::vector<std::vector<char>> aside(all.size());
    for (size_t i = 0; i < all.size(); i++) {
        const Operation &o = all[i];
        size_t bytes = headers[i].count * bytes_of((ncclDataType_t)headers[i].type);
        if (o.kind == SEND) {
            out.push_back({o.root, buffers[i].send, bytes});
            continue;
        }
        char *to = buffers[i].recv;
        if (headers[i].count != o.count || headers[i].type != o.type) {
            set_error(c, ncclInvalidUsage, "rank %d sends %llu x type %d, rank %d receives %zu x type %d", o.root,
                      (unsigned long long)headers[i].count, headers[i].type, c->rank, o.count, o.type);
            aside[i].resize(bytes);
            to = aside[i].data();
        }
        in.push_back({o.root, to, bytes});
    }
    exchange(c, "Send and Recv", tag + 1, in, out);
}

void run(const std::shared_ptr<Comm> &c, const std::vector<Operation> &operations)
{
    if (!failed(c.get())) {
        if (operations[0].kind == SEND || operations[0].kind == RECV)
            run_messages(c.get(), operations);
        else
            run_collective(c.get(), operations[0]);
    }
    c->pending--;
}

} // namespace nccl
} // namespace cuda_on_cpu
