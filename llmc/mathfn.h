/* Mathematical functions made of IEEE operations and fma only, so that every machine gives the same bits.
 *
 * FP32: exp, tanh, sigmoid, GELU and SiLU with derivatives, for the inner loops. Each is written once, as a macro over
 * a type V and the prefix S of its primitives: instantiated here for float (prefix f32), in cpu/simd.h for 16 lanes
 * (prefix v16). FP64: exp, log, cos and sin, inverse of the normal distribution, for tables, losses, initialisation.
 *
 * Errors, measured in test_mathfn.c: exp 1.5 ulp of FP32 in [-87, 88] (0 below, Inf above); tanh 2^-23 absolute; FP64
 * functions 4e-16 relative (sin, cos: absolute, |x| < 2^20), inverse normal 1e-15.
 *
 * Floor 0; host and device.
 */
#ifndef LLMC_MATHFN_H
#define LLMC_MATHFN_H

#include "numerics.h"

#include <math.h>

/* ---- primitives for float; add, sub, mul, div, abs are in numerics.h ---- */

/* fma with one rounding. Without the instruction: the product of two floats is exact in double, TwoSum gives the sum's
 * error, and rounding the double to odd makes its second rounding harmless (Boldo, Melquiond 2008). */
LLMC_INLINE float f32_fma(float a, float b, float c)
{
#if defined(__FMA__) || defined(__aarch64__) || defined(__CUDA_ARCH__)
    return fmaf(a, b, c);
#else
    double product = (double)a * (double)b, sum = product + (double)c;
    double back = sum - product, error = (product - (sum - back)) + ((double)c - back);
    uint64_t bits, error_bits;
    memcpy(&bits, &sum, sizeof bits);
    memcpy(&error_bits, &error, sizeof error_bits);
    if (error != 0 && !(bits & 1) && fabs(sum) < (double)INFINITY) /* inexact and even: to the odd neighbour */
        bits += (bits ^ error_bits) >> 63 ? (uint64_t)-1 : 1;
    memcpy(&sum, &bits, sizeof sum);
    return (float)sum;
#endif
}

LLMC_INLINE float f32_set1(float x) { return x; }
LLMC_INLINE float f32_copysign(float a, float sign)
{
    return f32_from_bits((f32_bits(a) & 0x7fffffffu) | (f32_bits(sign) & 0x80000000u));
}
LLMC_INLINE float f32_less_select(float a, float b, float yes, float no) { return a < b ? yes : no; }
/* 2^n, where `biased` holds n + 1.5 * 2^23 as a float: n sits in its low mantissa bits. */
LLMC_INLINE float f32_exp2_of_biased(float biased) { return f32_from_bits((f32_bits(biased) << 23) + 0x3f800000u); }

/* ---- FP32 functions, once for all widths ---- */

/* exp(x) = 2^n exp(r), n = round(x / ln 2), |r| <= ln 2 / 2; r by Cody-Waite in two parts; exp(r) by a polynomial. */
#define MATHFN_DEFINE_EXP(V, S)                                                                                        \
    LLMC_INLINE V S##_exp(V x)                                                                                         \
    {                                                                                                                  \
        V shift = S##_set1(0x1.8p23f), one = S##_set1(1.0f);                                                           \
        V biased = S##_fma(x, S##_set1(0x1.715476p+0f), shift), n = S##_sub(biased, shift);                            \
        V r = S##_fma(n, S##_set1(-0x1.62e4p-1f), x);                                                                  \
        r = S##_fma(n, S##_set1(-0x1.7f7d1cp-20f), r);                                                                 \
        V p = S##_set1(0x1.6b4e7ap-10f);                                                                               \
        p = S##_fma(p, r, S##_set1(0x1.126a3ep-7f));                                                                   \
        p = S##_fma(p, r, S##_set1(0x1.555a4cp-5f));                                                                   \
        p = S##_fma(p, r, S##_set1(0x1.5554dep-3f));                                                                   \
        p = S##_fma(p, r, S##_set1(0.5f));                                                                             \
        p = S##_fma(p, r, one);                                                                                        \
        p = S##_mul(S##_fma(p, r, one), S##_exp2_of_biased(biased));                                                   \
        p = S##_less_select(x, S##_set1(-87.0f), S##_set1(0.0f), p);                                                   \
        return S##_less_select(S##_set1(88.0f), x, S##_set1(INFINITY), p);                                             \
    }

#define MATHFN_DEFINE_TANH(V, S) /* (1 - e) / (1 + e), e = exp(-2 |x|) */                                              \
    LLMC_INLINE V S##_tanh(V x)                                                                                        \
    {                                                                                                                  \
        V e = S##_exp(S##_mul(S##_set1(-2.0f), S##_abs(x))), one = S##_set1(1.0f);                                     \
        return S##_copysign(S##_div(S##_sub(one, e), S##_add(one, e)), x);                                             \
    }                                                                                                                  \
    LLMC_INLINE V S##_sigmoid(V x)                                                                                     \
    {                                                                                                                  \
        V one = S##_set1(1.0f);                                                                                        \
        return S##_div(one, S##_add(one, S##_exp(S##_sub(S##_set1(0.0f), x))));                                        \
    }

/* GELU, tanh form (Hendrycks, Gimpel 1606.08415): x/2 (1 + tanh(u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
#define MATHFN_DEFINE_GELU(V, S)                                                                                       \
    LLMC_INLINE V S##_gelu_inner(V x)                                                                                  \
    {                                                                                                                  \
        V cubic = S##_mul(S##_mul(S##_set1(0.044715f), x), x);                                                         \
        return S##_mul(S##_set1(0.7978845608f), S##_fma(cubic, x, x));                                                 \
    }                                                                                                                  \
    LLMC_INLINE V S##_gelu(V x)                                                                                        \
    {                                                                                                                  \
        V t = S##_tanh(S##_gelu_inner(x));                                                                             \
        return S##_mul(S##_mul(S##_set1(0.5f), x), S##_add(S##_set1(1.0f), t));                                        \
    }                                                                                                                  \
    LLMC_INLINE V S##_gelu_derivative(V x) /* (1 + t)/2 + x/2 (1 - t^2) u' */                                          \
    {                                                                                                                  \
        V one = S##_set1(1.0f), half = S##_set1(0.5f), t = S##_tanh(S##_gelu_inner(x));                                \
        V slope = S##_fma(S##_mul(S##_set1(3.0f * 0.044715f), x), x, one);                                             \
        V inner = S##_mul(S##_mul(S##_set1(0.7978845608f), slope), S##_fma(S##_sub(S##_set1(0.0f), t), t, one));       \
        return S##_fma(S##_mul(half, x), inner, S##_mul(half, S##_add(one, t)));                                       \
    }

#define MATHFN_DEFINE_FP32(V, S)                                                                                       \
    MATHFN_DEFINE_EXP(V, S)                                                                                            \
    MATHFN_DEFINE_TANH(V, S)                                                                                           \
    MATHFN_DEFINE_GELU(V, S)

MATHFN_DEFINE_FP32(float, f32)

/* ---- FP64 functions: scalar, for tables and for one value a row ---- */

LLMC_INLINE double f64_scale(double x, int exponent) /* x * 2^exponent, result normal */
{
    uint64_t bits = (uint64_t)(1023 + exponent) << 52;
    double power;
    memcpy(&power, &bits, sizeof power);
    return x * power;
}

/* log(x) for normal x > 0: x = 2^e m, m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s), s = (m - 1)/(m + 1). */
LLMC_INLINE double f64_log(double x)
{
    if (!(x > 0)) return x == 0 ? -INFINITY : NAN;
    if (!(x < (double)INFINITY)) return x;
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int e = (int)(bits >> 52) - 1023;
    double m = f64_scale(x, -e);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    double s = (m - 1) / (m + 1), s2 = s * s, sum = 0;
    for (int k = 23; k >= 3; k -= 2) sum = (sum + 1.0 / k) * s2;
    return e * 0x1.62e42fefa39efp-1 + 2 * (s + s * sum);
}

LLMC_INLINE double f64_exp(double x) /* |x| < 700 */
{
    double n = floor(x * 0x1.71547652b82fep+0 + 0.5);
    double r = (x - n * 0x1.62e42feep-1) - n * 0x1.a39ef35793c76p-33, sum = 1;
    for (int k = 14; k >= 1; k--) sum = 1 + sum * r / k;
    return f64_scale(sum, (int)n);
}

/* Both at once; |x| < 2^20. Reduction by pi/2 in three parts of 33 bits, then Taylor series on [-pi/4, pi/4]. */
LLMC_INLINE void f64_sin_cos(double x, double *sine, double *cosine)
{
    double n = floor(x * 0x1.45f306dc9c883p-1 + 0.5);
    double r = ((x - n * 0x1.921fb544p+0) - n * 0x1.0b4611a6p-34) - n * 0x1.3198a2e037073p-69;
    double r2 = r * r, s = 1, c = 1;
    for (int k = 19; k >= 3; k -= 2) s = 1 - s * r2 / ((double)k * (k - 1));
    for (int k = 18; k >= 2; k -= 2) c = 1 - c * r2 / ((double)k * (k - 1));
    s *= r;
    int quadrant = (int)((int64_t)n & 3);
    double turned_s = quadrant & 1 ? c : s, turned_c = quadrant & 1 ? s : c;
    *sine = quadrant & 2 ? -turned_s : turned_s;
    *cosine = quadrant == 1 || quadrant == 2 ? -turned_c : turned_c;
}

LLMC_INLINE double f64_power(double base, int64_t n) /* n >= 0, by squaring */
{
    double power = 1;
    for (; n; n >>= 1, base *= base)
        if (n & 1) power *= base;
    return power;
}

/* Quantile of the standard normal distribution, 0 < p < 1: Wichura's algorithm AS 241, PPND16 (Applied Statistics 37,
 * 1988), about 16 digits. */
LLMC_INLINE double f64_polynomial(const double *coefficient, int degree, double x)
{
    double sum = coefficient[degree];
    for (int k = degree - 1; k >= 0; k--) sum = sum * x + coefficient[k];
    return sum;
}

LLMC_INLINE double f64_inverse_normal(double p)
{
    const double a[8] = {3.3871328727963666080e0,  1.3314166789178437745e+2, 1.9715909503065514427e+3,
                         1.3731693765509461125e+4, 4.5921953931549871457e+4, 6.7265770927008700853e+4,
                         3.3430575583588128105e+4, 2.5090809287301226727e+3};
    const double b[8] = {1.0,
                         4.2313330701600911252e+1,
                         6.8718700749205790830e+2,
                         5.3941960214247511077e+3,
                         2.1213794301586595867e+4,
                         3.9307895800092710610e+4,
                         2.8729085735721942674e+4,
                         5.2264952788528545610e+3};
    const double c[8] = {1.42343711074968357734e0,  4.63033784615654529590e0, 5.76949722146069140550e0,
                         3.64784832476320460504e0,  1.27045825245236838258e0, 2.41780725177450611770e-1,
                         2.27238449892691845833e-2, 7.74545014278341407640e-4};
    const double d[8] = {1.0,
                         2.05319162663775882187e0,
                         1.67638483018380384940e0,
                         6.89767334985100004550e-1,
                         1.48103976427480074590e-1,
                         1.51986665636164571966e-2,
                         5.47593808499534494600e-4,
                         1.05075007164441684324e-9};
    const double e[8] = {6.65790464350110377720e0,  5.46378491116411436990e0,  1.78482653991729133580e0,
                         2.96560571828504891230e-1, 2.65321895265761230930e-2, 1.24266094738807843860e-3,
                         2.71155556874348757815e-5, 2.01033439929228813265e-7};
    const double f[8] = {1.0,
                         5.99832206555887937690e-1,
                         1.36929880922735805310e-1,
                         1.48753612908506148525e-2,
                         7.86869131145613259100e-4,
                         1.84631831751005468180e-5,
                         1.42151175831644588870e-7,
                         2.04426310338993978564e-15};
    double q = p - 0.5;
    if (fabs(q) <= 0.425) {
        double r = 0.180625 - q * q;
        return q * f64_polynomial(a, 7, r) / f64_polynomial(b, 7, r);
    }
    double r = sqrt(-f64_log(q < 0 ? p : 1 - p));
    double x = r <= 5 ? f64_polynomial(c, 7, r - 1.6) / f64_polynomial(d, 7, r - 1.6)
                      : f64_polynomial(e, 7, r - 5) / f64_polynomial(f, 7, r - 5);
    return q < 0 ? -x : x;
}

#endif
