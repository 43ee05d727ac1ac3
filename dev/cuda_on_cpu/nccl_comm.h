/* Inside the double of NCCL: what its two files share.
 *
 *     nccl.cpp       the functions of nccl.h: communicators, arguments, groups
 *     nccl_run.cpp   one operation over MPI, when its stream gets there
 */
#ifndef CUDA_ON_CPU_NCCL_COMM_H
#define CUDA_ON_CPU_NCCL_COMM_H

#include <atomic>
#include <memory>
#include <mutex>
#include <stdint.h>
#include <string>
#include <vector>

#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* in the headers that nccl.h includes */
#include <nccl.h>
#pragma GCC diagnostic pop

#define OMPI_SKIP_MPICXX 1 /* OpenMPI's C++ interface is not used and not free of warnings */
#include <mpi.h>

namespace cuda_on_cpu
{
namespace nccl
{

struct Comm { /* alive until the last operation that was issued is over */
    MPI_Comm mpi = MPI_COMM_NULL;
    int rank = 0, ranks = 1, device = 0;
    ncclUniqueId id;
    bool blocking = true, joined = false, finalized = false;
    bool in_progress = false; /* not blocking, and the last call was not polled for */
    int polls = 0;            /* while it joins */
    uint64_t issued = 0;      /* operations: the next one's number */
    std::atomic<int> pending{0};
    std::atomic<bool> aborted{false};

    std::mutex guard; /* of the two below */
    ncclResult_t error = ncclSuccess;
    std::string text;
};

enum Kind { ALL_REDUCE, REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST, SEND, RECV };

struct Operation {
    Kind kind;
    const void *send; /* addresses of the device */
    void *recv;
    size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root; /* or the peer */
    uint64_t number;
};

size_t bytes_of(ncclDataType_t type); /* 0: not a type */
const char *name_of(Kind kind);
bool reduces(ncclDataType_t type); /* whether the double can */

/* What a rank reads and writes, in elements. */
size_t send_count(const Comm &c, const Operation &o);
size_t recv_count(const Comm &c, const Operation &o);

/* Notes an error that ncclCommGetAsyncError gives from now on, and prints it: nobody may ever ask. */
__attribute__((format(printf, 3, 4))) void set_error(Comm *c, ncclResult_t error, const char *format, ...);

ncclResult_t join(Comm *c); /* waits for all ranks of the id */
void tell_aborted(Comm *c); /* the other ranks, who may be waiting for this one */
/* One collective, or sends and receives that go on at the same time. */
void run(const std::shared_ptr<Comm> &c, const std::vector<Operation> &operations);

struct IdContent { /* of a ncclUniqueId */
    uint32_t magic;
    int32_t creator, number; /* rank in MPI_COMM_WORLD; how many it made before */
};
const uint32_t ID_MAGIC = 0x6e63636c;

} // namespace nccl
} // namespace cuda_on_cpu

#endif
