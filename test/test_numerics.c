/* numerics.h: all 65536 BF16 patterns there and back; rounding to nearest against a definition that compares distances;
 * stochastic rounding over all 65536 random values: the chance of rounding up is exactly the fraction.
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

int main(void)
{
    test_round_trip();
    test_nearest();
    test_stochastic();
    test_small_updates();
    return test_done();
}
