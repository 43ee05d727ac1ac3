/* Inside cuda_on_cpu: what instructions of a warp are built from (mma, ldmatrix, cp.async).
 *
 * A warp instruction is played in three steps: each lane gives its operands to all others (exchange), every lane then
 * computes its own part of the result from all of them, and that is all: no lane runs ahead before all have arrived.
 * Example, the sum over the warp of a struct:
 *
 *     struct Pair { float a, b; } mine = {x, y};
 *     const Pair *all = exchange("pair_sum", mine);      // all[lane], until this lane's next collective
 *     for (int lane = 0; lane < 32; lane++) sum += all[lane].a * all[lane].b;
 */
#ifndef CUDA_ON_CPU_WARP_H
#define CUDA_ON_CPU_WARP_H

#include "cuda_on_cpu.h"

namespace cuda_on_cpu
{

/* All 32 lanes (`.aligned`) give a struct of at most 64 bytes; `name` is the instruction, for messages. */
template <class T> const T *exchange(const char *name, const T &mine)
{
    static_assert(sizeof(T) <= 64 && std::is_trivially_copyable<T>::value, "a small plain struct");
    return (const T *)warp_exchange(name, 0xffffffffu, &mine, sizeof mine, Place{nullptr, 0});
}

/* Ends the program unless the bytes lie in one shared variable of the running block, at a multiple of `alignment`. */
void check_shared(const char *name, const void *at, size_t bytes, size_t alignment);

/* Something a thread carries between calls: null when it begins. When the thread ends and data is not null, at_end is
 * called with it, on that thread. The OS thread's memory may be kept for the next thread that it plays. */
struct ThreadHook {
    void *data;
    void (*at_end)(void *data);
};
ThreadHook &thread_hook();

} // namespace cuda_on_cpu

#endif
