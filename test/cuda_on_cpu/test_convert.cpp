/* The conversions of CUDA on a CPU against the formats' definitions: nearest by search over all codes, ties to even. */
#include "convert.h"

#include "lt_product.h"

/* The code below or at |x| and the one above: codes are ordered by magnitude. */
static unsigned code_below(double x, int exponent_bits, int mantissa_bits, int bias, unsigned largest)
{
    unsigned low = 0, high = largest;
    while (low < high) {
        unsigned middle = (low + high + 1) / 2;
        if (small_float(middle, exponent_bits, mantissa_bits, bias) <= x)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

static unsigned nearest(float x, int exponent_bits, int mantissa_bits, int bias, unsigned largest)
{
    unsigned sign = signbit(x) ? 1u << (exponent_bits + mantissa_bits) : 0;
    double a = fabs((double)x);
    unsigned low = code_below(a, exponent_bits, mantissa_bits, bias, largest);
    if (low == largest) return sign | low;
    double below = a - small_float(low, exponent_bits, mantissa_bits, bias);
    double above = small_float(low + 1, exponent_bits, mantissa_bits, bias) - a;
    return sign | (below < above || (below == above && low % 2 == 0) ? low : low + 1);
}

static float from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

int main(int argc, char **)
{
    using namespace cuda_on_cpu;
    if (argc > 1) cvt_rs_is_not_emulated(); /* any argument: must end the program with a message */
    test_case("values of all codes");
    for (unsigned code = 0; code < 256; code++) {
        CHECK(e2m1_value((uint8_t)(code & 15)) == small_float(code & 15, 2, 1, 1), "E2M1 %x", code & 15);
        if ((code & 127) < 127) CHECK(e4m3_value((uint8_t)code) == small_float(code, 4, 3, 7), "E4M3 %x", code);
        if ((code & 127) < 124) CHECK(e5m2_value((uint8_t)code) == small_float(code, 5, 2, 15), "E5M2 %x", code);
        if (code < 255) CHECK(ue8m0_value((uint8_t)code) == ldexp(1.0, (int)code - 127), "UE8M0 %x", code);
        uint32_t halves = cvt_rn_f16x2_e2m1x2((uint8_t)code);
        CHECK(small_float(halves & 0xffff, 5, 10, 15) == small_float(code & 15, 2, 1, 1), "low half of %x", code);
        CHECK(small_float(halves >> 16, 5, 10, 15) == small_float(code >> 4, 2, 1, 1), "high half of %x", code);
    }
    CHECK(isnan(e4m3_value(0x7f)) && isnan(e4m3_value(0xff)) && isnan(ue8m0_value(255)), "NaN");

    test_case("nearest, saturating; toward zero");
    for (uint64_t step = 0; step < 1ull << 32; step += test_long() ? 4099 : 40961) {
        float x = from_bits((uint32_t)step), y = from_bits((uint32_t)step * 2654435761u);
        if (isnan(x) || isnan(y)) continue;
        uint8_t fp4 = cvt_rn_satfinite_e2m1x2(x, y);
        CHECK(fp4 == (nearest(x, 2, 1, 1, 7) | nearest(y, 2, 1, 1, 7) << 4), "E2M1 of %a, %a is %x", x, y, fp4);
        uint16_t fp8 = cvt_rn_satfinite_e4m3x2(x, y);
        CHECK(fp8 == (nearest(x, 4, 3, 7, 126) | nearest(y, 4, 3, 7, 126) << 8), "E4M3 of %a, %a is %x", x, y, fp8);
        CHECK(e5m2_code(x) == nearest(x, 5, 2, 15, 123), "E5M2 of %a is %x", x, e5m2_code(x));
        if (isinf(x) || isinf(y)) continue;
        uint32_t halves = cvt_rz_f16x2(x, y);
        unsigned low = code_below(fabs(x), 5, 10, 15, 0x7bff) | (signbit(x) ? 0x8000u : 0);
        CHECK((halves & 0xffff) == low, "FP16 of %a is %x, not %x", x, halves & 0xffff, low);
        if (fabs(x) < 3e38f) CHECK(cvt_rn_bf16x2(x, y) % 65536 == nearest(x, 8, 7, 127, 0x7f7f), "BF16 of %a", x);
    }

    test_case("ties, and the codes of NaN");
    for (unsigned code = 0; code < 7; code++) {
        float tie = (float)(small_float(code, 2, 1, 1) + small_float(code + 1, 2, 1, 1)) / 2;
        CHECK(cvt_rn_satfinite_e2m1x2(tie, -tie) == (code + code % 2) * 0x11 + 0x80, "tie above code %u", code);
    }
    CHECK(cvt_rn_satfinite_e2m1x2(NAN, 1) == 0x27, "E2M1 of NaN is +6: %x", cvt_rn_satfinite_e2m1x2(NAN, 1));
    CHECK(cvt_rn_satfinite_e4m3x2(NAN, 1) == 0x387f, "E4M3 of NaN: %x", cvt_rn_satfinite_e4m3x2(NAN, 1));
    return test_done();
}
