/* CUDA source, compiled and run on a CPU: what such source needs beyond the toolkit's own headers.
 *
 * Given to the compiler with -include, after launch_filter.py has rewritten kernel launches and __shared__ variables.
 * The toolkit's <cuda_runtime.h> comes first and unchanged: types, vector types and the declarations of the runtime are
 * NVIDIA's, so a call that would not compile there does not compile here; their bodies are in this folder's .cpp files.
 *
 *   builtins.h   threadIdx, barriers, shuffles, atomics, intrinsics: what nvcc itself declares
 *   launch.h     what the filter writes: launches and shared variables
 *   this file    the functions that kernels call by name, and what tests ask for
 *
 * README.md says what is played and how.
 */
#ifndef CUDA_ON_CPU_H
#define CUDA_ON_CPU_H

#ifndef CUDA_ON_CPU
#define CUDA_ON_CPU
#endif

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "builtins.h"
#include "launch.h"

namespace cuda_on_cpu
{

/* ---- called by kernels ---- */

/* The host's address of `bytes` (1, 2, 4, 8 or 16) of device memory. Ends the program with a message unless they lie in
 * one allocation at a multiple of `bytes`. */
void *global_access(const void *device, size_t bytes, bool write);

/* Warp collective: d [16, 8] += a [16, 16] b [16, 8], fragments as PTX's mma.m16n8k16 gives them to lanes. */
void mma_m16n8k16_bf16(float d[4], const uint32_t a[4], const uint32_t b[2]);

/* Warp collective: four 8 x 8 matrices of 16-bit elements from shared memory; lane i names row i % 8 of
 * matrix i / 8. */
void ldmatrix_x4(uint32_t r[4], const void *row, bool transposed);

/* 16 bytes from device to shared memory, or zeros; they land at the wait that covers their group, not before. */
void cp_async_16(void *shared, const void *device, bool valid);
void cp_async_commit();
void cp_async_wait(int pending);

/* ---- asked by tests ---- */

struct KernelStats {
    uint64_t launches, threads;
    uint64_t bytes_read, bytes_written;     /* of device memory, as the threads asked for them */
    uint64_t sectors_read, sectors_written; /* pieces of 32 bytes, as the warps' requests touched them */
};

/* What the kernel of this name (without template arguments) did so far, in all its instances. Launches and threads are
 * always counted, bytes and sectors only while counting is on. */
KernelStats kernel_stats(const char *kernel);
void count_accesses(bool on);
void reset_stats();
void print_stats();

} // namespace cuda_on_cpu

#endif
