/* The device functions under quantization against nvfp4.h and numerics.h, whose bits they reach by other ways: host
 * bodies of llmc/cuda/ptx.cuh where the GPU has an instruction, everything else the same code as there. Built and run by
 * test_cuda_quantize.sh.
 */
#include "cuda/quantize_block.cuh"
#include "test.h"

static uint64_t random_state = 88172645463325252u;
static uint32_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 16);
}

static int wrong;

/* One value under every random byte, among seven others. */
static void one_stochastic(float x)
{
    static const float OTHER[8] = {0.3f, -6.5f, 1e-30f, 2.9f, -0.0f, 100.0f, -3.7f, 0.75f};
    for (uint32_t r = 0; r < 256; r++) {
        uint32_t word[2] = {random_bits(), random_bits()};
        int place = (int)(r + f32_bits(x)) % 8;
        float y[8], scaled[8];
        word[place / 4] = (word[place / 4] & ~(0xffu << 8 * (place % 4))) | r << 8 * (place % 4);
        for (int i = 0; i < 8; i++) y[i] = i == place ? x : OTHER[i], scaled[i] = f32_mul(y[i], 0x1p-14f);
        uint32_t codes = e2m1x8_stochastic(scaled, word[0], word[1]);
        for (int i = 0; i < 8; i++) {
            uint32_t random8 = word[i / 4] >> 8 * (i % 4) & 0xff;
            wrong += (codes >> 4 * i & 15) != e2m1_from_f32_stochastic(y[i], random8);
        }
    }
}

static void one_nearest(float x)
{
    float y[8];
    if (x != x) x = f32_from_bits(f32_bits(x) | 0x400000); /* quiet, as a product's */
    for (int i = 0; i < 8; i++) y[i] = i % 2 ? -x : x;
    uint32_t codes = e2m1x8_nearest(y);
    for (int i = 0; i < 8; i++) wrong += (codes >> 4 * i & 15) != e2m1_from_f32(y[i]);
}

/* Values near every midpoint and neighbour of 1/256 step, in both signs; all BF16 with random bits below. */
static void each_value(void (*one)(float), int stride)
{
    for (uint32_t b = 0; b < 65536; b += (uint32_t)stride) one(f32_from_bits(b << 16 | (random_bits() & 0xffff)));
    for (int step = 0; step <= 7 * 512; step += stride)
        for (int ulp = -1; ulp <= 1; ulp++) {
            float x = f32_from_bits(f32_bits((float)step / 512.0f) + (uint32_t)ulp);
            one(x);
            one(-x);
        }
    static const uint32_t EDGES[] = {0,          1,          0x80000000, 0x80000001, 0x7f800000, 0xff800000,
                                     0x7fc00000, 0xffc00000, 0x7f800001, 0xffffffff, 0x7f7fffff, 0xff7fffff};
    for (size_t i = 0; i < sizeof EDGES / sizeof *EDGES; i++) one(f32_from_bits(EDGES[i]));
}

/* Every 11 bits that can wait, from magnitudes of all exponents. */
static void test_pow2_factors(void)
{
    test_case("factor of a block, pow2");
    Nvfp4Form form = {ROUND_NEAREST, SCALE_1X16, TENSOR_SCALE_POW2, FOUR_OVER_SIX_OFF, 1};
    Nvfp4Scale tensor = {0, 1, 1, 1, 1};
    wrong = 0;
    for (uint32_t b = 0; b <= 0x7f80; b++) {
        float amax = f32_from_bits(b << 16 | (b < 0x7f80 ? random_bits() & 0xffff : 0)), factor;
        uint32_t kept;
        uint8_t scale = nvfp4_block_scale(amax, &tensor, &form, &factor);
        wrong += f32_bits(encode_factor_pow2(&kept, amax)) != f32_bits(factor);
        wrong += e4m3_from_f32(f32_from_bits(kept << 20)) != scale;
    }
    CHECK(wrong == 0, "%d factors are wrong", wrong);
}

/* All E4M3 scales under decode scales of every exponent. */
static void test_factors(void)
{
    test_case("factor of a block");
    wrong = 0;
    for (uint32_t e = 0; e < 244; e++) /* 2^117: FLT_MAX / 2688 is below */
        for (int i = 0; i < 64; i++) {
            float decode = f32_from_bits(e << 23 | (random_bits() & 0x7fffff));
            for (uint32_t scale = 0; scale < 0x7f; scale++)
                wrong += f32_bits(encode_factor(scale, decode)) != f32_bits(nvfp4_encode_block((uint8_t)scale, decode));
        }
    CHECK(wrong == 0, "%d factors are wrong", wrong);
}

static void test_transform(void)
{
    test_case("transform, with zeros of both signs, huge and tiny values");
    wrong = 0;
    for (int round = 0; round < 20000; round++) {
        float a[16], b[16];
        uint32_t word[16];
        for (int i = 0; i < 16; i++) {
            uint32_t bits = random_bits() & 0xffff0000u;
            if (round % 2) bits = (bits & 0x807f0000u) | 0x3f800000u;
            if (round % 3 == 0 && random_bits() % 2) bits &= 0x80000000u;
            a[i] = f32_from_bits(bits), b[i] = round % 5 ? a[i] * -1.0f : 0.0f;
            word[i] = f32_bits(a[i]) >> 16 | f32_bits(b[i]);
        }
        rht16_rounded(word);
        nvfp4_rht16(a);
        nvfp4_rht16(b);
        for (int i = 0; i < 16; i++) {
            bool nan = a[i] != a[i] || b[i] != b[i];
            wrong += !nan && word[i] != ((uint32_t)bf16_from_f32(a[i]) | (uint32_t)bf16_from_f32(b[i]) << 16);
        }
    }
    CHECK(wrong == 0, "%d pairs are wrong", wrong);
}

static void test_draws(void)
{
    test_case("random bits");
    for (int round = 0; round < 1000; round++) {
        uint64_t seed = (uint64_t)random_bits() << 32 | random_bits();
        uint32_t row = random_bits(), block = random_bits(), step = random_bits(), layer = random_bits() & 0xffff;
        RandomPlace place = random_place(seed, step, 0);
        Philox a = philox_draw(seed, row, block, step, layer, 77, 0);
        Philox b = draw_at(place.key, row, block, step, layer << 16 | 77 << 8);
        if (!CHECK(memcmp(&a, &b, sizeof a) == 0, "of row %u", row)) return;
    }
}

int main(void)
{
    test_case("E2M1 to nearest");
    wrong = 0;
    each_value(one_nearest, 1);
    CHECK(wrong == 0, "%d codes are wrong", wrong);
    test_case("E2M1 stochastically, every random byte");
    wrong = 0;
    each_value(one_stochastic, test_long() ? 1 : 7);
    CHECK(wrong == 0, "%d codes are wrong", wrong);
    test_factors();
    test_pow2_factors();
    test_transform();
    test_draws();
    return test_done();
}
