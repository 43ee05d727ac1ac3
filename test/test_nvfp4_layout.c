/* nvfp4.h: what stands around the quantizer. The tiles in which tensor cores read block scales, walked byte by byte; the
 * random Hadamard transform against its definition by double loops, and its bits against a recursion written here.
 *
 * Known mistakes of other implementations that have a case here: tiles from unpadded sizes, a stride or a count of tiles
 * rounded down, padding left uninitialized, a butterfly that overflows, signs that differ from call to call.
 */
#include <math.h>

#include "nvfp4.h"
#include "test.h"

static uint64_t random_state = 88172645463325252u;
static uint64_t random_bits(void)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}
static float random_value(void) { return (float)((double)(int64_t)random_bits() * 0x1p-63); }

/* Walks the tiles byte by byte, as the cuBLAS documentation draws them. */
static void test_tiles(void)
{
    static const int SIZES[][2] = {{1, 1},   {16, 3},  {32, 4},  {127, 4}, {128, 4},
                                   {129, 5}, {144, 8}, {300, 7}, {257, 1}};
    enum { LARGEST = 3 * 128 * 8 };
    static uint8_t scales[LARGEST], tiles[LARGEST + 1];
    test_case("tiles of block scales: each in its place, rows padded to 128 and block columns to 4 with zeros");
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++) {
        int rows = SIZES[s][0], blocks = SIZES[s][1], at = 0, wrong = 0;
        for (int i = 0; i < rows * blocks; i++) scales[i] = (uint8_t)(1 + random_bits() % 255);
        memset(tiles, 0xaa, sizeof tiles);
        nvfp4_tile_scales(tiles, scales, rows, blocks);
        for (int row0 = 0; row0 < rows; row0 += 128)
            for (int block0 = 0; block0 < blocks; block0 += 4)
                for (int lane = 0; lane < 32; lane++)
                    for (int quarter = 0; quarter < 4; quarter++)
                        for (int column = 0; column < 4; column++, at++) {
                            int r = row0 + quarter * 32 + lane, b = block0 + column;
                            wrong += tiles[at] != (r < rows && b < blocks ? scales[r * blocks + b] : 0);
                            wrong += nvfp4_tile_offset(r, b, blocks) != (size_t)at;
                        }
        CHECK(wrong == 0, "%d x %d: %d bytes or offsets are wrong", rows, blocks, wrong);
        CHECK(nvfp4_tile_bytes(rows, blocks) == (size_t)at && tiles[at] == 0xaa, "%d x %d: size", rows, blocks);
    }
}

/* ---- the Hadamard transform ---- */

static const int SIGNS[16] = {1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1}; /* TransformerEngine's */

/* Entry (i, j) of diag(signs) H16 / 4; H2n = (H H; H -H). */
static double rht_entry(int i, int j)
{
    int sign = SIGNS[i];
    for (int bit = 1; bit < 16; bit *= 2)
        if (i & bit && j & bit) sign = -sign;
    return 0.25 * sign;
}

/* The unsigned transform of n values, each half on its own and then their sums and differences. */
static void halves(float *y, int n)
{
    if (n == 1) return;
    halves(y, n / 2);
    halves(y + n / 2, n / 2);
    for (int i = 0; i < n / 2; i++) {
        float sum = y[i] + y[i + n / 2], gap = y[i] - y[i + n / 2];
        y[i] = sum;
        y[i + n / 2] = gap;
    }
}

/* To 8 significant bits, in FP64. */
static double bf16_exact(double y)
{
    int exponent;
    frexp(y, &exponent);
    return ldexp(rint(ldexp(y, 8 - exponent)), exponent - 8);
}

static void test_rht_definition(void)
{
    test_case("RHT: x diag(signs) H16 / 4, exact where sums are; else within one BF16 rounding; stages in their order");
    for (int trial = 0; trial < 20000; trial++) {
        float x[16], y[16], z[16];
        bool integers = trial % 2;
        for (int i = 0; i < 16; i++)
            y[i] = x[i] = integers ? (float)(int)(random_bits() % 2001) - 1000 : random_value();
        nvfp4_rht16(y);
        for (int i = 0; i < 16; i++) z[i] = x[i] * (float)SIGNS[i] / 4;
        halves(z, 16);
        for (int j = 0; j < 16; j++) {
            double sum = 0, size = 0, tolerance;
            for (int i = 0; i < 16; i++) sum += x[i] * rht_entry(i, j), size += fabs(x[i] / 4.0);
            tolerance = integers ? 0 : 0x1p-8 * fabs(sum) + 0x1p-21 * size; /* BF16, and 4 sums of FP32 */
            double expected = integers ? bf16_exact(sum) : sum;
            CHECK(fabs(y[j] - expected) <= tolerance, "%d: %a, not %a", j, (double)y[j], expected);
            CHECK(f32_bits(y[j]) == f32_bits(bf16_to_f32(bf16_from_f32(z[j]))), "%d: %a, bits differ", j, (double)y[j]);
        }
    }
    test_case("RHT: sums of large values stay finite");
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = 0x1p125f * (float)SIGNS[i];
    nvfp4_rht16(x);
    CHECK(x[0] == 0x1p127f, "%a", (double)x[0]);
    for (int j = 1; j < 16; j++) CHECK(x[j] == 0, "%d: %a", j, (double)x[j]);
}

static void test_rht_orthogonal(void)
{
    float m[16][16] = {{0}};
    test_case("RHT: orthogonal; the transposed transform undoes it; it keeps dot products; the signs are constants");
    for (int i = 0; i < 16; i++) {
        m[i][i] = 1;
        nvfp4_rht16(m[i]); /* row i of the matrix */
        CHECK(!(NVFP4_RHT_SIGNS >> i & 1) == (SIGNS[i] > 0), "sign %d", i);
        for (int j = 0; j < 16; j++) CHECK(m[i][j] == rht_entry(i, j), "entry %d, %d: %g", i, j, (double)m[i][j]);
    }
    for (int i = 0; i < 16; i++)
        for (int k = 0; k < 16; k++) {
            double dot = 0;
            for (int j = 0; j < 16; j++) dot += (double)m[i][j] * m[k][j];
            CHECK(dot == (i == k), "rows %d and %d: %g", i, k, dot);
        }
    for (int trial = 0; trial < 1000; trial++) {
        float a[16], b[16], ta[16], tb[16];
        double before = 0, after = 0;
        for (int i = 0; i < 16; i++)
            ta[i] = a[i] = (float)(int)(random_bits() % 15) - 7; /* sums fit 8 bits: no rounding */
        for (int i = 0; i < 16; i++) tb[i] = b[i] = (float)(int)(random_bits() % 15) - 7;
        nvfp4_rht16(ta);
        nvfp4_rht16(tb);
        for (int i = 0; i < 16; i++) {
            double back = 0;
            for (int j = 0; j < 16; j++) back += ta[j] * rht_entry(i, j);
            CHECK(back == (double)a[i], "%d comes back as %g, not %g", i, back, (double)a[i]);
            before += (double)a[i] * b[i];
            after += (double)ta[i] * tb[i];
        }
        CHECK(before == after, "a dot product of %g becomes %g", before, after);
    }
}

int main(void)
{
    test_tiles();
    test_rht_definition();
    test_rht_orthogonal();
    return test_done();
}
