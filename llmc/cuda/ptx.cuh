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

/* 1 / x, one rounding, where the exponent of x is between -126 and 125, or x is 0: then NaN. The sequence that nvcc makes
 * of __frcp_rn for these x, without its branch for others. */
__device__ inline float reciprocal_normal(float x)
{
#ifdef __CUDA_ARCH__
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return fmaf(r, -fmaf(x, r, -1.0f), r);
#else
    return x == 0 ? f32_from_bits(0x7fc00000u) : 1.0f / x;
#endif
}

/* ---- pairs of floats: one instruction from sm_100 on, two before; each half rounded as by itself ---- */

typedef struct {
    float a, b;
} F32x2;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
__device__ inline uint64_t f32x2_bits(F32x2 x)
{
    uint64_t bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "f"(x.a), "f"(x.b));
    return bits;
}
__device__ inline F32x2 f32x2_of_bits(uint64_t bits)
{
    F32x2 x;
    asm("mov.b64 {%0, %1}, %2;" : "=f"(x.a), "=f"(x.b) : "l"(bits));
    return x;
}
#endif

__device__ inline F32x2 f32x2_mul(F32x2 x, F32x2 y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    uint64_t r;
    asm("mul.rn.f32x2 %0, %1, %2;" : "=l"(r) : "l"(f32x2_bits(x)), "l"(f32x2_bits(y)));
    return f32x2_of_bits(r);
#else
    return F32x2{f32_mul(x.a, y.a), f32_mul(x.b, y.b)};
#endif
}

__device__ inline F32x2 f32x2_add(F32x2 x, F32x2 y)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    uint64_t r;
    asm("add.rn.f32x2 %0, %1, %2;" : "=l"(r) : "l"(f32x2_bits(x)), "l"(f32x2_bits(y)));
    return f32x2_of_bits(r);
#else
    return F32x2{f32_add(x.a, y.a), f32_add(x.b, y.b)};
#endif
}

__device__ inline F32x2 f32x2_fma(F32x2 x, F32x2 y, F32x2 z) /* x y + z */
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    uint64_t r;
    asm("fma.rn.f32x2 %0, %1, %2, %3;" : "=l"(r) : "l"(f32x2_bits(x)), "l"(f32x2_bits(y)), "l"(f32x2_bits(z)));
    return f32x2_of_bits(r);
#else
    return F32x2{fmaf(x.a, y.a, z.a), fmaf(x.b, y.b, z.b)};
#endif
}

/* ---- two BF16 in a word ---- */

__device__ inline F32x2 both_halves(uint32_t word)
{
    return F32x2{f32_from_bits(word << 16), f32_from_bits(word & 0xffff0000u)};
}

/* a x + z of both halves x, a exact in BF16: what takes a BF16 as it is takes no instruction to unpack it. */
__device__ inline F32x2 bf16x2_fma(uint32_t word, float a, F32x2 z)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
    F32x2 r;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2; fma.rn.f32.bf16 %0, low, %3, %4; "
        "fma.rn.f32.bf16 %1, high, %3, %5; }"
        : "=f"(r.a), "=f"(r.b)
        : "r"(word), "h"((uint16_t)(f32_bits(a) >> 16)), "f"(z.a), "f"(z.b));
    return r;
#else
    return f32x2_fma(both_halves(word), F32x2{a, a}, z);
#endif
}

/* The larger magnitude of each half, its sign bits meaning nothing; where one is NaN, the other, or with `keep` NaN. */
template <bool keep = false> __device__ inline uint32_t bf16x2_larger(uint32_t x, uint32_t y)
{
#ifdef __CUDA_ARCH__
    uint32_t r;
#if __CUDA_ARCH__ >= 860
    if (keep)
        asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    else
        asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
#else
    x &= 0x7fff7fffu, y &= 0x7fff7fffu;
    if (keep)
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
    else
        asm("max.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
#endif
    return r;
#else
    uint32_t r = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        uint32_t a = x >> shift & 0x7fff, b = y >> shift & 0x7fff, larger = a > b ? a : b; /* NaN is largest */
        if (!keep && larger > 0x7f80) larger = a > 0x7f80 ? b : a;
        r |= larger << shift;
    }
    return r;
#endif
}

/* ---- four bits and eight ---- */

/* E4M3 of a number that is not negative nor NaN: to nearest, ties to even, at most 448. */
__device__ inline uint32_t e4m3_nearest(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint32_t pair;
    asm("{ .reg .b16 low; cvt.rn.satfinite.e4m3x2.f32 low, %1, %2; mov.b32 %0, {low, 0}; }"
        : "=r"(pair)
        : "f"(0.0f), "f"(x));
    return pair;
#else
    return e4m3_from_f32(x);
#endif
}

#if defined(__CUDA_ARCH_SPECIFIC__) || defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define LLMC_HAS_E2M1 1 /* sm_100a, 103a, 120f */
#endif
#ifdef __CUDA_ARCH_SPECIFIC__
#if __CUDA_ARCH_SPECIFIC__ == 1000 || __CUDA_ARCH_SPECIFIC__ == 1030
#define LLMC_HAS_CVT_RS 1
#endif
#endif

/* E2M1 to nearest, ties to even: a sum with 2^(e + 22) has the unit of E2M1 at a magnitude of exponent e. */
__device__ inline uint32_t e2m1_nearest_by_sums(float x)
{
    float y = fmaxf(fminf(x, 6.0f), -6.0f), a = fabsf(y); /* NaN is 6 */
    uint32_t unit = (f32_bits(fmaxf(a, 1.0f)) & 0x7f800000u) + (22u << 23);
    uint32_t units = f32_bits(f32_add(a, f32_from_bits(unit))) - unit;
    return (units + (unit >> 22) - (2u * (127 + 22))) | (f32_bits(y) >> 28 & 8);
}

/* Eight numbers, to nearest, ties to even; beyond 6 is 6, NaN +6. The first in bits 0-3. */
__device__ inline uint32_t e2m1x8_nearest(const float x[8])
{
#ifdef LLMC_HAS_E2M1
    uint32_t r;
    asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; cvt.rn.satfinite.e2m1x2.f32 b, %4, %3; "
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
        : "=r"(r)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]));
    return r;
#else
    uint32_t r = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) r |= e2m1_nearest_by_sums(x[i]) << 4 * i;
    return r;
#endif
}

/* The same stochastically by cvt.rs, where the device has it (sm_100a, 103a): four numbers share 32 random bits. How they
 * do is NVIDIA's; so its results have the law of e2m1_from_f32_stochastic but not its bits. Not played on a CPU. */
__device__ inline uint32_t e2m1x8_native(const float x[8], uint32_t random_low, uint32_t random_high)
{
#ifdef LLMC_HAS_CVT_RS
    uint32_t r;
    asm("{ .reg .b16 a, b; cvt.rs.satfinite.e2m1x4.f32 a, {%4, %3, %2, %1}, %9; "
        "cvt.rs.satfinite.e2m1x4.f32 b, {%8, %7, %6, %5}, %10; mov.b32 %0, {a, b}; }"
        : "=r"(r)
        : "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]), "f"(x[4]), "f"(x[5]), "f"(x[6]), "f"(x[7]), "r"(random_low),
          "r"(random_high));
    return r;
#else
    (void)x, (void)random_low, (void)random_high;
    return 0;
#endif
}

/* Two floats as halves of 16 bits, cut toward zero; `low` in bits 0-15. NaN is 0x7fff. */
#ifndef __CUDA_ARCH__
inline uint32_t f16_cut(float x)
{
    uint32_t sign = f32_bits(x) >> 16 & 0x8000, a = f32_bits(x) & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7fff;
    if (a == 0x7f800000u) return sign | 0x7c00;
    if (a >= 0x477fe000u) return sign | 0x7bff;
    if (a >= 0x38800000u) return sign | ((a >> 13) - (112u << 10));
    return sign | (uint32_t)(f32_from_bits(a) * 0x1p24f);
}
#endif
__device__ inline uint32_t f16x2_cut(float low, float high)
{
#ifdef __CUDA_ARCH__
    uint32_t r;
    asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
#else
    return f16_cut(low) | f16_cut(high) << 16;
#endif
}

/* Both halves kept within plus and minus `limit` (two equal halves, positive); NaN is `limit`. */
__device__ inline uint32_t f16x2_clamp(uint32_t x, uint32_t limit)
{
#ifdef __CUDA_ARCH__
    uint32_t r;
#if __CUDA_ARCH__ >= 860
    asm("min.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(limit)); /* the smaller magnitude, x's sign */
#else
    asm("{ .reg .b32 t; min.f16x2 t, %1, %2; max.f16x2 %0, t, %3; }"
        : "=r"(r)
        : "r"(x), "r"(limit), "r"(limit | 0x80008000u));
#endif
    return r;
#else
    uint32_t r = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        uint32_t half = x >> shift & 0xffff, most = limit & 0xffff, sign = half & 0x8000;
        if ((half & 0x7fff) > 0x7c00) sign = 0;
        r |= ((half & 0x7fff) > most ? sign | most : half) << shift;
    }
    return r;
#endif
}

/* Four of the eight bytes of (low, high), chosen by the nibbles of `which`. */
__device__ inline uint32_t choose_bytes(uint32_t low, uint32_t high, uint32_t which)
{
#ifdef __CUDA_ARCH__
    return __byte_perm(low, high, which);
#else
    uint64_t both = (uint64_t)high << 32 | low;
    uint32_t r = 0;
    for (int i = 0; i < 4; i++) r |= (uint32_t)(both >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return r;
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
