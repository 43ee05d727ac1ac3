/* See convert.h. */
#include "convert.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter" /* in NVIDIA's header */
#include <cuda_fp4.h>
#pragma GCC diagnostic pop
#include <cuda_fp8.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

namespace cuda_on_cpu
{

static float half_value(__half_raw h) { return __half2float(__half(h)); }

static uint32_t pair(uint16_t low, uint16_t high) { return low | (uint32_t)high << 16; }

uint8_t cvt_rn_satfinite_e2m1x2(float low, float high)
{
    return __nv_cvt_float2_to_fp4x2(make_float2(low, high), __NV_E2M1, cudaRoundNearest);
}

uint16_t cvt_rn_satfinite_e4m3x2(float low, float high)
{
    return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, __NV_E4M3);
}

uint32_t cvt_rn_bf16x2(float low, float high) { return pair(bf16_code(low), bf16_code(high)); }

uint32_t cvt_rz_f16x2(float low, float high)
{
    __half_raw l = __float2half_rz(low), h = __float2half_rz(high);
    return pair(l.x, h.x);
}

uint32_t cvt_rn_f16x2_e2m1x2(uint8_t codes)
{
    __half2_raw halves = __nv_cvt_fp4x2_to_halfraw2(codes, __NV_E2M1);
    return pair(halves.x, halves.y);
}

void cvt_rs_is_not_emulated()
{
    fprintf(stderr,
            "cvt.rs: stochastic rounding by this instruction is not emulated: the order of its random bits is not "
            "documented in words. Use the software rounding here.\n");
    exit(1);
}

float e2m1_value(uint8_t code) { return half_value(__nv_cvt_fp4_to_halfraw(code, __NV_E2M1)); }
float e4m3_value(uint8_t code) { return half_value(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)); }
float e5m2_value(uint8_t code) { return half_value(__nv_cvt_fp8_to_halfraw(code, __NV_E5M2)); }
float ue8m0_value(uint8_t code) { return code == 255 ? NAN : ldexpf(1.0f, code - 127); }

float bf16_value(uint16_t code)
{
    uint32_t bits = (uint32_t)code << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

uint16_t bf16_code(float x) { return __nv_bfloat16_raw(__float2bfloat16_rn(x)).x; }
uint8_t e4m3_code(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3); }
uint8_t e5m2_code(float x) { return __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E5M2); }

} // namespace cuda_on_cpu
