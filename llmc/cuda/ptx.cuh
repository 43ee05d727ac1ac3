/* Every machine instruction that CUDA C++ has no name for, each as one function with a body for the GPU (PTX) and one
 * for the host, where cuda_on_cpu plays it by its documented meaning. PTX ISA 9.0 is the source; fragments are those of
 * its section on mma.m16n8k16.
 *
 * Floor 2.
 */
#ifndef LLMC_CUDA_PTX_CUH
#define LLMC_CUDA_PTX_CUH

#include "gmem.cuh"

/* ---- BF16 ---- */

__device__ inline float to_f32(float x) { return x; }
__device__ inline float to_f32(bf16 x) { return bf16_to_f32(x.bits); }

/* Two floats, each rounded to the nearest BF16, ties to even; `low` in bits 0-15. NaN is some NaN. */
__device__ inline uint32_t bf16x2(float low, float high)
{
#ifdef __CUDA_ARCH__
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
#else
    return bf16_from_f32(low) | (uint32_t)bf16_from_f32(high) << 16;
#endif
}

__device__ inline bf16 to_bf16(float x) { return bf16{(uint16_t)bf16x2(x, 0.0f)}; }

template <class T> __device__ inline T from_f32(float x);
template <> __device__ inline float from_f32<float>(float x) { return x; }
template <> __device__ inline bf16 from_f32<bf16>(float x) { return to_bf16(x); }

/* 2^x, to about 2 ulp; denormal results are zero. */
__device__ inline float exp2_approximate(float x)
{
#ifdef __CUDA_ARCH__
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return x < -126 ? 0.0f : exp2f(x);
#endif
}

/* ---- tensor cores: d [16, 8] FP32 += a [16, 16] BF16 (row-major) x b [16, 8] BF16 (column-major), one warp ----
 *
 * With lane = 4 g + t:   a[0] = A[g][2t, 2t+1]       a[1] = A[g+8][2t, 2t+1]
 *                        a[2] = A[g][2t+8, 2t+9]     a[3] = A[g+8][2t+8, 2t+9]
 *                        b[0] = B[2t, 2t+1][g]       b[1] = B[2t+8, 2t+9][g]
 *                        d[0], d[1] = D[g][2t, 2t+1] d[2], d[3] = D[g+8][2t, 2t+1]
 */
__device__ inline void mma_bf16(float d[4], const uint32_t a[4], const uint32_t b[2])
{
#ifdef __CUDA_ARCH__
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::mma_m16n8k16_bf16(d, a, b);
#endif
}

/* Four 8 x 8 matrices of 16-bit elements from shared memory: lane i gives the address of row i % 8 of matrix i / 8, 16
 * bytes, 16-byte aligned; lane i gets of each matrix m elements 2 (i % 4), 2 (i % 4) + 1 of row i / 4, in r[m]. Transposed:
 * of each matrix's transpose. */
__device__ inline void ldmatrix_x4(uint32_t r[4], const void *row)
{
#ifdef __CUDA_ARCH__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::ldmatrix_x4(r, row, false);
#endif
}

__device__ inline void ldmatrix_x4_transposed(uint32_t r[4], const void *row)
{
#ifdef __CUDA_ARCH__
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(row))
                 : "memory");
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::ldmatrix_x4(r, row, true);
#endif
}

/* ---- copies to shared memory that do not wait ---- */

/* 16 bytes from element i of global memory, or zeros when `valid` is false (nothing is read then). Both addresses are
 * multiples of 16. They are there after cp_async_wait and a barrier, not before. */
template <class T> __device__ inline void cp_async_16(void *shared, gmem<T> global, int64_t i, bool valid)
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(global.p + i), "r"(valid ? 16 : 0)
                 : "memory");
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::cp_async_16(shared, (const void *)(global.p + i), valid);
#endif
}

__device__ inline void cp_async_commit() /* closes a group of copies */
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::cp_async_commit();
#endif
}

template <int pending> __device__ inline void cp_async_wait() /* until at most `pending` groups are on their way */
{
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
#elif defined(CUDA_ON_CPU)
    cuda_on_cpu::cp_async_wait(pending);
#endif
}

#endif
