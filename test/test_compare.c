/* compare.c: gap and standard error of known numbers, sides of several runs, bits per byte, the exit code on both sides
 * of --max_gap, logs that do not fit together. */
#include "compare.h"
#include "test.h"
#include "test_capture.h"

#include <math.h>
#include <sys/stat.h>

static const char *folder;

/* Writes RUN/log.jsonl: steps first, first + stride, ... with loss base + slope * step (+ wiggle on odd steps). */
static char *make_run(const char *name, int first, int stride, int n, double base, double wiggle)
{
    char *run = xformat("%s/%s", folder, name), *path = xformat("%s/log.jsonl", run);
    mkdir(run, 0700);
    FILE *log = fopen(path, "w");
    if (!log) die("cannot write %s", path);
    for (int i = 0; i < n; i++) {
        int step = first + i * stride;
        fprintf(log, "{\"step\":%d,\"loss\":%.17g", step, base + 1.0 / (step + 1) + (step % 2 ? wiggle : -wiggle));
        if (step % 20 == 0) fprintf(log, ",\"val_loss\":%.17g", 2 * base);
        fprintf(log, "}\n");
    }
    fclose(log);
    free(path);
    return run;
}

static void put_config(const char *run, const char *text)
{
    char *path = xformat("%s/config.json", run);
    test_write_file(path, text, strlen(text));
    free(path);
}

static double last_fraction = 1;

/* compare_runs with what it prints; *screen is owned by the caller. */
static int compare(const char *a, const char *b, int64_t block, double max_gap, char **screen, Error *error)
{
    error->text[0] = 0;
    Capture capture = capture_start();
    int code = compare_runs(a, b, block, last_fraction, max_gap, error);
    *screen = capture_end(&capture);
    return code;
}

static void expect(const char *a, const char *b, int64_t block, double max_gap, int code, const char *printed)
{
    Error error;
    char *screen;
    int got = compare(a, b, block, max_gap, &screen, &error);
    CHECK(got == code, "exit code %d, not %d: %s", got, code, error.text);
    CHECK(strstr(got == -1 ? error.text : screen, printed), "\"%s\" is not in \"%s\"", printed,
          got == -1 ? error.text : screen);
    free(screen);
}

static void test_blocks(void)
{
    const double gap[7] = {100, 1, 3, 2, 6, 5, 7};
    test_case("gap of blocks: mean and standard error by hand, the odd start is left out");
    Gap two = gap_of_blocks(gap, 7, 2); /* means 2, 4, 6: mean 4, variance 4, error sqrt(4 / 3) */
    CHECK(two.blocks == 3 && two.first == 1, "%ld blocks from %ld", (long)two.blocks, (long)two.first);
    CHECK(two.mean == 4 && fabs(two.error - sqrt(4.0 / 3)) < 1e-15, "%.17g +- %.17g", two.mean, two.error);
    Gap one = gap_of_blocks(gap + 1, 6, 100);
    CHECK(one.blocks == 1 && one.first == 0 && one.mean == 4 && isnan(one.error), "one short block");
    Gap each = gap_of_blocks(gap, 7, 1);
    CHECK(each.blocks == 7 && fabs(each.mean - 124.0 / 7) < 1e-12, "blocks of one");

    test_case("the standard error has the right size: noise of known deviation");
    double noise[4000], sum = 0;
    for (int i = 0; i < 4000; i++) noise[i] = (double)(philox4x32(10, (uint32_t)i, 0, 0, 0, 0, 0).word[0] >> 31);
    for (int i = 0; i < 4000; i++) sum += noise[i];
    Gap coin = gap_of_blocks(noise, 4000, 10); /* deviation 1/2 a step: error 0.5 / sqrt(4000) */
    CHECK(fabs(coin.mean - sum / 4000) < 1e-12, "mean %g", coin.mean);
    CHECK(fabs(coin.error - 0.5 / sqrt(4000)) < 0.15 * 0.5 / sqrt(4000), "error %g, not %g", coin.error,
          0.5 / sqrt(4000));
}

static void test_known_gap(void)
{
    char *a = make_run("a", 1, 1, 100, 3, 0), *b = make_run("b", 1, 1, 100, 3.25, 0),
         *c = make_run("c", 11, 1, 95, 3, 0.5);
    test_case("a known gap; both sides of max_gap; a better B is no failure");
    expect(a, b, 10, -1, 0, "mean gap     +0.250000 +- 0.000000 nats per token");
    expect(a, b, 10, -1, 0, "100 common steps; 10 blocks of 10");
    expect(a, b, 10, 0.2500001, 0, "within max_gap 0.25");
    expect(a, b, 10, 0.2499999, EXIT_GAP, "BEYOND max_gap 0.25");
    expect(a, b, 10, 0, EXIT_GAP, "BEYOND max_gap 0");
    expect(b, a, 10, 0, 0, "mean gap     -0.250000");
    expect(a, a, 10, 0, 0, "within max_gap 0");

    test_case("only common steps count; the remainder at the start is left out");
    expect(a, c, 20, -1, 0, "90 common steps; 4 blocks of 20");
    expect(a, c, 20, -1, 0, "       21 ..        40 ");
    expect(a, c, 1, -1, 0, "+- 0.053000 nats"); /* all +-1/2: 0.5 / sqrt(89) */

    test_case("the last part of the steps only");
    last_fraction = 0.2;
    expect(a, b, 5, -1, 0, "20 common steps; 4 blocks of 5");
    expect(a, b, 5, -1, 0, "       81 ..        85 ");
    last_fraction = 1e-9; /* at least one step */
    expect(a, b, 5, -1, 0, "1 common steps; 1 blocks of 1");
    last_fraction = 1;

    test_case("validation at common steps");
    expect(a, b, 10, -1, 0, "                   100     6.00000    6.50000   +0.500000");
    expect(a, b, 10, -1, 0, "last gap     +0.500000 nats per token");
    free(a);
    free(b);
    free(c);
}

static void test_bits(void)
{
    char *a = make_run("bits_a", 1, 1, 40, 3, 0), *b = make_run("bits_b", 1, 1, 40, 3 + log(2), 0);
    Error error;
    char *screen;
    test_case("bits per byte only where both configs have the same bytes per token");
    CHECK(compare(a, b, 10, -1, &screen, &error) == 0 && !strstr(screen, "bits per byte"), "without config.json");
    free(screen);
    put_config(a, "{\"bytes_per_token\": 4}");
    CHECK(compare(a, b, 10, -1, &screen, &error) == 0 && !strstr(screen, "bits per byte"), "one side only");
    free(screen);
    put_config(b, "{\"bytes_per_token\": 4.0, \"vocab\": 50257}");
    expect(a, b, 10, -1, 0, "             +0.250000 +- 0.000000 bits per byte");
    put_config(b, "{\"bytes_per_token\": 1}");
    expect(a, b, 10, -1, 0, "note: 4 and 1 bytes per token");
    put_config(b, "{\"bytes_per_token\": \"4\"}");
    CHECK(compare(a, b, 10, -1, &screen, &error) == 0 && !strstr(screen, "bits per byte"), "not a number");
    free(screen);

    char *both = xformat("%s,%s", a, b);
    put_config(b, "{\"bytes_per_token\": 1}");
    CHECK(compare(both, both, 10, -1, &screen, &error) == 0 && !strstr(screen, "bits per byte"), "a mixed side");
    free(screen);
    free(both);
    free(a);
    free(b);
}

static void test_groups(void)
{
    char *a = make_run("g1", 1, 1, 60, 3, 0), *b = make_run("g2", 11, 2, 30, 4, 0), *c = make_run("g3", 1, 1, 60, 4, 0);
    char *side = xformat("%s,%s", a, b), *three = xformat("%s,%s,%s", c, a, c), *gone = xformat("%s,%s/no", a, folder);
    test_case("several runs a side are averaged over the steps that all have");
    expect(side, c, 5, -1, 0, "25 common steps; 5 blocks of 5");
    expect(side, c, 5, -1, 0, "mean gap     +0.500000 +- 0.000000");
    expect(a, three, 5, -1, 0, "mean gap     +0.666667");
    expect(gone, c, 5, -1, -1, "/no/log.jsonl");
    expect(c, gone, 5, -1, -1, "/no/log.jsonl");
    expect("", c, 5, -1, -1, "/log.jsonl");
    free(a);
    free(b);
    free(c);
    free(side);
    free(three);
    free(gone);
}

static void put_log(const char *run, const char *text)
{
    char *path = xformat("%s/log.jsonl", run);
    test_write_file(path, text, strlen(text));
    free(path);
}

static void test_hostile(void)
{
    char *a = make_run("h1", 1, 1, 20, 3, 0), *b = make_run("h2", 101, 1, 20, 3, 0);
    test_case("logs that do not fit together");
    expect(a, b, 10, 1, -1, "no step with a \"loss\" in common");
    put_log(b, "{\"step\":1}\n{\"step\":2}\n");
    expect(a, b, 10, 1, -1, "no step with a \"loss\" in common");
    put_log(b, "not a log\n");
    expect(a, b, 10, 1, -1, "no line is a JSON object");
    put_log(b, "{\"step\":1,\"loss\":3}\n{\"step\":2,\"loss\":\"nan\"}\n");
    expect(a, b, 10, 1, -1, "loss is not finite at step 2");
    put_log(b, "{\"step\":1,\"loss\":3.5}\n{\"step\":20,\"loss\":4,\"val_loss\":\"inf\"}\n");
    expect(a, b, 10, 1, -1, "val_loss is not finite at step 20");

    test_case("steps out of order and twice: sorted, the later line counts");
    put_log(a, "{\"step\":3,\"loss\":1}\n{\"step\":1,\"loss\":1}\n{\"step\":2,\"loss\":1}\n{\"step\":4,\"loss\":1}\n");
    put_log(b, "{\"step\":4,\"loss\":2}\n{\"step\":2,\"loss\":9}\n{\"step\":1,\"loss\":2}\n{\"step\":2,\"loss\":2}\n");
    expect(a, b, 1, -1, 0, "3 common steps; 3 blocks of 1");
    expect(a, b, 1, -1, 0, "mean gap     +1.000000 +- 0.000000");
    expect(a, b, 10, -1, 0, "mean gap     +1.000000 nats"); /* one block: no error */
    free(a);
    free(b);
}

int main(void)
{
    char *own = test_folder();
    folder = own;
    test_blocks();
    test_known_gap();
    test_bits();
    test_groups();
    test_hostile();
    test_folder_remove(own);
    return test_done();
}
