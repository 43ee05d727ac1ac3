/* numerics.h: all 65536 BF16 patterns there and back; rounding to nearest against a definition that compares distances;
 * stochastic rounding over all 65536 random values: the chance of rounding up is exactly the fraction. E4M3 and E2M1
 * the same way: every code, every BF16 value, both sides of every boundary, against a search for the nearest value in
 * FP64; E2M1's chance of rounding up is counted over its 256 random bytes.
 */
#include "numerics.h"
#include "common.h"
#include "mathfn.h"
#include "philox.h"
#include "test.h"

static bool is_nan_bf16(uint16_t b) { return (b & 0x7f80) == 0x7f80 && b & 0x7f; }

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

static void test_round_trip(void)
{
    test_case("every BF16 pattern survives decoding and encoding; NaN stays NaN with its sign");
    for (uint32_t b = 0; b < 65536; b++) {
        float x = bf16_to_f32((uint16_t)b);
        uint16_t back = bf16_from_f32(x);
        CHECK(f32_bits(x) == b << 16, "%04x decodes to %08x", b, f32_bits(x));
        if (is_nan_bf16((uint16_t)b))
            CHECK(isnan(x) && back == (b | 0x40), "NaN %04x comes back as %04x", b, back);
        else
            CHECK(back == b, "%04x comes back as %04x", b, back);
    }
    for (uint32_t payload = 1; payload < 0x800000; payload += 37)
        for (uint32_t sign = 0; sign < 2; sign++) {
            float x = f32_from_bits(sign << 31 | 0x7f800000 | payload);
            uint16_t nearest = bf16_from_f32(x), random = bf16_from_f32_stochastic(x, payload & 0xffff);
            CHECK(is_nan_bf16(nearest) && nearest >> 15 == sign, "NaN %08x became %04x", f32_bits(x), nearest);
            CHECK(random == nearest, "NaN %08x became %04x at random", f32_bits(x), random);
        }
}

/* The value of a pattern, where what follows the largest finite one stands for 2^128: so that overflow rounds as IEEE
 * says. */
static double value(uint16_t b)
{
    if ((b & 0x7fff) == 0x7f80) return b >> 15 ? -0x1p128 : 0x1p128;
    return (double)bf16_to_f32(b);
}

/* The nearer of the two neighbours by distance in FP64, which is exact; at a tie the even one. */
static uint16_t nearest(float x)
{
    uint16_t below = (uint16_t)(f32_bits(x) >> 16), above = (uint16_t)(below + 1); /* by magnitude */
    if ((below & 0x7fff) == 0x7f80) return below;
    double down = fabs((double)x - value(below)), up = fabs(value(above) - (double)x);
    return down < up || (down == up && !(below & 1)) ? below : above;
}

static void one_rounding(uint32_t bits)
{
    float x = f32_from_bits(bits);
    if (isnan(x)) return;
    CHECK(bf16_from_f32(x) == nearest(x), "%08x rounds to %04x, not %04x", bits, bf16_from_f32(x), nearest(x));
}

static void test_nearest(void)
{
    static const uint32_t EDGE[] = {0, 1, 2, 0x7ffe, 0x7fff, 0x8000, 0x8001, 0x8002, 0xfffe, 0xffff};
    test_case("rounding to nearest even: around every boundary, and random patterns");
    for (uint32_t b = 0; b < 65536; b++)
        for (size_t e = 0; e < sizeof EDGE / sizeof *EDGE; e++) one_rounding(b << 16 | EDGE[e]);
    for (int i = 0; i < 1000000 * (test_long() ? 50 : 1); i++) one_rounding((uint32_t)random_bits());
    CHECK(bf16_from_f32(3.4e38f) == 0x7f80 && bf16_from_f32(-3.4e38f) == 0xff80, "overflow");
    CHECK(bf16_from_f32(0x1p-134f) == 0 && bf16_from_f32(0x1.8p-134f) == 1, "denormals round like others");
    CHECK(bf16_from_f32(-0.0f) == 0x8000 && bf16_from_f32(-0x1p-140f) == 0x8000, "zero keeps its sign");
}

/* All 65536 random values for one x: how many go up, and what they come to on average. */
static void one_stochastic(float x)
{
    uint16_t below = (uint16_t)(f32_bits(x) >> 16), above = (uint16_t)(below + 1);
    int64_t up = 0, other = 0;
    double sum = 0, squares = 0;
    for (uint32_t random = 0; random < 65536; random++) {
        uint16_t b = bf16_from_f32_stochastic(x, random);
        double error = value(b) - (double)x;
        if (b == above)
            up++;
        else if (b != below)
            other++;
        sum += error;
        squares += error * error;
    }
    double ulp = value(above) - value(below), fraction = ((double)x - value(below)) / ulp;
    CHECK(other == 0, "%a became something else than its neighbours", (double)x);
    CHECK((double)up == fraction * 65536, "%a goes up %lld times of 65536, not %.17g", (double)x, (long long)up,
          fraction * 65536);
    CHECK(fabs(sum / 65536) <= 1e-12 * fabs(ulp), "%a has mean error %g", (double)x, sum / 65536);
    double variance = fraction * (1 - fraction) * ulp * ulp;
    CHECK(fabs(squares / 65536 - variance) <= 1e-9 * ulp * ulp, "%a has variance %g, not %g", (double)x,
          squares / 65536, variance);
}

static void test_stochastic(void)
{
    static const float EDGES[] = {1.0f,       1.0039f,         -1.0039f,  0x1.fffffep0f, 0x1.fep0f,     3.3e38f,
                                  -3.395e38f, 0x1.fffffep127f, 0x1p-126f, 0x1.8p-130f,   -0x1p-149f,    0.0f,
                                  -0.0f,      0.3333f,         1e-20f,    -7e15f,        0x1.000002p0f, 0x1.fdfffep0f};
    test_case("stochastic rounding: P(up) is exactly the fraction, mean and variance are those of one draw");
    for (size_t i = 0; i < sizeof EDGES / sizeof *EDGES; i++) one_stochastic(EDGES[i]);
    for (int i = 0; i < (test_long() ? 2000 : 60); i++) {
        uint32_t bits = (uint32_t)random_bits();
        if ((bits & 0x7f800000) != 0x7f800000) one_stochastic(f32_from_bits(bits));
    }
    test_case("stochastic rounding: what BF16 can hold never moves, Inf stays");
    for (uint32_t b = 0; b < 65536; b++)
        for (uint32_t random = 0; random < 65536; random += 4369)
            if (!is_nan_bf16((uint16_t)b))
                CHECK(bf16_from_f32_stochastic(bf16_to_f32((uint16_t)b), random) == b, "%04x moved", b);
}

/* 1/50 ulp at a time: to nearest nothing ever happens; at random the weight drifts as it should. */
static void test_small_updates(void)
{
    enum { WEIGHTS = 400, STEPS = 1000 };
    double sum = 0, squares = 0;
    test_case("an update of 1/50 ulp survives on average");
    for (uint32_t w = 0; w < WEIGHTS; w++) {
        uint16_t at_random = 0x3f80, to_nearest = 0x3f80; /* 1, ulp 2^-7 */
        for (uint32_t step = 0; step < STEPS; step++) {
            Philox draw = philox_draw(1, w, 0, step, 0, ROLE_MASTER, 0);
            float update = 0x1p-7f / 50;
            at_random = bf16_from_f32_stochastic(bf16_to_f32(at_random) + update, draw.word[0] & 0xffff);
            to_nearest = bf16_from_f32(bf16_to_f32(to_nearest) + update);
        }
        double moved = ((double)bf16_to_f32(at_random) - 1) * 128;
        sum += moved;
        squares += moved * moved;
        CHECK(to_nearest == 0x3f80, "to nearest moved to %04x", to_nearest);
    }
    /* each weight: 1000 draws of chance 1/50, mean 20 ulp, variance 19.6; the mean of 400 has a deviation of 0.22 */
    double mean = sum / WEIGHTS, variance = squares / WEIGHTS - mean * mean;
    CHECK(fabs(mean - 20) < 5 * 0.2214, "moved by %.3f ulp on average, not 20", mean);
    CHECK(fabs(variance - 19.6) < 5 * 19.6 * sqrt(2.0 / WEIGHTS), "variance %.3f, not 19.6", variance);
    printf("measured 1000 updates of 1/50 ulp: %.2f ulp on average, variance %.1f (expected 20, 19.6)\n", mean,
           variance);
}

/* ---- E4M3 and E2M1: their values as their standards print them, and the nearest one by search ---- */

static double e4m3_magnitude(int byte)
{
    int exponent = byte >> 3, mantissa = byte & 7;
    return exponent ? ldexp(1 + mantissa / 8.0, exponent - 7) : ldexp(mantissa, -9);
}

static double e2m1_magnitude(int code)
{
    static const double VALUES[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return VALUES[code];
}

/* Of `count` increasing magnitudes the nearest to |x|; at a tie the one with the even code. */
static int nearest_code(double x, double (*magnitude)(int code), int count)
{
    int best = 0;
    double a = fmin(fabs(x), 1024); /* beyond both formats; below it FP64 tells every distance */
    for (int code = 1; code < count; code++) {
        double gain = fabs(a - magnitude(best)) - fabs(a - magnitude(code));
        if (gain > 0 || (gain == 0 && code % 2 == 0)) best = code;
        if (gain < 0) break;
    }
    return best;
}

static void one_e4m3(float x)
{
    uint8_t code = e4m3_from_f32(x);
    int expected = isnan(x) ? 0x7f : nearest_code(x, e4m3_magnitude, 0x7f);
    if (signbit(x) && !isnan(x)) expected |= 0x80;
    CHECK(code == expected, "%08x (%a) becomes %02x, not %02x", f32_bits(x), (double)x, code, expected);
}

static void one_e2m1(float x)
{
    uint8_t code = e2m1_from_f32(x);
    int expected = isnan(x) ? 7 : nearest_code(x, e2m1_magnitude, 8);
    if (signbit(x) && !isnan(x)) expected |= 8;
    CHECK(code == expected, "%08x (%a) becomes %x, not %x", f32_bits(x), (double)x, code, expected);
}

/* What decides a rounding: every value, every middle between two, and what lies up to two FP32 steps beside them. */
static void around_boundaries(void (*one)(float x), double (*magnitude)(int code), int count)
{
    for (int code = 0; code < count; code++)
        for (int half = 0; half < 2; half++) {
            double next = code + 1 < count ? magnitude(code + 1) : 2 * magnitude(code) - magnitude(code - 1);
            float boundary = (float)(half ? (magnitude(code) + next) / 2 : magnitude(code));
            for (int ulps = -2; ulps <= 2; ulps++) {
                float x = f32_from_bits((f32_bits(boundary) + (uint32_t)ulps) & 0x7fffffff);
                one(x);
                one(-x);
            }
        }
}

static void all_values(void (*one)(float x))
{
    for (uint32_t b = 0; b < 65536; b++) one(bf16_to_f32((uint16_t)b));
    for (int i = 0; i < 100000 * (test_long() ? 50 : 1); i++) one(f32_from_bits((uint32_t)random_bits()));
    for (int i = 0; i < 100000; i++) /* exponents that are in range: 2^-12 .. 2^11 */
        one(f32_from_bits((uint32_t)(random_bits() & 0x807fffff) | (uint32_t)(115 + random_bits() % 24) << 23));
    static const uint32_t EDGE[] = {0,          1,          0x7fffff,   0x800000,  0x7f7fffff,
                                    0x7f800000, 0x7f800001, 0x7fc00000, 0x7fffffff};
    for (size_t e = 0; e < sizeof EDGE / sizeof *EDGE; e++) {
        one(f32_from_bits(EDGE[e]));
        one(f32_from_bits(EDGE[e] | 0x80000000));
    }
}

static void test_e4m3(void)
{
    test_case("E4M3: all 256 codes decode to what the standard says");
    for (int b = 0; b < 256; b++) {
        float x = e4m3_to_f32((uint8_t)b);
        if ((b & 0x7f) == 0x7f)
            CHECK(isnan(x), "%02x decodes to %a", b, (double)x);
        else
            CHECK(fabs((double)x) == e4m3_magnitude(b & 0x7f) && !signbit(x) == !(b & 0x80), "%02x decodes to %a", b,
                  (double)x);
    }
    CHECK(e4m3_to_f32(0x7e) == 448 && e4m3_to_f32(1) == 0x1p-9f && e4m3_to_f32(8) == 0x1p-6f, "landmarks");
    test_case("E4M3: all BF16 values and both sides of every boundary go to the nearest; saturation; NaN is 7F");
    all_values(one_e4m3);
    around_boundaries(one_e4m3, e4m3_magnitude, 0x7f);
    CHECK(e4m3_from_f32(449) == 0x7e && e4m3_from_f32(-1e30f) == 0xfe && e4m3_from_f32(-NAN) == 0x7f, "the ends");
}

static void test_e2m1(void)
{
    test_case("E2M1: all 16 codes decode to what the standard says");
    for (int code = 0; code < 16; code++) {
        float x = e2m1_to_f32((uint8_t)code);
        CHECK(fabs((double)x) == e2m1_magnitude(code & 7) && !signbit(x) == !(code & 8), "%x: %a", code, (double)x);
    }
    test_case("E2M1: all BF16 values and both sides of every boundary go to the nearest; NaN is +6, -0 is 8");
    all_values(one_e2m1);
    around_boundaries(one_e2m1, e2m1_magnitude, 8);
    CHECK(e2m1_from_f32(NAN) == 7 && e2m1_from_f32(-NAN) == 7, "NaN of both signs");
    CHECK(e2m1_from_f32(-0.0f) == 8 && e2m1_from_f32(-0x1p-149f) == 8 && e2m1_from_f32(-INFINITY) == 15, "signs");
}

/* All 256 random bytes for one x: only the two neighbours appear, up floor(256 f) times and with the largest bytes. */
static void one_e2m1_stochastic(float x)
{
    int sign = signbit(x) && !isnan(x) ? 8 : 0, below = 7, up = 0, expected = 0, other = 0, down_after_up = 0;
    double a = fabs((double)x);
    if (a < 6) {
        for (below = 0; e2m1_magnitude(below + 1) <= a;) below++;
        double lower = e2m1_magnitude(below);
        expected = (int)floor(256 * (a - lower) / (e2m1_magnitude(below + 1) - lower));
    }
    for (uint32_t random = 0; random < 256; random++) {
        int code = e2m1_from_f32_stochastic(x, random);
        if (code == (sign | (below + 1)) && below < 7)
            up++;
        else if (code != (sign | below))
            other++;
        else if (up)
            down_after_up++;
    }
    CHECK(up == expected && !other && !down_after_up, "%08x (%a) goes up %d times of 256, not %d; elsewhere %d times",
          f32_bits(x), (double)x, up, expected, other);
}

static void test_e2m1_stochastic(void)
{
    test_case("E2M1 stochastic: every BF16 value goes up for floor(256 f) of 256 random bytes");
    for (uint32_t b = 0; b < 65536; b++) one_e2m1_stochastic(bf16_to_f32((uint16_t)b));
    test_case("E2M1 stochastic: both sides of every step of the chance; grid points never move; -0, Inf, NaN");
    for (int code = 0; code < 7; code++)
        for (int k = 0; k < 256; k++)
            for (int ulps = -1; ulps <= 1; ulps++) {
                double lower = e2m1_magnitude(code), x = lower + (e2m1_magnitude(code + 1) - lower) * k / 256;
                uint32_t bits = (f32_bits((float)x) + (uint32_t)ulps) & 0x7fffffff;
                one_e2m1_stochastic(f32_from_bits(bits));
                one_e2m1_stochastic(f32_from_bits(bits | 0x80000000));
            }
    for (int i = 0; i < 20000 * (test_long() ? 50 : 1); i++) {
        uint64_t r = random_bits();
        one_e2m1_stochastic(f32_from_bits((uint32_t)(r & 0x807fffff) | (uint32_t)(120 + (r >> 32) % 10) << 23));
    }
    for (uint32_t random = 0; random < 256; random++) {
        for (uint8_t code = 0; code < 16; code++)
            CHECK(e2m1_from_f32_stochastic(e2m1_to_f32(code), random) == code, "grid point %x moved", code);
        CHECK(e2m1_from_f32_stochastic(NAN, random) == 7 && e2m1_from_f32_stochastic(-NAN, random) == 7, "NaN");
        CHECK(e2m1_from_f32_stochastic(-7.0f, random) == 15 && e2m1_from_f32_stochastic(INFINITY, random) == 7, "ends");
    }
}

static void test_one_operation(void)
{
    test_case("f32_min and f32_max pass over NaN in the first place; f32_abs clears the sign of everything");
    CHECK(f32_max(NAN, 2) == 2 && f32_min(NAN, 2) == 2 && f32_max(INFINITY, 2) > 1e38f, "NaN and Inf");
    CHECK(f32_max(1, 2) == 2 && f32_max(2, 1) == 2 && f32_min(1, 2) == 1 && f32_min(2, 1) == 1, "order");
    CHECK(f32_bits(f32_abs(-0.0f)) == 0 && f32_bits(f32_abs(f32_from_bits(0xffc00001))) == 0x7fc00001, "f32_abs");
    CHECK(f32_add(1, 0x1p-24f) == 1 && f32_sub(1, 3) == -2 && f32_mul(3, 0.5f) == 1.5f && f32_div(1, 4) == 0.25f,
          "1+1");
}

int main(void)
{
    test_round_trip();
    test_nearest();
    test_stochastic();
    test_small_updates();
    test_e4m3();
    test_e2m1();
    test_e2m1_stochastic();
    test_one_operation();
    return test_done();
}
