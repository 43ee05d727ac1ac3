/* sampler.c: greedy and ties, the set that top-k leaves, frequencies against the softmax, odd logits, repeatability. */
#include "sampler.h"
#include "common.h"
#include "philox.h"
#include "test.h"

#include <math.h>

enum { V_MAX = 1000 };
static const double CHI2_9 = 33.7; /* 9 degrees of freedom: exceeded with probability 1e-4 */

static int32_t pick(const float *logits, int64_t V, double temperature, int64_t top_k, uint64_t seed, uint32_t position)
{
    float scratch[V_MAX];
    for (int i = 0; i < V_MAX; i++) scratch[i] = NAN; /* what it holds before must not matter */
    return sampler_pick(logits, V, temperature, top_k, seed, position, scratch);
}

static void test_greedy(void)
{
    const float logits[5] = {1, 3, -2, 3, 2.5f};
    test_case("greedy: the largest, the lowest index of equal ones, whatever the seed");
    for (uint32_t position = 0; position < 100; position++) {
        CHECK(pick(logits, 5, 0, 0, position, position) == 1, "temperature 0");
        CHECK(pick(logits, 5, 1, 1, position, position) == 1, "top_k 1");
        CHECK(pick(logits, 5, 0, 3, position, position) == 1, "temperature 0, top_k 3");
    }
    test_case("a tiny temperature picks one of the largest only");
    bool seen[5] = {false};
    for (uint32_t position = 0; position < 200; position++) seen[pick(logits, 5, 1e-30, 0, 1, position)] = true;
    CHECK(!seen[0] && seen[1] && !seen[2] && seen[3] && !seen[4], "not the two largest");
}

static void test_odd_logits(void)
{
    const float some[4] = {NAN, -INFINITY, 0, NAN}, none[3] = {NAN, -INFINITY, NAN}, up[4] = {5, INFINITY, NAN, 7};
    const float far[3] = {-3e38f, 3e38f, 0};
    test_case("NaN and infinities");
    for (uint32_t position = 0; position < 50; position++)
        for (int64_t top_k = 0; top_k <= 4; top_k++) {
            CHECK(pick(some, 4, 1, top_k, 1, position) == 2, "the one finite logit, top_k %ld", (long)top_k);
            CHECK(pick(none, 3, 1, top_k, 1, position) == -1, "nothing to pick");
            CHECK(pick(up, 4, 1, top_k, 1, position) == 1, "+Inf");
            CHECK(pick(far, 3, 1, top_k, 1, position) == 1, "huge differences");
        }
    CHECK(pick(none, 3, 0, 0, 1, 0) == -1 && pick(some, 4, 0, 0, 1, 0) == 2, "greedy");
}

/* Frequencies of N draws against probability [10]. */
static double chi_squared(const float *logits, double temperature, int64_t top_k, const double *probability,
                          uint64_t seed)
{
    enum { N = 40000 };
    double count[10] = {0}, sum = 0;
    for (uint32_t position = 0; position < N; position++) count[pick(logits, 10, temperature, top_k, seed, position)]++;
    for (int i = 0; i < 10; i++) {
        if (probability[i] == 0)
            sum += count[i] > 0 ? INFINITY : 0;
        else
            sum += (count[i] - N * probability[i]) * (count[i] - N * probability[i]) / (N * probability[i]);
    }
    return sum;
}

static void test_frequencies(void)
{
    const float logits[10] = {0.5f, -1, 2, 1.5f, 0, -0.5f, 1, 2, -2, 0.25f};
    const double temperature[3] = {0.5, 1, 2};
    const int64_t top_k[3] = {0, 4, 10};
    for (int a = 0; a < 3; a++)
        for (int b = 0; b < 3; b++) {
            double probability[10], sum = 0;
            for (int i = 0; i < 10; i++) { /* the four largest: 2, 2, 1.5, 1 */
                bool in = top_k[b] != 4 || logits[i] >= 1;
                probability[i] = in ? exp((double)logits[i] / temperature[a]) : 0;
                sum += probability[i];
            }
            for (int i = 0; i < 10; i++) probability[i] /= sum;
            double chi2 = chi_squared(logits, temperature[a], top_k[b], probability, 7);
            test_case("frequencies are the softmax");
            CHECK(chi2 < CHI2_9, "temperature %g, top_k %ld: chi squared %.1f", temperature[a], (long)top_k[b], chi2);
        }
}

static int descending(const void *a, const void *b)
{
    float x = *(const float *)a, y = *(const float *)b;
    return (x < y) - (x > y);
}

static void test_top_k(void)
{
    test_case("top_k leaves the k largest, of equal ones the first");
    for (uint32_t trial = 0; trial < 30; trial++) {
        float logits[V_MAX] = {0}, sorted[V_MAX] = {0};
        bool seen[V_MAX] = {false};
        int64_t V = 50 + 10 * (int64_t)trial, k = 1 + (int64_t)trial * 3 % 40, expected = 0, left = k, picked = 0;
        for (int64_t i = 0; i < V; i++) /* 40 values: many ties */
            logits[i] = sorted[i] = (float)(philox4x32(7, (uint32_t)i, trial, 0, 0, 0, 0).word[0] % 40) / 1000;
        qsort(sorted, (size_t)V, sizeof sorted[0], descending);
        float edge = sorted[k - 1];
        for (int64_t i = 0; i < V; i++) left -= logits[i] > edge;
        for (uint32_t position = 0; position < 3000; position++) seen[pick(logits, V, 100, k, trial, position)] = true;
        for (int64_t i = 0; i < V; i++) {
            bool in = logits[i] > edge || (logits[i] == edge && left-- > 0);
            expected += in;
            picked += in && seen[i];
            CHECK(in || !seen[i], "trial %u: token %ld is outside the top %ld", trial, (long)i, (long)k);
        }
        if (k == 1) continue; /* greedy */
        CHECK(expected == k && picked == k, "trial %u: %ld of %ld were ever picked", trial, (long)picked, (long)k);
    }
}

static void test_repeatable(void)
{
    const float flat[4] = {1, 1, 1, 1};
    int different = 0;
    test_case("the random number is Philox at (seed, position)");
    for (uint32_t position = 0; position < 500; position++) {
        uint64_t seed = 0x123456789abcdefULL * (position % 3);
        Philox r = philox_draw(seed, position, 0, 0, 0, ROLE_SAMPLE, 0);
        CHECK(pick(flat, 4, 1, 0, seed, position) == (int32_t)(r.word[0] >> 30), "position %u", position);
        different += pick(flat, 4, 1, 0, seed, position) != pick(flat, 4, 1, 0, seed + (1ULL << 32), position);
    }
    CHECK(different > 300, "the high half of the seed does nothing: %d of 500 differ", different);
}

int main(void)
{
    test_greedy();
    test_odd_logits();
    test_frequencies();
    test_top_k();
    test_repeatable();
    return test_done();
}
