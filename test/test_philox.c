/* philox.h: the known answers of its authors, how the project's draw packs a place, and that no part of a place is
 * ignored or shadows another. */
#include "philox.h"
#include "test.h"

typedef struct {
    int rounds;
    uint32_t counter[4], key[2], answer[4];
} KnownAnswer;

/* From kat_vectors of Random123. */
static const KnownAnswer ANSWERS[] = {
    {7, {0, 0, 0, 0}, {0, 0}, {0x5f6fb709, 0x0d893f64, 0x4f121f81, 0x4f730a48}},
    {7,
     {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x5207ddc2, 0x45165e59, 0x4d8ee751, 0x8c52f662}},
    {7,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0x4dfccaba, 0x190a87f0, 0xc47362ba, 0xb6b5242a}},
    {10, {0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
    {10,
     {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
     {0xffffffff, 0xffffffff},
     {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
    {10,
     {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
     {0xa4093822, 0x299f31d0},
     {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
};

static bool equal(Philox a, const uint32_t *word) { return memcmp(a.word, word, sizeof a.word) == 0; }

static void test_known_answers(void)
{
    test_case("philox: known answers, 7 and 10 rounds");
    for (size_t i = 0; i < sizeof ANSWERS / sizeof ANSWERS[0]; i++) {
        const KnownAnswer *a = &ANSWERS[i];
        Philox r = philox4x32(a->rounds, a->counter[0], a->counter[1], a->counter[2], a->counter[3], a->key[0],
                              a->key[1]);
        CHECK(equal(r, a->answer), "vector %zu: %08x %08x %08x %08x", i, r.word[0], r.word[1], r.word[2], r.word[3]);
    }
}

static void test_packing(void)
{
    test_case("philox_draw: 7 rounds, key and counter as the header says");
    Philox expected = philox4x32(7, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0);
    Philox drawn = philox_draw(0x299f31d0a4093822u, 0x243f6a88, 0x85a308d3, 0x13198a2e, 0x0370, 0x73, 0x44);
    CHECK(equal(drawn, expected.word), "%08x", drawn.word[0]);
    CHECK(equal(drawn, ANSWERS[2].answer), "the authors' third vector");
}

static int compare(const void *a, const void *b) { return memcmp(a, b, sizeof(Philox)); }

/* For a key, Philox is a bijection of counters: two equal draws mean that two places share a counter. */
static void test_places_differ(void)
{
    static const uint32_t edge[] = {0, 1, 2, 255};
    enum { EDGES = 4, PLACES = EDGES * EDGES * EDGES * EDGES * EDGES * EDGES };
    Philox *draws = malloc(PLACES * sizeof *draws);
    int count = 0, equals = 0;
    test_case("philox_draw: row, block, step, layer, role and word are all part of the place");
    for (int p = 0; p < PLACES; p++) {
        uint32_t e[6];
        for (int i = 0, rest = p; i < 6; i++, rest /= EDGES) e[i] = edge[rest % EDGES];
        uint32_t row = e[0] << 24 | e[0], block = e[1] << 24 | e[1], step = e[2] << 24 | e[2], layer = e[3] << 8 | e[3];
        draws[count++] = philox_draw(42, row, block, step, layer, e[4], e[5]);
    }
    qsort(draws, (size_t)count, sizeof *draws, compare);
    for (int i = 1; i < count; i++) equals += compare(&draws[i - 1], &draws[i]) == 0;
    CHECK(equals == 0, "%d of %d places share their draw", equals, count);
    free(draws);
}

/* Two neighbouring places must differ in half their bits: over `trials` the mean stays near 64 of 128. */
static double mean_distance(const uint32_t change[6], uint64_t seed_change)
{
    enum { TRIALS = 4000 };
    double bits = 0;
    for (uint32_t i = 0; i < TRIALS; i++) {
        Philox a = philox_draw(i, i, 2 * i, 3 * i, i % 100, i % 200, 0);
        Philox b = philox_draw(i ^ seed_change, i ^ change[0], (2 * i) ^ change[1], (3 * i) ^ change[2],
                               (i % 100) ^ change[3], (i % 200) ^ change[4], change[5]);
        for (int w = 0; w < 4; w++) bits += __builtin_popcount(a.word[w] ^ b.word[w]);
    }
    return bits / TRIALS;
}

static void test_independence(void)
{
    static const char *part[] = {"row", "block", "step", "layer", "role", "word"};
    test_case("philox_draw: a neighbouring place flips half of the bits");
    for (int i = 0; i < 6; i++) {
        uint32_t change[6] = {0};
        change[i] = 1;
        double mean = mean_distance(change, 0); /* standard error 5.66 / sqrt(4000) = 0.09 */
        CHECK(mean > 63.5 && mean < 64.5, "%s: %.3f of 128 bits", part[i], mean);
    }
    const uint32_t same[6] = {0};
    for (int bit = 0; bit < 64; bit += 63) {
        double mean = mean_distance(same, UINT64_C(1) << bit);
        CHECK(mean > 63.5 && mean < 64.5, "seed bit %d: %.3f of 128 bits", bit, mean);
    }
    CHECK(mean_distance(same, 0) == 0, "the same place twice");
}

static void test_roles(void)
{
    test_case("roles: ranges do not overlap and fit 8 bits");
    CHECK(ROLE_DATA_ORDER > 0 && ROLE_SAMPLE > ROLE_DATA_ORDER && ROLE_INIT > ROLE_SAMPLE, "order");
    CHECK(ROLE_MASTER >= ROLE_INIT + 32 && ROLE_OPERAND >= ROLE_MASTER + 32 && ROLE_OPERAND < 256, "ranges");
}

int main(void)
{
    test_known_answers();
    test_packing();
    test_places_differ();
    test_independence();
    test_roles();
    return test_done();
}
