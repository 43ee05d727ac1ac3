/* nvfp4.h: stochastic rounding draws good bits of its own for every place, and its mean is what P(up) says.
 *
 * Bounds. A count of n fair coins has mean n/2 and deviation sqrt(n)/2; chi-square of k cells has mean k - 1 and
 * deviation sqrt(2 (k - 1)); a correlation of n independent pairs has deviation 1/sqrt(n). All are held to 5 deviations:
 * a good generator fails one of the 600 comparisons with a chance of about 4e-4, once and for all, as seeds are fixed.
 *
 * Known mistakes of other implementations that have a case here: row and column copies rounded with the same bits,
 * rounding that never goes up, bits from a counter, bits frozen from step to step, bits that move when the work is
 * chunked.
 */
#include <math.h>

#include "nvfp4.h"
#include "test.h"

static const Nvfp4Form STOCHASTIC = {.rounding = ROUND_STOCHASTIC, .headroom = 1};
enum { ROWS = 256, COLS = 256, COUNT = ROWS * COLS };

static bool fair(int64_t heads, int64_t n) { return fabs((double)heads - (double)n / 2) <= 2.5 * sqrt((double)n); }

/* ---- the bytes ---- */

static bool uniform(const int *count, int cells)
{
    double n = 0, chi = 0;
    for (int i = 0; i < cells; i++) n += count[i];
    for (int i = 0; i < cells; i++) chi += (count[i] - n / cells) * (count[i] - n / cells) / (n / cells);
    return fabs(chi - (cells - 1)) <= 5 * sqrt(2.0 * (cells - 1));
}

static void test_bytes(void)
{
    enum { BLOCKS = 16384 };
    static uint8_t byte[BLOCKS][16];
    int all[256] = {0}, pair[16][256] = {{0}};
    double product[16][16] = {{0}};
    test_case("random bytes: uniform, each element of a block, neighbours together; no two elements correlate");
    for (int b = 0; b < BLOCKS; b++) {
        Philox draw = philox_draw(1, (uint32_t)b / 128, (uint32_t)b % 128, 3, 2, ROLE_OPERAND, 0);
        for (int i = 0; i < 16; i++) {
            uint32_t r = nvfp4_random8(&draw, i);
            CHECK(r < 256, "%u is no byte", r);
            byte[b][i] = (uint8_t)r;
            all[r & 255]++;
        }
        for (int i = 0; i < 16; i++) pair[i][(byte[b][i] & 0xf0) | byte[b][(i + 1) % 16] >> 4]++;
        for (int i = 0; i < 16; i++)
            for (int j = 0; j < i; j++) product[i][j] += (byte[b][i] - 127.5) * (byte[b][j] - 127.5);
    }
    CHECK(uniform(all, 256), "all bytes");
    double variance = (65536 - 1) / 12.0;
    for (int i = 0; i < 16; i++) {
        CHECK(uniform(pair[i], 256), "element %d and the next", i);
        for (int j = 0; j < i; j++)
            CHECK(fabs(product[i][j] / BLOCKS / variance) <= 5 / sqrt(BLOCKS), "elements %d and %d", i, j);
    }
}

/* ---- places ---- */

/* Rounds up or not: every element stands half way between two values but one a block, which is the block's 6. */
static void coins(uint8_t *up, int64_t rows, int64_t cols, Nvfp4Place place, int skip)
{
    float *x = xmalloc((size_t)(rows * cols) * sizeof *x);
    uint8_t *scales = xmalloc((size_t)(rows * cols / 16));
    for (int64_t i = 0; i < rows * cols; i++) x[i] = i % 16 == skip ? 6.0f : i % 3 ? 2.5f : -1.25f;
    Nvfp4Scale tensor = nvfp4_quantize(up, scales, x, rows, cols, &STOCHASTIC, &place);
    if (nvfp4_encode_block(scales[0], tensor.decode) != 1) die("the test means to scale by 1");
    for (int64_t i = 0; i < rows * cols; i++) up[i] = up[i] == 5 || up[i] == 11; /* 3 and -1.5 */
    free(x);
    free(scales);
}

static const Nvfp4Place HERE = {.seed = UINT64_C(0x123456789abcdef),
                                .step = 41,
                                .layer = 3,
                                .role = ROLE_OPERAND + OPERAND_COPIES + COPY_DY_ROW,
                                .row0 = 512,
                                .block0 = 16};

static uint8_t here[COUNT], there[COUNT];

static int64_t agreements(const uint8_t *a, const uint8_t *b)
{
    int64_t n = 0;
    for (int i = 0; i < COUNT; i++) n += i % 16 && a[i] == b[i];
    return n;
}

static void other_place(const char *what, Nvfp4Place place)
{
    int64_t n = COUNT / 16 * 15;
    coins(there, ROWS, COLS, place, 0);
    CHECK(fair(agreements(here, there), n), "%s: %lld of %lld agree", what, (long long)agreements(here, there),
          (long long)n);
}

static void test_places(void)
{
    test_case("places: another step, layer, copy, projection, seed, row or block has bits of its own");
    int64_t heads = 0;
    coins(here, ROWS, COLS, HERE, 0);
    for (int i = 0; i < COUNT; i++) heads += i % 16 && here[i];
    CHECK(fair(heads, COUNT / 16 * 15), "%lld go up", (long long)heads);
    coins(there, ROWS, COLS, HERE, 0);
    CHECK(!memcmp(here, there, COUNT), "the same place twice");
    for (int bit = 0; bit < 32; bit++) {
        Nvfp4Place seed = HERE, high = HERE, step = HERE, row = HERE, block = HERE, layer = HERE;
        seed.seed ^= UINT64_C(1) << bit;
        high.seed ^= UINT64_C(1) << (32 + bit);
        step.step ^= 1u << bit;
        row.row0 ^= 1u << bit;
        block.block0 ^= 1u << bit;
        layer.layer ^= 1u << bit % 16;
        if (bit % 8 == 0 || bit == 31) other_place("seed, low half", seed), other_place("seed, high half", high);
        if (bit % 8 == 0 || bit == 31) other_place("step", step), other_place("row", row), other_place("block", block);
        if (bit % 4 == 0 && bit < 16) other_place("layer", layer);
    }
    for (uint32_t role = ROLE_OPERAND; role < ROLE_OPERAND + 4 * OPERAND_COPIES; role++) {
        Nvfp4Place place = HERE;
        place.role = role;
        if (role != HERE.role) other_place("role", place);
    }
}

static void test_copies(void)
{
    static uint8_t column[COUNT];
    test_case("the row copy and the column copy of one element are rounded independently");
    Nvfp4Place place = HERE;
    place.role = HERE.role - COPY_DY_ROW + COPY_DY_COL;
    coins(column, COLS, ROWS, place, 0);
    int64_t agree = 0, n = 0;
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < COLS; c++)
            if (r % 16 && c % 16) agree += here[r * COLS + c] == column[c * ROWS + r], n++;
    CHECK(fair(agree, n), "%lld of %lld agree", (long long)agree, (long long)n);
}

static void test_chunks(void)
{
    enum { CHUNK_ROWS = 24, BLOCK_COLUMNS = 3 };
    static uint8_t chunk[ROWS * COLS];
    test_case("a matrix quantized in chunks of rows and of block columns has the bits of the whole");
    for (int skip = 0; skip < 16; skip += 15) {
        coins(here, ROWS, COLS, HERE, skip);
        for (int r0 = 0; r0 < ROWS; r0 += CHUNK_ROWS)
            for (int b0 = 0; b0 < COLS / 16; b0 += BLOCK_COLUMNS) {
                int rows = r0 + CHUNK_ROWS < ROWS ? CHUNK_ROWS : ROWS - r0;
                int cols = 16 * (b0 + BLOCK_COLUMNS < COLS / 16 ? BLOCK_COLUMNS : COLS / 16 - b0), wrong = 0;
                Nvfp4Place place = HERE;
                place.row0 += (uint32_t)r0;
                place.block0 += (uint32_t)b0;
                coins(chunk, rows, cols, place, skip);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < cols; c++) wrong += chunk[r * cols + c] != here[(r0 + r) * COLS + 16 * b0 + c];
                CHECK(wrong == 0, "chunk at row %d, block %d: %d differ", r0, b0, wrong);
            }
    }
}

static void test_steps(void)
{
    enum { STEPS = 4096 };
    static uint8_t up[STEPS][32];
    test_case("over steps each element goes up half of the time, whatever it did in the step before");
    for (uint32_t step = 0; step < STEPS; step++) {
        Nvfp4Place place = HERE;
        place.step = step;
        coins(up[step], 2, 16, place, 0);
    }
    for (int i = 0; i < 32; i++) {
        int64_t heads = 0, repeats = 0;
        for (int step = 0; step < STEPS; step++) heads += up[step][i];
        for (int step = 1; step < STEPS; step++) repeats += up[step][i] == up[step - 1][i];
        if (i % 16)
            CHECK(fair(heads, STEPS) && fair(repeats, STEPS - 1), "element %d: %d up, %d repeated", i, (int)heads,
                  (int)repeats);
    }
}

/* ---- the mean ---- */

/* Rows of one 6 and 15 times v, rounded: the mean must be what P(up) = floor(256 f) / 256 says, and near v. */
static void one_mean(float v, double lower, double upper, uint32_t step, double *bias)
{
    enum { N = 512 * 15 };
    static float x[512 * 16];
    static uint8_t codes[512 * 16], scales[512];
    double sum = 0, gap = upper - lower, p = floor(256 * (v - lower) / gap) / 256, mean = lower + p * gap;
    for (int i = 0; i < 512 * 16; i++) x[i] = i % 16 == 9 ? 6.0f : i % 2 ? -v : v;
    nvfp4_quantize(codes, scales, x, 512, 16, &STOCHASTIC, &(Nvfp4Place){.seed = 99, .step = step, .role = 80});
    for (int i = 0; i < 512 * 16; i++)
        if (i % 16 != 9) sum += e2m1_to_f32(codes[i]) * (i % 2 ? -1 : 1);
    double bound = 5 * gap * sqrt(p * (1 - p) / N);
    CHECK(fabs(sum / N - mean) <= bound, "%g comes to %g, not %g +- %g", (double)v, sum / N, mean, bound);
    CHECK(v - sum / N <= gap / 256 + bound && v - sum / N >= -bound, "%g comes to %g", (double)v, sum / N);
    *bias += (v - sum / N) / gap;
}

static void test_mean(void)
{
    static const double GRID[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    test_case("the mean of stochastic rounding is P(up); the pull toward zero is 1/512 of a step on average");
    double bias = 0;
    enum { PLACES = 40 };
    for (int i = 0; i < 7; i++)
        for (int k = 0; k < PLACES; k++) {
            double f = (k + 0.37) / PLACES;
            one_mean((float)(GRID[i] + f * (GRID[i + 1] - GRID[i])), GRID[i], GRID[i + 1], (uint32_t)(i * PLACES + k),
                     &bias);
        }
    bias /= 7 * PLACES; /* deviation: sqrt(1/6 / (7680 * 280)) = 0.00028; 1/6 is the mean of f (1 - f) */
    CHECK(fabs(bias - 1.0 / 512) <= 5 * 0.00028, "bias %g of a step", bias);
    printf("measured pull toward zero: %.5f of a step (expected %.5f)\n", bias, 1.0 / 512);
}

int main(void)
{
    test_bytes();
    test_places();
    test_copies();
    test_chunks();
    test_steps();
    test_mean();
    return test_done();
}
