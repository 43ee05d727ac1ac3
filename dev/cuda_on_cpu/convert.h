/* The number formats of 4, 8 and 16 bits, as the conversion instructions of PTX treat them.
 *
 * Implemented with the host side of NVIDIA's own cuda_fp4.h, cuda_fp8.h, cuda_bf16.h and cuda_fp16.h, so that the doubles
 * share no code with the programs they check. Packing is PTX's: of `cvt.rn.satfinite.e2m1x2.f32 d, a, b` the first source
 * goes to the high half; here the arguments are (low, high).
 */
#ifndef CUDA_ON_CPU_CONVERT_H
#define CUDA_ON_CPU_CONVERT_H

#include <stdint.h>

namespace cuda_on_cpu
{

/* ---- instructions ---- */

uint8_t cvt_rn_satfinite_e2m1x2(float low, float high);  /* nearest, ties to even; +-6 at most; NaN is +6 */
uint16_t cvt_rn_satfinite_e4m3x2(float low, float high); /* nearest, ties to even; +-448 at most; NaN is 0x7f */
uint32_t cvt_rn_bf16x2(float low, float high);           /* nearest, ties to even */
uint32_t cvt_rz_f16x2(float low, float high);            /* toward zero; what is finite stays finite */
uint32_t cvt_rn_f16x2_e2m1x2(uint8_t pair);              /* exact: two halves, the low nibble in the low one */

/* cvt.rs, stochastic rounding. Which of its random bits go to which element is drawn in a figure of the documentation and
 * told differently by two public implementations, so nothing is emulated: stops the program and says so. */
[[noreturn]] void cvt_rs_is_not_emulated();

/* ---- values ---- */

float e2m1_value(uint8_t code); /* 4 bits */
float e4m3_value(uint8_t code);
float e5m2_value(uint8_t code);
float ue8m0_value(uint8_t code); /* 2^(code - 127); 255 is NaN */
float bf16_value(uint16_t code);

uint16_t bf16_code(float x);
uint8_t e4m3_code(float x); /* saturating, as D in FP8 is stored */
uint8_t e5m2_code(float x);

} // namespace cuda_on_cpu

#endif
