/* dataloader.c: windows, their order, and that (seed, step, file list) alone decide what is read: from any step, by any
 * number of ranks. The reference below reads windows from arrays in memory. */
#include "dataloader.h"
#include "test.h"
#include "test_files.h"

enum { VOCAB = 30000 };

static char *folder;

/* Writes FOLDER/name: raw uint16 tokens first, first + 1, ... (modulo VOCAB). */
static void write_tokens(const char *name, int64_t tokens, int32_t first)
{
    char *path = xformat("%s/%s", folder, name);
    uint16_t *data = xcalloc((size_t)tokens, sizeof *data);
    for (int64_t i = 0; i < tokens; i++) data[i] = (uint16_t)((first + i) % VOCAB);
    test_write_file(path, data, (size_t)tokens * sizeof *data);
    free(data);
    free(path);
}

/* Opens FOLDER/name (a pattern) from a step; dies when it cannot. */
static DataLoader *open_at(const char *name, DataLoaderConfig config, int64_t first_step)
{
    Error error = {""};
    char *pattern = xformat("%s/%s", folder, name);
    config.pattern = pattern;
    DataLoader *d = dataloader_open(&config, first_step, &error);
    if (!d) die("%s", error.text);
    free(pattern);
    return d;
}

static DataLoaderConfig config_of(int64_t B, int64_t T, int64_t micro_batches)
{
    return (DataLoaderConfig){
        .B = B, .T = T, .micro_batches = micro_batches, .ranks = 1, .seed = 1, .shuffle = true, .vocab = VOCAB};
}

static void test_windows(void)
{
    static const struct {
        int64_t tokens, windows;
    } cases[] = {{8, 1}, {9, 1}, {14, 1}, {15, 2}, {16, 2}, {22, 3}, {7001, 1000}};
    test_case("windows: T + 1 tokens, T apart, the tail left out");
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_tokens("one.bin", cases[i].tokens, 0);
        DataLoader *d = open_at("one.bin", config_of(1, 7, 1), 0);
        CHECK(dataloader_windows(d) == cases[i].windows && dataloader_tokens(d) == cases[i].tokens,
              "%lld tokens: %lld windows", (long long)cases[i].tokens, (long long)dataloader_windows(d));
        dataloader_close(d);
    }

    test_case("windows: several files, none reaches over an end, files too short have none");
    Error error = {""};
    int32_t out[8];
    write_tokens("w_0.bin", 16, 0);
    write_tokens("w_1.bin", 7, 100);
    write_tokens("w_2.bin", 8, 200);
    write_tokens("w_3.bin", 29, 300);
    DataLoader *d = open_at("w_*.bin", config_of(1, 7, 1), 0);
    const int32_t first[] = {0, 7, 200, 300, 307, 314, 321};
    CHECK(dataloader_windows(d) == 7 && dataloader_tokens(d) == 60, "%lld windows", (long long)dataloader_windows(d));
    for (int w = 0; w < 7; w++) {
        CHECK(dataloader_read_window(d, w, out, &error) == 0, "%s", error.text);
        for (int i = 0; i < 8; i++) CHECK(out[i] == first[w] + i, "window %d token %d is %d", w, i, out[i]);
    }
    CHECK(dataloader_read_window(d, 7, out, &error) == -1 && dataloader_read_window(d, -1, out, &error) == -1,
          "outside");
    dataloader_close(d);

    test_case("windows: when all files are short, each is one window, wrapped around");
    write_tokens("s_0.bin", 3, 0);
    write_tokens("s_1.bin", 1, 50);
    write_tokens("s_2.bin", 7, 70);
    d = open_at("s_*.bin", config_of(2, 7, 1), 0);
    CHECK(dataloader_windows(d) == 3, "%lld windows", (long long)dataloader_windows(d));
    const int32_t start[] = {0, 50, 70}, length[] = {3, 1, 7};
    for (int w = 0; w < 3; w++) {
        CHECK(dataloader_read_window(d, w, out, &error) == 0, "%s", error.text);
        for (int i = 0; i < 8; i++) CHECK(out[i] == start[w] + i % length[w], "window %d token %d is %d", w, i, out[i]);
    }
    dataloader_close(d);
}

/* A loader with exactly W windows of T = 1. */
static DataLoader *open_windows(int64_t W, uint64_t seed, bool shuffle)
{
    DataLoaderConfig config = config_of(1, 1, 1);
    config.seed = seed;
    config.shuffle = shuffle;
    char *name = xformat("order_%llx.bin", (unsigned long long)seed); /* no open loader's file is written to */
    write_tokens(name, W + 1, 0);
    DataLoader *d = open_at(name, config, 0);
    free(name);
    return d;
}

static void test_permutation(void)
{
    static const int64_t sizes[] = {1, 2, 3, 4, 5, 15, 16, 17, 100, 1000, 4095, 4096, 4097, 20000};
    test_case("order: every window once in every epoch, also far away");
    for (size_t k = 0; k < sizeof sizes / sizeof sizes[0]; k++) {
        const int64_t W = sizes[k], epochs[] = {0, 1, 2, 1000, (INT64_C(1) << 40) + 3};
        DataLoader *d = open_windows(W, 3, true);
        for (int e = 0; e < 5; e++) {
            char *seen = xcalloc((size_t)W, 1);
            int64_t distinct = 0;
            for (int64_t p = 0; p < W; p++) {
                int64_t window = dataloader_window(d, epochs[e] * W + p);
                if (!CHECK(window >= 0 && window < W, "W %lld: window %lld", (long long)W, (long long)window)) break;
                distinct += !seen[window];
                seen[window] = 1;
            }
            CHECK(distinct == W, "W %lld epoch %d: %lld windows", (long long)W, e, (long long)distinct);
            free(seen);
        }
        dataloader_close(d);
    }
}

static void test_known_orders(void)
{
    static const struct {
        uint64_t seed;
        int64_t W, epoch, order[10];
    } known[] = {
        {1, 10, 0, {2, 1, 8, 9, 7, 0, 6, 3, 5, 4}},
        {1, 10, 1, {5, 9, 1, 3, 0, 6, 4, 8, 7, 2}},
        {0x123456789abcdef0u, 10, 0, {1, 8, 0, 4, 5, 2, 7, 9, 6, 3}},
        {1, 10, INT64_C(1) << 32, {5, 6, 4, 8, 2, 0, 7, 3, 1, 9}},
        {7, 3, 5, {1, 2, 0}},
    };
    test_case("order: known answers of a second implementation");
    for (int k = 0; k < 5; k++) {
        DataLoader *d = open_windows(known[k].W, known[k].seed, true);
        for (int64_t p = 0; p < known[k].W; p++) {
            int64_t window = dataloader_window(d, known[k].epoch * known[k].W + p);
            CHECK(window == known[k].order[p], "case %d place %lld: %lld", k, (long long)p, (long long)window);
        }
        dataloader_close(d);
    }

    test_case("order: without shuffle, plain");
    DataLoader *d = open_windows(10, 1, false);
    for (int64_t n = 0; n < 25; n++) CHECK(dataloader_window(d, n) == n % 10, "n %lld", (long long)n);
    dataloader_close(d);
}

static void test_randomness(void)
{
    enum { W = 5, EPOCHS = 4000, LARGE = 1000 };
    int64_t count[W][W] = {{0}};
    test_case("order: any window at any place, equally often (W = 5, 4,000 epochs)");
    DataLoader *d = open_windows(W, 11, true);
    for (int64_t n = 0; n < W * EPOCHS; n++) count[n % W][dataloader_window(d, n)]++;
    dataloader_close(d);
    for (int p = 0; p < W; p++)
        for (int w = 0; w < W; w++) /* mean 800, standard deviation 25 */
            CHECK(count[p][w] > 675 && count[p][w] < 925, "window %d at place %d: %lld", w, p, (long long)count[p][w]);

    test_case("order: epochs and seeds differ");
    d = open_windows(LARGE, 1, true);
    DataLoader *other = open_windows(LARGE, UINT64_C(1) << 32 | 1, true);
    int same_epoch = 0, same_seed = 0, fixed = 0, neighbours = 0;
    for (int64_t p = 0; p < LARGE; p++) {
        same_epoch += dataloader_window(d, p) == dataloader_window(d, p + LARGE);
        same_seed += dataloader_window(d, p) == dataloader_window(other, p);
        fixed += dataloader_window(d, p) == p;
        neighbours += dataloader_window(d, p + 1) == dataloader_window(d, p) + 1;
    }
    CHECK(same_epoch < 12 && same_seed < 12 && fixed < 12 && neighbours < 12, "%d %d %d %d of 1000", same_epoch,
          same_seed, fixed, neighbours); /* each is about 1 by chance */
    dataloader_close(d);
    dataloader_close(other);
}

/* Compares one step with the windows that the header's formula names; returns the receipt it should have. */
static uint64_t check_step(const DataLoader *d, const DataLoaderConfig *c, const StepData *data)
{
    const int64_t B = c->B, T = c->T;
    uint64_t hash = 0;
    int32_t *window = xcalloc((size_t)T + 1, sizeof *window);
    for (int64_t m = 0; m < data->micro_steps; m++)
        for (int64_t s = 0; s < B; s++) {
            int64_t n = (data->step * c->micro_batches + m * c->ranks + c->rank) * B + s;
            CHECK(dataloader_read_window(d, dataloader_window(d, n), window, NULL) == 0, "window of %lld",
                  (long long)n);
            size_t at = (size_t)((m * B + s) * T), bytes = (size_t)T * sizeof *window;
            CHECK(memcmp(data->tokens + at, window, bytes) == 0, "tokens of step %lld m %lld s %lld",
                  (long long)data->step, (long long)m, (long long)s);
            CHECK(memcmp(data->targets + at, window + 1, bytes) == 0, "targets of step %lld m %lld s %lld",
                  (long long)data->step, (long long)m, (long long)s);
            hash += hash64(window, bytes + sizeof *window, (uint64_t)n);
        }
    free(window);
    return hash;
}

static void test_steps(void)
{
    enum { STEPS = 60 };
    Error error = {""};
    StepData data;
    uint64_t hash[STEPS];
    test_case("steps: tokens, targets and receipt over several epochs; odd B and T");
    write_tokens("d_0.bin", 100, 0);
    write_tokens("d_1.bin", 333, 1000);
    const DataLoaderConfig config = config_of(3, 7, 5);
    DataLoader *d = open_at("d_*.bin", config, 0);
    for (int t = 0; t < STEPS; t++) {
        CHECK(dataloader_next(d, &data, &error) == 0, "%s", error.text);
        CHECK(data.step == t && data.micro_steps == 5 && data.wait_ms >= 0, "step %lld", (long long)data.step);
        hash[t] = data.hash;
        CHECK(check_step(d, &config, &data) == hash[t], "receipt of step %d", t);
        for (int k = 0; k < t; k++) CHECK(hash[k] != hash[t], "steps %d and %d have one receipt", k, t);
    }
    dataloader_close(d);

    test_case("steps: from any step, what a run from the start reads");
    for (int first = 0; first < STEPS; first += first < 5 ? 1 : 9) {
        d = open_at("d_*.bin", config, first);
        for (int t = first; t < STEPS && t < first + 4; t++) {
            CHECK(dataloader_next(d, &data, &error) == 0, "%s", error.text);
            CHECK(data.step == t && data.hash == hash[t], "step %lld from %d", (long long)data.step, first);
            check_step(d, &config, &data);
        }
        dataloader_close(d);
    }
}

static void test_ranks(void)
{
    enum { MICRO_BATCHES = 6, B = 3, T = 7, STEPS = 5 };
    static const int splits[] = {1, 2, 3, 6};
    static int32_t whole[STEPS][MICRO_BATCHES][2][B * T];
    uint64_t sums[STEPS] = {0};
    Error error = {""};
    StepData data;
    test_case("ranks: 1, 2, 3 and 6 ranks read the same micro-batches; their receipts add up to the same");
    for (int k = 0; k < 4; k++) {
        uint64_t sum[STEPS] = {0};
        DataLoaderConfig config = config_of(B, T, MICRO_BATCHES);
        config.ranks = splits[k];
        for (config.rank = 0; config.rank < config.ranks; config.rank++) {
            DataLoader *d = open_at("d_*.bin", config, 0);
            for (int t = 0; t < STEPS; t++) {
                CHECK(dataloader_next(d, &data, &error) == 0, "%s", error.text);
                CHECK(data.micro_steps * config.ranks == MICRO_BATCHES, "%lld micro-steps",
                      (long long)data.micro_steps);
                sum[t] += data.hash;
                for (int64_t m = 0; m < data.micro_steps; m++) {
                    int32_t(*expected)[B * T] = whole[t][m * config.ranks + config.rank];
                    const int32_t *got[2] = {data.tokens + m * B * T, data.targets + m * B * T};
                    for (int i = 0; i < 2; i++) {
                        if (k == 0) memcpy(expected[i], got[i], sizeof expected[i]);
                        CHECK(memcmp(expected[i], got[i], sizeof expected[i]) == 0, "rank %d of %d, step %d, m %lld",
                              config.rank, config.ranks, t, (long long)m);
                    }
                }
            }
            dataloader_close(d);
        }
        for (int t = 0; t < STEPS; t++) CHECK(k == 0 || sum[t] == sums[t], "%d ranks, step %d", splits[k], t);
        memcpy(sums, sum, sizeof sums);
    }
}

static void test_file_list_hash(void)
{
    test_case("file list: the hash knows names, sizes, ends and order, but not the folder");
    const DataLoaderConfig config = config_of(1, 7, 1);
    uint64_t hash[6];
    char *home = folder, *other = xformat("%s/sub", folder);
    if (mkdir(other, 0700)) die("cannot make %s", other);
    for (int i = 0; i < 6; i++) {
        folder = i == 1 ? other : home;
        const char *name = i == 2 ? "g.bin" : "f.bin";
        write_tokens(name, i == 3 ? 51 : 50, i == 4 ? 1 : 0);
        if (i == 3 || i == 5) { /* 3: one token more, the same last one; 5: another last one */
            char *path = xformat("%s/f.bin", folder);
            FILE *stream = fopen(path, "r+b");
            fseek(stream, -2, SEEK_END);
            fwrite(i == 3 ? "\61\0" : "\7\7", 1, 2, stream);
            fclose(stream);
            free(path);
        }
        DataLoader *d = open_at(name, config, 0);
        hash[i] = dataloader_file_list_hash(d);
        dataloader_close(d);
    }
    folder = home;
    CHECK(hash[1] == hash[0], "another folder");
    for (int i = 2; i < 6; i++) CHECK(hash[i] != hash[0], "change %d", i);

    char *list = xformat("d_1.bin,%s/d_0.bin", folder);
    DataLoader *sorted = open_at("d_*.bin", config, 0), *given = open_at(list, config, 0),
               *one = open_at("d_0.bin", config, 0);
    CHECK(dataloader_windows(sorted) == dataloader_windows(given), "a list of both");
    CHECK(dataloader_file_list_hash(sorted) != dataloader_file_list_hash(given), "another order");
    CHECK(dataloader_file_list_hash(sorted) != dataloader_file_list_hash(one), "one file of two");
    int32_t out[8];
    CHECK(dataloader_read_window(given, 0, out, NULL) == 0 && out[0] == 1000, "a list is read in its order");
    dataloader_close(sorted);
    dataloader_close(given);
    dataloader_close(one);
    free(list);
    free(other);
}

static void test_bad_tokens(void)
{
    Error error = {""};
    StepData data;
    test_case("a token beyond the vocabulary: file and position, after the steps before it, every time");
    write_tokens("bad.bin", 71, 0); /* 10 windows of T = 7; token 66 is in window 9 alone */
    DataLoaderConfig config = config_of(1, 7, 2);
    config.vocab = 66;
    config.shuffle = false;
    DataLoader *d = open_at("bad.bin", config, 0);
    for (int t = 0; t < 4; t++) CHECK(dataloader_next(d, &data, &error) == 0, "step %d: %s", t, error.text);
    for (int i = 0; i < 3; i++) {
        error.text[0] = 0;
        CHECK(dataloader_next(d, &data, &error) == -1, "call %d", i);
        CHECK(strstr(error.text, "/bad.bin: token 66 at position 66, the vocabulary is 66"), "%s", error.text);
    }
    CHECK(data.step == 3 && data.tokens[0] == 42, "the step before is still there");
    dataloader_close(d);
}

static void refuse(DataLoaderConfig config, int64_t first_step, const char *part)
{
    Error error = {""};
    char *pattern = xformat("%s/d_0.bin", folder);
    if (!config.pattern) config.pattern = pattern;
    DataLoader *d = dataloader_open(&config, first_step, &error);
    CHECK(!d && strstr(error.text, part), "expected \"%s\": %s", part, error.text);
    dataloader_close(d);
    free(pattern);
}

static void test_refusals(void)
{
    const DataLoaderConfig good = config_of(2, 7, 6);
    DataLoaderConfig c;
    test_case("refusals: sizes, ranks, numbers beyond 64 bits, files");
    c = good, c.B = 0, refuse(c, 0, "at least 1");
    c = good, c.T = -1, refuse(c, 0, "at least 1");
    c = good, c.micro_batches = 0, refuse(c, 0, "at least 1");
    c = good, c.vocab = 0, refuse(c, 0, "at least 1");
    refuse(good, -1, "at least 0");
    c = good, c.ranks = 4, refuse(c, 0, "multiple of the number of ranks");
    c = good, c.ranks = 2, c.rank = 2, refuse(c, 0, "rank 2 of 2");
    c = good, c.rank = -1, refuse(c, 0, "rank -1");
    c = good, c.ranks = 0, refuse(c, 0, "of 0");
    c = good, c.B = INT64_MAX / 2, refuse(c, 0, "too many to count");
    c = good, c.T = INT64_MAX / 8, refuse(c, 0, "too many to count");
    refuse(good, INT64_MAX / 3, "too many to count");
    c = good, c.pattern = "/nowhere/*.bin", refuse(c, 0, "no file matches");
    char *pattern = xformat("%s/odd.bin", folder);
    test_write_file(pattern, "odd", 3);
    c = good, c.pattern = pattern, refuse(c, 0, "odd size");
    free(pattern);
}

static void test_closing(void)
{
    Error error = {""};
    StepData data;
    test_case("closing: at once, in the middle, after waiting, several loaders side by side");
    const DataLoaderConfig config = config_of(2, 7, 4);
    dataloader_close(NULL);
    for (int i = 0; i < 50; i++) {
        DataLoader *a = open_at("d_*.bin", config, i), *b = open_at("d_0.bin", config, 0);
        for (int t = 0; t < i % 4; t++) {
            CHECK(dataloader_next(a, &data, &error) == 0 && data.step == i + t, "a");
            CHECK(dataloader_next(b, &data, &error) == 0 && data.step == t, "b");
        }
        dataloader_close(a);
        if (i % 10 == 0) usleep(1000);
        dataloader_close(b);
    }
}

static void test_large_file(void)
{
    Error error = {""};
    test_case("a file beyond 2^31 tokens: windows at its end");
    char *path = xformat("%s/large.bin", folder);
    if (!test_sparse_file(path, "", 0, INT64_C(5000000000))) {
        test_skip("no sparse files here");
        free(path);
        return;
    }
    FILE *stream = fopen(path, "r+b");
    fseeko(stream, -8, SEEK_END); /* the last 4 of 2,500,000,000 tokens */
    fwrite("\1\0\2\0\3\0\4\0", 1, 8, stream);
    fclose(stream);
    DataLoader *d = open_at("large.bin", config_of(1, 3, 1), 0);
    int32_t out[4];
    CHECK(dataloader_windows(d) == 833333333, "%lld", (long long)dataloader_windows(d));
    CHECK(dataloader_read_window(d, 833333332, out, &error) == 0, "%s", error.text);
    CHECK(out[0] == 1 && out[3] == 4, "%d %d", out[0], out[3]);
    StepData data;
    CHECK(dataloader_next(d, &data, &error) == 0, "%s", error.text);
    dataloader_close(d);
    remove(path);
    free(path);
}

int main(void)
{
    folder = test_folder();
    test_windows();
    test_permutation();
    test_known_orders();
    test_randomness();
    test_steps();
    test_ranks();
    test_file_list_hash();
    test_bad_tokens();
    test_refusals();
    test_closing();
    test_large_file();
    test_folder_remove(folder);
    return test_done();
}
