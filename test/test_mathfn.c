/* mathfn.h: how far each function is from the truth (libm in higher precision, or finite differences), what it does at
 * its edges, and that fma without the instruction is fma. The figures in the header's comment are the bounds here.
 */
#include "mathfn.h"
#include "common.h"
#include "test.h"

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static double uniform(double low, double high)
{
    return low + (high - low) * ((double)(random_bits() >> 11) * 0x1p-53);
}

typedef struct {
    double error, at;
} Worst;

static void worse(Worst *worst, double error, double at)
{
    if (error > worst->error || error != error) *worst = (Worst){error == error ? error : (double)INFINITY, at};
}

static void report(const char *name, const Worst *worst, double bound, const char *unit)
{
    CHECK(worst->error <= bound, "%s is %.4g %s off at %.9g, bound %.4g", name, worst->error, unit, worst->at, bound);
    printf("measured %s: %.3g %s (at %.6g)\n", name, worst->error, unit, worst->at);
}

/* ---- FP32 ---- */

/* Every `stride`-th float of [low, high], of one sign. */
static void sweep(float low, float high, uint32_t stride, void (*one)(float x, Worst *worst), Worst *worst)
{
    for (uint32_t bits = f32_bits(low); bits < f32_bits(high); bits += stride) one(f32_from_bits(bits), worst);
    one(high, worst);
}

static void exp_error(float x, Worst *worst)
{
    double exact = exp((double)x), ulp = ldexp(1, ilogb(exact) - 23);
    worse(worst, fabs((double)f32_exp(x) - exact) / ulp, (double)x);
}

static void tanh_error(float x, Worst *worst) { worse(worst, fabs((double)f32_tanh(x) - tanh((double)x)), (double)x); }

static void sigmoid_error(float x, Worst *worst)
{
    double exact = 1 / (1 + exp(-(double)x));
    worse(worst, fabs((double)f32_sigmoid(x) - exact) / (x > -87 ? exact : 1), (double)x);
}

static double gelu(double x) { return x / 2 * (1 + tanh(sqrt(2 / acos(-1.0)) * (x + 0.044715 * x * x * x))); }

static void gelu_error(float x, Worst *worst)
{
    double scale = fmax(1, fabs((double)x));
    worse(worst, fabs((double)f32_gelu(x) - gelu((double)x)) / scale, (double)x);
}

/* Against differences of the function itself in FP64: independent of the derivative's formula. */
static void gelu_slope_error(float x, Worst *worst)
{
    double h = 1e-5 * fmax(1, fabs((double)x)), slope = (gelu((double)x + h) - gelu((double)x - h)) / (2 * h);
    worse(worst, fabs((double)f32_gelu_derivative(x) - slope) / fmax(1, fabs((double)x)), (double)x);
}

static void test_exp(void)
{
    uint32_t stride = test_long() ? 31 : 607;
    Worst worst = {0, 0};
    test_case("exp of FP32: within 1.5 ulp from -87 to 88, 0 below, Inf above, NaN stays");
    sweep(0.0f, 88.0f, stride, exp_error, &worst);
    sweep(-0.0f, -87.0f, stride, exp_error, &worst);
    report("exp", &worst, 1.5, "ulp");
    CHECK(f32_exp(0.0f) == 1 && f32_exp(-0.0f) == 1, "exp(0) is %a", (double)f32_exp(0.0f));
    for (float x = nextafterf(-87, -INFINITY); x > -INFINITY; x *= 1.5f)
        CHECK(f32_bits(f32_exp(x)) == 0, "exp(%g) is %a, not 0", (double)x, (double)f32_exp(x));
    for (float x = nextafterf(88, INFINITY); x < INFINITY; x *= 1.5f)
        CHECK(f32_exp(x) == INFINITY, "exp(%g) is %a, not Inf", (double)x, (double)f32_exp(x));
    CHECK(f32_bits(f32_exp(-INFINITY)) == 0 && f32_exp(INFINITY) == INFINITY, "infinite arguments");
    CHECK(isnan(f32_exp(NAN)) && isnan(f32_exp(-NAN)), "NaN");
    for (uint32_t bits = 1; bits < 0x800000; bits += 9973)
        CHECK(f32_exp(f32_from_bits(bits)) == 1, "exp of the denormal %a", (double)f32_from_bits(bits));
}

static void test_tanh(void)
{
    uint32_t stride = test_long() ? 53 : 1511;
    Worst t = {0, 0}, s = {0, 0}, g = {0, 0}, d = {0, 0};
    test_case("tanh, sigmoid, GELU and its derivative");
    sweep(0.0f, 100.0f, stride, tanh_error, &t);
    sweep(-0.0f, -100.0f, stride, tanh_error, &t);
    sweep(0.0f, 100.0f, stride, sigmoid_error, &s);
    sweep(-0.0f, -100.0f, stride, sigmoid_error, &s);
    sweep(0.0f, 30.0f, stride, gelu_error, &g);
    sweep(-0.0f, -30.0f, stride, gelu_error, &g);
    sweep(0.0f, 30.0f, stride * 3, gelu_slope_error, &d);
    sweep(-0.0f, -30.0f, stride * 3, gelu_slope_error, &d);
    report("tanh", &t, 0x1p-23, "absolute");
    report("sigmoid", &s, 0x1p-22, "relative");
    report("gelu", &g, 0x1p-22, "of max(1, |x|)");
    report("gelu_derivative", &d, 0x1p-21, "of max(1, |x|)");
    CHECK(f32_tanh(INFINITY) == 1 && f32_tanh(-INFINITY) == -1 && f32_sigmoid(-INFINITY) == 0, "infinite arguments");
    CHECK(f32_sigmoid(INFINITY) == 1 && f32_sigmoid(0) == 0.5f, "sigmoid of Inf and 0");
    CHECK(f32_bits(f32_tanh(-0.0f)) == 0x80000000u && f32_bits(f32_tanh(0.0f)) == 0, "tanh keeps the sign of zero");
    CHECK(isnan(f32_tanh(NAN)) && isnan(f32_sigmoid(NAN)) && isnan(f32_gelu(NAN)) && isnan(f32_gelu_derivative(NAN)),
          "NaN");
    for (float x = 10; x < 1e18f; x *= 3) {
        CHECK(f32_gelu(x) == x && f32_gelu(-x) == 0, "gelu(+-%g)", (double)x);
        CHECK(f32_gelu_derivative(x) == 1 && f32_gelu_derivative(-x) == 0, "gelu'(+-%g)", (double)x);
    }
}

/* ---- fma: in this file, built without -mfma, the software form ---- */

static float random_float(int class)
{
    uint32_t bits = (uint32_t)random_bits();
    switch (class) {
    case 0: /* any */
        return f32_from_bits(bits);
    case 1: /* few mantissa bits: exact products, ties */
        return f32_from_bits((bits & 0x80fc0000u) | (100 + bits % 56) << 23);
    case 2: /* products and sums around the denormals */
        return f32_from_bits((bits & 0x807fffffu) | (50 + bits % 30) << 23);
    case 3: /* around overflow */
        return f32_from_bits((bits & 0x807fffffu) | (180 + bits % 20) << 23);
    default: {
        static const uint32_t SPECIAL[] = {0,          0x80000000u, 1,           0x007fffffu, 0x00800000u, 0x7f7fffffu,
                                           0x7f800000, 0xff800000u, 0x7fc00000u, 0x3f800000u, 0xbf800000u, 0x33800000u};
        return f32_from_bits(SPECIAL[bits % 12]);
    }
    }
}

static void one_fma(float a, float b, float c)
{
    float got = f32_fma(a, b, c), expected = fmaf(a, b, c);
    CHECK(f32_bits(got) == f32_bits(expected) || (got != got && expected != expected), "fma(%a, %a, %a) is %a, not %a",
          (double)a, (double)b, (double)c, (double)got, (double)expected);
}

static void test_fma(void)
{
    test_case("fma of FP32 equals the library's on hostile inputs");
    for (int i = 0; i < 1000000 * (test_long() ? 4 : 1); i++) {
        uint64_t r = random_bits();
        int class = (int)(r % 5);
        float a = random_float(class), b = random_float(r >> 8 & 1 ? class : 1), c = random_float((int)(r >> 16) % 5);
        one_fma(a, b, c);
        /* a sum just beside a tie of the product: where rounding twice goes wrong */
        float product = a * b, half = ldexpf(product, -24), hair = ldexpf(c, -60);
        one_fma(1.0f, product, half);
        one_fma(a, b, r >> 40 & 1 ? half : -half);
        one_fma(a, b, -product);
        one_fma(a, b, hair);
    }
    for (uint32_t i = 0; i < 4096; i++) { /* exact ties, one bit beside them, denormal results */
        float a = f32_from_bits(0x3f800000u + i * 2047), tiny = ldexpf(1, -149);
        one_fma(a, ldexpf(1, -149 - (int)(i % 3)), (float)(i % 7) * tiny);
        one_fma(a, 0.5f, ldexpf(1, 23 - (int)(i % 48)));
        one_fma(ldexpf(a, 63), ldexpf(a, 64), i % 2 ? -3e38f : 3e38f);
    }
}

/* ---- FP64 ---- */

static double relative(double got, long double exact)
{
    return exact == 0 ? fabs(got) : (double)fabsl(((long double)got - exact) / exact);
}

static void test_log_exp(void)
{
    Worst log_worst = {0, 0}, exp_worst = {0, 0};
    test_case("log and exp of FP64");
    for (int i = 0; i < 400000 * (test_long() ? 4 : 1); i++) {
        double x = i % 2 ? ldexp(uniform(1, 2), (int)(random_bits() % 2000) - 1000) : uniform(0.4, 2.5);
        worse(&log_worst, relative(f64_log(x), logl((long double)x)), x);
        double y = i % 2 ? uniform(-699.9, 699.9) : uniform(-3, 3);
        worse(&exp_worst, relative(f64_exp(y), expl((long double)y)), y);
    }
    for (double x = 1 - 0x1p-20; x < 1 + 0x1p-20; x += 0x1p-33)
        worse(&log_worst, relative(f64_log(x), logl((long double)x)), x);
    report("f64_log", &log_worst, 4e-16, "relative");
    report("f64_exp", &exp_worst, 4e-16, "relative");
    CHECK(f64_log(1) == 0 && f64_exp(0) == 1, "log 1, exp 0");
    CHECK(f64_log(0) == (double)-INFINITY && isnan(f64_log(-1)) && isnan(f64_log((double)NAN)), "log at its edges");
    CHECK(f64_log((double)INFINITY) == (double)INFINITY, "log Inf");
}

static void test_sin_cos(void)
{
    Worst worst = {0, 0}, identity = {0, 0};
    test_case("sin and cos of FP64, |x| < 2^20");
    for (int i = 0; i < 300000 * (test_long() ? 4 : 1); i++) {
        double x = i % 3 == 0 ? uniform(-1048575, 1048575) : i % 3 == 1 ? uniform(-10, 10) : floor(uniform(0, 1048575));
        if (i % 7 == 0) x = (double)(int64_t)(x / 1.5) * 1.5707963267948966; /* beside a multiple of pi / 2 */
        double s, c;
        f64_sin_cos(x, &s, &c);
        worse(&worst, (double)fabsl((long double)s - sinl((long double)x)), x);
        worse(&worst, (double)fabsl((long double)c - cosl((long double)x)), x);
        worse(&identity, fabs(s * s + c * c - 1), x);
    }
    report("f64_sin_cos", &worst, 4e-16, "absolute");
    report("sin^2 + cos^2 - 1", &identity, 1e-15, "absolute");
}

static void test_power(void)
{
    Worst worst = {0, 0};
    test_case("integer powers: relative error below one ulp a squaring");
    for (int i = 0; i < 100000; i++) {
        double base = uniform(0.5, 1.0);
        int64_t n = (int64_t)(random_bits() % 300);
        long double exact = powl((long double)base, (long double)n);
        if (exact > 1e-290L) worse(&worst, relative(f64_power(base, n), exact) / (double)(n + 1), base);
    }
    report("f64_power", &worst, 0x1p-52, "relative, of n + 1");
    CHECK(f64_power(0.9, 0) == 1 && f64_power(0.9, 1) == 0.9 && f64_power(3, 4) == 81 && f64_power(-2, 3) == -8,
          "exact");
    CHECK(f64_power(0.9999, 1000000) > 0 && f64_power(0.9, 1000000) == 0, "underflow is zero");
}

/* x is right when p(x) = erfc(-x / sqrt 2) / 2 is p: the error of x is (p(x) - p) / density(x). */
static double quantile_error(double p, double x)
{
    long double density = expl(-(long double)x * x / 2) / sqrtl(2 * acosl(-1.0L));
    long double back = erfcl((long double)fabs(x) / sqrtl(2.0L)) / 2; /* of the smaller tail: no cancellation */
    long double tail = p < 0.5 ? (long double)p : 1 - (long double)p;
    if (x == 0) return p == 0.5 ? 0 : 1;
    if (fabs(p - 0.5) < 0.4) /* near the middle the other side is exact */
        return (double)fabsl((erfl((long double)x / sqrtl(2.0L)) / 2 - ((long double)p - 0.5L)) / density / x);
    return (double)fabsl((back - tail) / density / x);
}

static void test_inverse_normal(void)
{
    Worst worst = {0, 0};
    test_case("inverse of the normal distribution");
    for (int i = 0; i < 300000 * (test_long() ? 4 : 1); i++) {
        double p = i % 3 == 0   ? ((double)(uint32_t)random_bits() + 0.5) * 0x1p-32
                   : i % 3 == 1 ? exp(uniform(-690, -0.7))
                                : 0.5 + (i & 8 ? 1 : -1) * exp(uniform(-30, -0.7));
        worse(&worst, quantile_error(p, f64_inverse_normal(p)), p);
    }
    report("f64_inverse_normal", &worst, 1e-15, "relative");
    CHECK(f64_inverse_normal(0.5) == 0, "the median");
    for (uint32_t i = 0; i < 1000; i++) {
        double p = ((double)(i * 2147483u) + 0.5) * 0x1p-32;
        CHECK(f64_inverse_normal(p) == -f64_inverse_normal(1 - p), "not symmetric at %.17g", p);
        CHECK(f64_inverse_normal(p) < f64_inverse_normal(p + 0x1p-32), "not increasing at %.17g", p);
    }
    CHECK(fabs(f64_inverse_normal(0.975) - 1.959963984540054) < 4e-15, "97.5%%: %.17g", f64_inverse_normal(0.975));
    CHECK(fabs(f64_inverse_normal(0x1p-33) + 6.337957754553789) < 1e-14, "2^-33: %.17g", f64_inverse_normal(0x1p-33));
}

int main(void)
{
    test_exp();
    test_tanh();
    test_fma();
    test_log_exp();
    test_sin_cos();
    test_power();
    test_inverse_normal();
    return test_done();
}
