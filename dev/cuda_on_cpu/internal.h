/* Inside cuda_on_cpu: what its files know of each other.
 *
 *   settings.cpp  the environment variables; messages that end the program
 *   fiber.cpp     stacks that take turns                         (fiber.h)
 *   block.cpp     one block: its threads, barriers, collectives
 *   shared.cpp    one block: its shared memory
 *   launch.cpp    one launch: checks, all blocks over OpenMP
 *   stream.cpp    streams, events, the order of work             (enqueue)
 *   memory.cpp    device and pinned memory, copies               (device_memory)
 *   device.cpp    what the device says of itself; error codes
 *   stats.cpp     counters per kernel
 */
#ifndef CUDA_ON_CPU_INTERNAL_H
#define CUDA_ON_CPU_INTERNAL_H

#include "cuda_on_cpu.h"

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define CUDA_ON_CPU_ASAN
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define CUDA_ON_CPU_ASAN
#endif
#endif

namespace cuda_on_cpu
{

enum : size_t { STATIC_SHARED_BYTES = 48 << 10, MAX_SHARED_BYTES = 227 << 10 };

/* ---- settings.cpp ---- */

enum class Order { forward, reverse, random };

struct Settings {
    Order order;
    uint64_t order_seed;
    bool shuffle_streams;
    uint64_t stream_seed;
    bool stats;
    int capability_major, capability_minor;
    size_t memory_bytes;
    int devices;
};
const Settings &settings();

void watch_faults();           /* from now on a fault at a device address or below a stack is explained */
void watch_faults_of_thread(); /* also where this OS thread's stack is used up */

struct Random { /* splitmix64: any seed will do, also consecutive ones */
    uint64_t state;
    uint64_t next()
    {
        uint64_t z = state += 0x9e3779b97f4a7c15u;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
        z = (z ^ z >> 27) * 0x94d049bb133111ebu;
        return z ^ z >> 31;
    }
    uint32_t below(uint32_t n) { return (uint32_t)((next() >> 32) * n >> 32); }
};

/* ---- stats.cpp ---- */

struct Counters;
Counters *counters_of(const char *kernel);
void count_launch(Counters *counters, uint64_t threads);
extern std::atomic<bool> counting;
void count_access(const void *call_site, uintptr_t device, size_t bytes, bool write); /* of the running thread */
void count_block(Counters *counters); /* what was counted since the last call goes to the kernel */

/* ---- shared.cpp ---- */

class SharedMemory
{
  public:
    SharedMemory();
    ~SharedMemory();
    SharedMemory(const SharedMemory &) = delete;
    void begin(size_t dynamic_bytes, size_t limit); /* a block begins, with at most `limit` bytes: all are 0xff */
    void end(); /* a block ends: what was written outside of variables is reported */
    void *address(const SharedVariable &variable);
    void *dynamic();
    bool holds(const void *at, size_t bytes) const; /* within one variable */

  private:
    struct Piece {
        const SharedVariable *variable;
        char *begin;
        size_t bytes;
    };
    char *arena, *next;
    size_t static_bytes, limit;
    SharedVariable dynamic_variable;
    std::vector<Piece> pieces;
    char *place(const SharedVariable &variable);
    [[noreturn]] void report(const char *byte) const;
};

/* ---- block.cpp ---- */

struct Grid {
    const char *kernel;
    Configuration configuration;
    const std::function<void()> *thread;
    size_t shared_limit; /* static and dynamic together */
    uint64_t number;     /* of this launch */
    Counters *counters;
};
void run_block(const Grid &grid, uint3 block_index, uint64_t block_number);
std::string running_place(); /* kernel, block and thread for a message; empty outside kernels */
unsigned running_thread_number();

/* ---- stream.cpp ---- */

void enqueue(cudaStream_t stream, std::function<void()> work); /* runs it now, or when streams are shuffled, later */
bool stream_work_waits();                                      /* streams are shuffled */
void wait_for_stream(cudaStream_t stream);
void wait_for_device();

/* ---- memory.cpp ---- */

/* The host's address of `bytes` of device memory for work that is not a kernel's; `who` asks. */
void *device_memory(const void *device, size_t bytes, const char *who);
bool is_device_address(const void *p);

/* ---- device.cpp ---- */

cudaError_t set_error(cudaError_t error); /* what cudaGetLastError will say, unless it is cudaSuccess; returns it */

} // namespace cuda_on_cpu

#endif
