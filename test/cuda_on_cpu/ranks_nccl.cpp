/* The double of NCCL on the ranks of an mpirun: test_cuda_doubles.sh starts it.
 *
 *     ranks_nccl check            every operation against direct sums, arguments, groups, two communicators and streams
 *     ranks_nccl count|kind|type  rank 1 calls something else than the rest: every rank must be told, none may hang
 *     ranks_nccl message          rank 0 sends more than rank 1 receives
 *     ranks_nccl absent           rank 1 does not come (CUDA_ON_CPU_NCCL_TIMEOUT)
 *     ranks_nccl abort            rank 1 aborts its communicator while the others wait for it
 *     ranks_nccl watchdog         a second thread aborts the communicator that its own rank waits in
 *
 * Rank 0 prints the last line; a case fails when it does on any rank.
 */
#include "../test.h"

#include <cuda_runtime.h>
#include <functional>
#include <math.h>
#define OMPI_SKIP_MPICXX 1 /* OpenMPI's C++ interface is not used and not free of warnings */
#include <mpi.h>
#include <stdint.h>
#include <string>
#include <thread>
#include <unistd.h>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nccl.h>
#pragma GCC diagnostic pop

static int rank, ranks;

/* ---- values: of each type, rank and index, and what sums of them are ---- */

static uint16_t to_bf16(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
static float from_bf16(uint16_t code)
{
    uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static size_t size_of(ncclDataType_t t)
{
    return t == ncclFloat64 || t == ncclInt64 ? 8 : t == ncclBfloat16 ? 2 : t == ncclUint8 ? 1 : 4;
}

static float real(int r, size_t i) { return (float)(((size_t)r * 7919 + i * 104729) % 2003) / 977.0f - 1.0f; }

static void put(std::vector<char> *to, ncclDataType_t t, size_t at, double x)
{
    char *p = to->data() + at * size_of(t);
    float f = (float)x;
    uint16_t h = to_bf16(f);
    int32_t i32 = (int32_t)x;
    int64_t i64 = (int64_t)x;
    uint8_t u8 = (uint8_t)(int)x;
    if (t == ncclFloat64) memcpy(p, &x, 8);
    if (t == ncclFloat32) memcpy(p, &f, 4);
    if (t == ncclBfloat16) memcpy(p, &h, 2);
    if (t == ncclInt32) memcpy(p, &i32, 4);
    if (t == ncclInt64) memcpy(p, &i64, 8);
    if (t == ncclUint8) memcpy(p, &u8, 1);
}

/* Rank r's value i as the type holds it. */
static double value(ncclDataType_t t, int r, size_t i)
{
    float x = real(r, i);
    if (t == ncclBfloat16) return from_bf16(to_bf16(x));
    if (t == ncclUint8) return (int)(x * 10 + 10);
    return t == ncclFloat32 ? x : t == ncclFloat64 ? (double)x * 1.000000001 : (double)(int64_t)(x * 1000);
}

static double combine(ncclDataType_t t, ncclRedOp_t op, double a, double b)
{
    double x = op == ncclSum || op == ncclAvg ? a + b
               : op == ncclProd               ? a * b
               : op == ncclMax                ? fmax(a, b)
                                              : fmin(a, b);
    if (t == ncclFloat32) return (float)x;
    if (t == ncclBfloat16) return from_bf16(to_bf16((float)x));
    if (t == ncclUint8) return (double)((unsigned)(int64_t)x & 255);
    return x;
}

/* Of element i, which rank `owner` adds up: BF16 goes around the ring and ends there, all else is added by rank. */
static double reduced(ncclDataType_t t, ncclRedOp_t op, size_t i, int owner)
{
    int first = t == ncclBfloat16 ? owner + 1 : 0;
    double sum = 0;
    for (int hop = 0; hop < ranks; hop++) {
        double x = value(t, (first + hop) % ranks, i);
        if (op == ncclAvg) x = combine(t, ncclProd, x, (float)(1.0 / ranks));
        sum = hop ? combine(t, op, sum, x) : x;
    }
    return sum;
}

/* ---- memory ---- */

struct Buffer {
    char *p = nullptr;
    size_t bytes;
    explicit Buffer(const std::vector<char> &host) : bytes(host.size())
    {
        cudaMalloc((void **)&p, bytes + 16);
        cudaMemcpy(p, host.data(), bytes, cudaMemcpyHostToDevice);
    }
    ~Buffer() { cudaFree(p); }
    std::vector<char> now() const
    {
        std::vector<char> host(bytes);
        cudaMemcpy(host.data(), p, bytes, cudaMemcpyDeviceToHost);
        return host;
    }
};

static std::vector<char> mine(ncclDataType_t t, size_t count)
{
    std::vector<char> host(count * size_of(t));
    for (size_t i = 0; i < count; i++) put(&host, t, i, value(t, rank, i));
    return host;
}

static void check_equal(const char *what, const Buffer &b, ncclDataType_t t, size_t from, size_t count,
                        const std::function<double(size_t)> &expected)
{
    std::vector<char> got = b.now(), want = got;
    for (size_t i = 0; i < count; i++) put(&want, t, from + i, expected(i));
    size_t at = 0;
    while (at < got.size() && got[at] == want[at]) at++;
    CHECK(at == got.size(), "rank %d: %s of type %d: element %zu differs", rank, what, t, at / size_of(t));
}

#define NCCL(call)                                                                                                     \
    do {                                                                                                               \
        ncclResult_t result = call;                                                                                    \
        CHECK(result == ncclSuccess, "rank %d: %s: %s: %s", rank, #call, ncclGetErrorString(result),                   \
              ncclGetLastError(nullptr));                                                                              \
    } while (0)

/* An id that rank `from` made. */
static ncclUniqueId shared_id(int from)
{
    ncclUniqueId id = {};
    if (rank == from) ncclGetUniqueId(&id);
    MPI_Bcast(&id, sizeof id, MPI_BYTE, from, MPI_COMM_WORLD);
    return id;
}

static ncclComm_t new_comm()
{
    ncclComm_t comm = nullptr;
    NCCL(ncclCommInitRank(&comm, ranks, shared_id(0), rank));
    return comm;
}

static ncclResult_t async_error(ncclComm_t comm)
{
    ncclResult_t error = ncclNumResults;
    ncclCommGetAsyncError(comm, &error);
    return error;
}

/* ---- operations ---- */

static int owner_of(size_t i, size_t count)
{
    int owner = 0;
    while (i >= count * (size_t)(owner + 1) / (size_t)ranks) owner++;
    return owner;
}

static void test_reductions(ncclComm_t comm, cudaStream_t stream)
{
    const ncclDataType_t types[] = {ncclFloat32, ncclBfloat16, ncclFloat64, ncclInt32, ncclInt64, ncclUint8};
    const ncclRedOp_t ops[] = {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg};
    for (ncclDataType_t t : types)
        for (ncclRedOp_t op : ops) {
            if (op >= ncclProd && op != ncclMax && t != ncclFloat32 && t != ncclBfloat16) continue;
            char what[64];
            snprintf(what, sizeof what, "reductions: type %d, op %d", t, op);
            test_case(what);
            for (size_t count : {(size_t)1, (size_t)7, (size_t)5000})
                for (bool in_place : {false, true}) {
                    size_t whole = count * (size_t)ranks, part = count * (size_t)rank;
                    auto at = [&](size_t i) { return reduced(t, op, i, owner_of(i, count)); };
                    Buffer a(mine(t, count)), b(std::vector<char>(count * size_of(t), 0x55));
                    char *to = in_place ? a.p : b.p;
                    NCCL(ncclAllReduce(a.p, to, count, t, op, comm, stream));
                    cudaStreamSynchronize(stream);
                    check_equal("AllReduce", in_place ? a : b, t, 0, count, at);
                    Buffer c(mine(t, count)), d(std::vector<char>(count * size_of(t), 0x55));
                    NCCL(ncclReduce(c.p, in_place ? c.p : d.p, count, t, op, ranks - 1, comm, stream));
                    cudaStreamSynchronize(stream);
                    if (rank == ranks - 1) check_equal("Reduce", in_place ? c : d, t, 0, count, at);
                    Buffer e(mine(t, whole)), f(std::vector<char>(count * size_of(t), 0x55));
                    NCCL(ncclReduceScatter(e.p, in_place ? e.p + part * size_of(t) : f.p, count, t, op, comm, stream));
                    cudaStreamSynchronize(stream);
                    check_equal("ReduceScatter", in_place ? e : f, t, in_place ? part : 0, count,
                                [&](size_t i) { return reduced(t, op, part + i, rank); });
                }
        }
}

static void test_copies(ncclComm_t comm, cudaStream_t stream)
{
    const ncclDataType_t t = ncclInt32;
    for (size_t count : {(size_t)0, (size_t)3, (size_t)70000}) {
        test_case("AllGather, Broadcast, Send and Recv");
        size_t whole = count * (size_t)ranks;
        auto from_rank = [&](size_t i) { return count ? value(t, (int)(i / count), i % count) : 0; };
        Buffer a(mine(t, count)), b(std::vector<char>(whole * 4));
        NCCL(ncclAllGather(a.p, b.p, count, t, comm, stream));
        cudaStreamSynchronize(stream);
        check_equal("AllGather", b, t, 0, whole, from_rank);
        Buffer c(std::vector<char>(whole * 4));
        cudaMemcpy(c.p + count * (size_t)rank * 4, a.p, count * 4, cudaMemcpyDeviceToDevice);
        NCCL(ncclAllGather(c.p + count * (size_t)rank * 4, c.p, count, t, comm, stream));
        cudaStreamSynchronize(stream);
        check_equal("AllGather in place", c, t, 0, whole, from_rank);
        Buffer d(mine(t, count));
        NCCL(ncclBroadcast(d.p, d.p, count, t, ranks - 1, comm, stream));
        cudaStreamSynchronize(stream);
        check_equal("Broadcast", d, t, 0, count, [&](size_t i) { return value(t, ranks - 1, i); });

        Buffer from(mine(t, whole)), to(std::vector<char>(whole * 4));
        NCCL(ncclGroupStart());
        for (int peer = 0; peer < ranks; peer++) {
            NCCL(ncclRecv(to.p + count * (size_t)peer * 4, count, t, peer, comm, stream));
            NCCL(ncclSend(from.p + count * (size_t)peer * 4, count, t, peer, comm, stream));
        }
        NCCL(ncclGroupEnd());
        cudaStreamSynchronize(stream);
        check_equal("all to all", to, t, 0, whole,
                    [&](size_t i) { return value(t, (int)(i / count), count * (size_t)rank + i % count); });
        NCCL(async_error(comm));
    }
}

static void test_group(ncclComm_t comm, ncclComm_t second, cudaStream_t stream, cudaStream_t other)
{
    test_case("a group of collectives; two communicators, two streams");
    Buffer a(mine(ncclFloat32, 100)), b(mine(ncclFloat32, 60)), c(mine(ncclFloat32, 30));
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(a.p, a.p, 100, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(b.p, b.p, 60, ncclFloat32, ncclMax, comm, stream));
    NCCL(ncclGroupEnd());
    NCCL(ncclAllReduce(c.p, c.p, 30, ncclFloat32, ncclSum, second, other));
    std::vector<char> before = a.now();
    CHECK(before == mine(ncclFloat32, 100), "something ran before the group's end");
    NCCL(ncclGroupEnd());
    cudaDeviceSynchronize();
    check_equal("first", a, ncclFloat32, 0, 100, [](size_t i) { return reduced(ncclFloat32, ncclSum, i, 0); });
    check_equal("second", b, ncclFloat32, 0, 60, [](size_t i) { return reduced(ncclFloat32, ncclMax, i, 0); });
    check_equal("third", c, ncclFloat32, 0, 30, [](size_t i) { return reduced(ncclFloat32, ncclSum, i, 0); });
}

static void test_communicators(ncclComm_t comm)
{
    test_case("what a communicator says of itself");
    int count = -1, own = -1, device = -1, version = 0;
    NCCL(ncclCommCount(comm, &count));
    NCCL(ncclCommUserRank(comm, &own));
    NCCL(ncclCommCuDevice(comm, &device));
    NCCL(ncclGetVersion(&version));
    CHECK(count == ranks && own == rank && device == 0 && version == NCCL_VERSION_CODE, "%d %d %d %d", count, own,
          device, version);

    test_case("a communicator of some ranks, in another order");
    ncclUniqueId id = shared_id(ranks - 1);
    if (rank != 0 || ranks == 2) {
        int members = ranks == 2 ? 2 : ranks - 1;
        ncclComm_t some = nullptr;
        NCCL(ncclCommInitRank(&some, members, id, ranks - 1 - rank));
        Buffer a(mine(ncclInt32, 4));
        NCCL(ncclBroadcast(a.p, a.p, 4, ncclInt32, 0, some, nullptr));
        cudaDeviceSynchronize();
        check_equal("Broadcast", a, ncclInt32, 0, 4, [](size_t i) { return value(ncclInt32, ranks - 1, i); });
        NCCL(ncclCommFinalize(some));
        CHECK(ncclBroadcast(a.p, a.p, 4, ncclInt32, 0, some, nullptr) == ncclInvalidUsage, "used after its end");
        NCCL(ncclCommDestroy(some));
    }

    test_case("a communicator that does not block");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER, bad = {};
    config.blocking = 0;
    ncclComm_t polled = nullptr;
    id = shared_id(0);
    CHECK(ncclCommInitRankConfig(&polled, ranks, id, rank, &bad) == ncclInvalidArgument, "a configuration of zeros");
    CHECK(ncclCommInitRankConfig(&polled, ranks, id, rank, &config) == ncclInProgress, "done at once");
    Buffer b(mine(ncclFloat32, 9));
    CHECK(ncclAllReduce(b.p, b.p, 9, ncclFloat32, ncclSum, polled, nullptr) == ncclInvalidUsage, "used while joining");
    CHECK(async_error(polled) == ncclInProgress, "no need to poll");
    ncclResult_t state;
    while ((state = async_error(polled)) == ncclInProgress) usleep(100);
    NCCL(state);
    CHECK(ncclAllReduce(b.p, b.p, 9, ncclFloat32, ncclSum, polled, nullptr) == ncclInProgress, "done at once");
    while ((state = async_error(polled)) == ncclInProgress) usleep(100);
    NCCL(state);
    cudaDeviceSynchronize();
    check_equal("AllReduce", b, ncclFloat32, 0, 9, [](size_t i) { return reduced(ncclFloat32, ncclSum, i, 0); });
    CHECK(ncclCommFinalize(polled) == ncclInProgress, "finalized at once");
    NCCL(async_error(polled));
    NCCL(ncclCommDestroy(polled));
}

static void test_arguments(ncclComm_t comm, cudaStream_t stream, cudaStream_t other)
{
    test_case("arguments that are refused");
    Buffer a(mine(ncclFloat32, 64));
    float host[64];
    ncclComm_t none = nullptr;
    ncclUniqueId zeros = {};
    const ncclResult_t bad = ncclInvalidArgument;
    CHECK(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, nullptr, stream) == bad, "no communicator");
    CHECK(ncclAllReduce(host, a.p, 8, ncclFloat32, ncclSum, comm, stream) == bad, "a host pointer to send from");
    CHECK(ncclAllReduce(a.p, host, 8, ncclFloat32, ncclSum, comm, stream) == bad, "a host pointer to receive at");
    CHECK(ncclAllReduce(nullptr, a.p, 8, ncclFloat32, ncclSum, comm, stream) == bad, "NULL");
    CHECK(ncclAllReduce(a.p + 2, a.p + 2, 8, ncclFloat32, ncclSum, comm, stream) == bad, "an address off its type");
    CHECK(ncclAllReduce(a.p, a.p, 8, ncclNumTypes, ncclSum, comm, stream) == bad, "type 12");
    CHECK(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclNumOps, comm, stream) == bad, "operation 5");
    CHECK(ncclAllReduce(a.p, a.p + 4, 8, ncclFloat32, ncclSum, comm, stream) == bad, "buffers that overlap");
    CHECK(ncclReduceScatter(a.p, a.p + 4, 4, ncclFloat32, ncclSum, comm, stream) == bad, "not in place");
    CHECK(ncclAllGather(a.p + 4, a.p, 4, ncclFloat32, comm, stream) == bad, "not in place");
    CHECK(ncclBroadcast(a.p, a.p, 8, ncclFloat32, ranks, comm, stream) == bad, "a root that is not there");
    CHECK(ncclSend(a.p, 8, ncclFloat32, -1, comm, stream) == bad, "a peer that is not there");
    CHECK(ncclSend(a.p, 8, ncclFloat32, rank, comm, stream) == ncclInvalidUsage, "to itself, alone");
    CHECK(ncclCommInitRank(&none, ranks, zeros, rank) == bad && !none, "an id of zeros");
    CHECK(ncclGroupEnd() == ncclInvalidUsage, "the end of no group");
    CHECK(strstr(ncclGetLastError(nullptr), "ncclGroupEnd"), "the last error is %s", ncclGetLastError(nullptr));
    NCCL(ncclGroupStart());
    NCCL(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, comm, stream));
    NCCL(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, comm, other));
    CHECK(ncclGroupEnd() == ncclInvalidUsage, "two streams in a group");
    NCCL(ncclGroupStart());
    CHECK(ncclAllReduce(host, a.p, 8, ncclFloat32, ncclSum, comm, stream) == bad, "in a group");
    CHECK(ncclGroupEnd() == bad, "the group's end does not say it");
    NCCL(async_error(comm));

    test_case("memory and registration");
    void *p = nullptr, *registered = nullptr;
    ncclWindow_t window = nullptr;
    NCCL(ncclMemAlloc(&p, 4096));
    NCCL(ncclCommRegister(comm, p, 4096, &registered));
    NCCL(ncclCommDeregister(comm, registered));
    NCCL(ncclCommWindowRegister(comm, p, 4096, &window, NCCL_WIN_COLL_SYMMETRIC));
    NCCL(ncclCommWindowDeregister(comm, window));
    CHECK(ncclCommRegister(comm, host, sizeof host, &registered) == bad, "host memory");
    NCCL(ncclMemFree(p));
}

static void check()
{
    cudaStream_t stream, other;
    cudaStreamCreate(&stream);
    cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking);
    test_case("joining");
    ncclComm_t comm = new_comm(), second = new_comm();
    test_reductions(comm, stream);
    test_copies(comm, other);
    test_group(comm, second, stream, other);
    test_communicators(comm);
    test_arguments(comm, stream, other);
    test_case("the end");
    NCCL(ncclCommFinalize(comm));
    NCCL(ncclCommDestroy(comm));
    NCCL(ncclCommDestroy(second));
    cudaStreamDestroy(stream);
    cudaStreamDestroy(other);
}

/* ---- ranks that disagree ---- */

static void disagree(const std::string &how)
{
    test_case(how.c_str());
    ncclComm_t comm = new_comm();
    bool odd = rank == 1;
    Buffer a(mine(ncclFloat32, 64)), b(mine(ncclFloat32, 64));
    std::vector<char> before = a.now();
    ncclResult_t expected = ncclInvalidUsage;
    if (how == "count") NCCL(ncclAllReduce(a.p, a.p, odd ? 33 : 32, ncclFloat32, ncclSum, comm, nullptr));
    if (how == "type") NCCL(ncclAllReduce(a.p, a.p, 32, odd ? ncclInt32 : ncclFloat32, ncclSum, comm, nullptr));
    if (how == "kind" && odd) NCCL(ncclBroadcast(a.p, a.p, 32, ncclFloat32, 0, comm, nullptr));
    if (how == "kind" && !odd) NCCL(ncclAllReduce(a.p, a.p, 32, ncclFloat32, ncclSum, comm, nullptr));
    if (how == "message") {
        if (rank == 0) NCCL(ncclSend(a.p, 33, ncclFloat32, 1, comm, nullptr));
        if (rank == 1) NCCL(ncclRecv(b.p, 32, ncclFloat32, 0, comm, nullptr));
        if (rank != 1) expected = ncclSuccess; /* only the receiver can know */
    }
    if (how == "absent" || how == "abort") {
        expected = ncclRemoteError;
        if (odd && how == "abort") NCCL(ncclCommAbort(comm));
        if (odd) return (void)usleep(how == "absent" ? 4000000 : 0);
        NCCL(ncclAllReduce(a.p, a.p, 32, ncclFloat32, ncclSum, comm, nullptr));
    }
    cudaDeviceSynchronize();
    ncclResult_t error = async_error(comm);
    CHECK(error == expected, "rank %d: %s, not %s", rank, ncclGetErrorString(error), ncclGetErrorString(expected));
    CHECK(a.now() == before, "rank %d: data moved all the same", rank);
    if (expected != ncclSuccess) {
        CHECK(strstr(ncclGetLastError(comm), "rank "), "says: %s", ncclGetLastError(comm));
        CHECK(ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, comm, nullptr) == expected, "goes on after the error");
    }
    if (expected != ncclRemoteError) MPI_Barrier(MPI_COMM_WORLD); /* an abort may come before the last header */
    NCCL(ncclCommAbort(comm));
}

static void watchdog()
{
    test_case("watchdog");
    ncclComm_t comm = new_comm();
    Buffer a(mine(ncclFloat32, 8));
    if (rank != 0) {
        std::thread dog([&] {
            usleep(300000);
            ncclCommAbort(comm);
        });
        ncclAllReduce(a.p, a.p, 8, ncclFloat32, ncclSum, comm, nullptr); /* rank 0 does not come */
        cudaDeviceSynchronize();
        dog.join();
    } else {
        ncclCommAbort(comm);
    }
}

int main(int argc, char **argv)
{
    int level;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SERIALIZED, &level);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    std::string how = argc == 2 ? argv[1] : "";
    if (how == "check")
        check();
    else if (how == "watchdog")
        watchdog();
    else
        disagree(how);
    test_close();
    int failures = test_state.failures, all;
    MPI_Allreduce(&failures, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d passed, %d failed\n", test_state.passed, all);
    MPI_Finalize();
    return all != 0;
}
