/* common.c: the hash against published and independently computed values, errors, formatting, and how die() ends. */
#include "common.h"
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

typedef struct {
    size_t bytes;
    uint64_t seed, hash;
} HashAnswer;

/* Of the bytes (7 i + 3) mod 256, from the reference implementation by way of Python's xxhash. */
static const HashAnswer ANSWERS[] = {
    {0, 0, 0xef46db3751d8e999u},   {0, 0x9e3779b185ebca8du, 0x0b303d920ec349dfu},
    {1, 0, 0x1f25c8d0bc1f4bb6u},   {1, 0x9e3779b185ebca8du, 0x4e38da78585833ffu},
    {3, 0, 0x31d2363f52e564c9u},   {3, 0x9e3779b185ebca8du, 0xdb3c6b59a9bf9c25u},
    {4, 0, 0x9bb64b7d66ee9fdau},   {4, 0x9e3779b185ebca8du, 0xdce74de74556ff94u},
    {7, 0, 0x9a7b149959ce60d8u},   {7, 0x9e3779b185ebca8du, 0xba5b6f2cc49d11a0u},
    {8, 0, 0xdab99d95c6f90092u},   {8, 0x9e3779b185ebca8du, 0xf66e0ca3301b75a3u},
    {14, 0, 0xc7f1d4d0acfa5a14u},  {14, 0x9e3779b185ebca8du, 0x26433fd0b710d0f8u},
    {31, 0, 0xa2aa5f33cc4a6119u},  {31, 0x9e3779b185ebca8du, 0x66f647a52a03a377u},
    {32, 0, 0x23c3c17ef790fd97u},  {32, 0x9e3779b185ebca8du, 0x01b323691afef034u},
    {33, 0, 0x50a7cfc7ba588784u},  {33, 0x9e3779b185ebca8du, 0x527f3caeff0c9292u},
    {63, 0, 0x5e3e54b431c7493cu},  {63, 0x9e3779b185ebca8du, 0xca00b70007169fc7u},
    {64, 0, 0x0eb64b3ef6eeb01fu},  {64, 0x9e3779b185ebca8du, 0x34d5a64ae8dc6e9fu},
    {100, 0, 0xa61f8d4c170fe531u}, {100, 0x9e3779b185ebca8du, 0x919ccda367e2a61eu},
    {222, 0, 0x8488aa61fc67f7ebu}, {222, 0x9e3779b185ebca8du, 0xe3f1bff09bc282b6u},
    {300, 0, 0x240004dbee0ba6dcu}, {300, 0x9e3779b185ebca8du, 0x026905bf2f4f910bu},
};

static void test_hash(void)
{
    unsigned char data[301];
    test_case("hash64: known answers");
    for (int i = 0; i < 300; i++) data[i] = (unsigned char)(7 * i + 3);
    for (size_t i = 0; i < sizeof ANSWERS / sizeof ANSWERS[0]; i++) {
        uint64_t hash = hash64(data, ANSWERS[i].bytes, ANSWERS[i].seed);
        CHECK(hash == ANSWERS[i].hash, "%zu bytes: %016llx", ANSWERS[i].bytes, (unsigned long long)hash);
    }
    CHECK(hash64("a", 1, 0) == 0xd24ec4f1a98c6e5bu, "a");
    CHECK(hash64("abc", 3, 0) == 0x44bc2cf5ad770999u, "abc");
    CHECK(hash64("Nobody inspects the spammish repetition", 39, 0) == 0xfbcea83c8a378bf1u, "the sentence");

    test_case("hash64: any alignment");
    memmove(data + 1, data, 300);
    CHECK(hash64(data + 1, 300, 0) == 0x240004dbee0ba6dcu, "unaligned");
}

static void test_errors(void)
{
    test_case("error_set: fills, returns -1, cuts what is too long");
    Error error;
    char longer[2 * sizeof error.text];
    CHECK(error_set(&error, "%s: line %d", "file", 3) == -1, "return value");
    CHECK(strcmp(error.text, "file: line 3") == 0, "%s", error.text);
    memset(longer, 'x', sizeof longer);
    longer[sizeof longer - 1] = 0;
    CHECK(error_set(&error, "%s", longer) == -1, "return value");
    CHECK(strlen(error.text) == sizeof error.text - 1, "length %zu", strlen(error.text));
    CHECK(error_set(NULL, "nobody listens") == -1, "NULL");
}

static void test_text(void)
{
    test_case("xformat, xstrdup: any length");
    char longer[5000];
    memset(longer, 'y', sizeof longer);
    longer[sizeof longer - 1] = 0;
    char *text = xformat("%s|%d", longer, -7), *copy = xstrdup(text);
    CHECK(strlen(text) == sizeof longer - 1 + 3, "length %zu", strlen(text));
    CHECK(strcmp(text + sizeof longer - 1, "|-7") == 0, "end");
    CHECK(strcmp(text, copy) == 0 && text != copy, "copy");
    free(text);
    free(copy);
}

static void test_memory(void)
{
    test_case("xmalloc, xcalloc, xrealloc: zero bytes, zeroed memory");
    unsigned char *zeros = xcalloc(100, 7);
    int sum = 0;
    for (int i = 0; i < 700; i++) sum += zeros[i];
    CHECK(sum == 0, "sum %d", sum);
    zeros[699] = 5;
    zeros = xrealloc(zeros, 100000);
    CHECK(zeros[699] == 5, "kept");
    free(zeros);
    void *none = xmalloc(0), *nothing = xcalloc(0, 8);
    CHECK(none && nothing, "zero bytes give a pointer");
    free(none);
    free(nothing);
}

static void test_small_functions(void)
{
    test_case("min, max, ceil_div, round_up, clocks");
    CHECK(min_i64(-3, 2) == -3 && max_i64(-3, 2) == 2, "min and max");
    CHECK(ceil_div(0, 16) == 0 && ceil_div(1, 16) == 1 && ceil_div(16, 16) == 1 && ceil_div(17, 16) == 2, "ceil_div");
    CHECK(round_up(50257, 128) == 50304, "round_up");
    double before = now_seconds();
    CHECK(now_seconds() >= before, "the clock runs forward");
    CHECK(peak_rss_bytes() > 100000, "peak RSS %lld", (long long)peak_rss_bytes());
}

static void hook(int code) { printf("hook %d", code); }

static void die_overflow(void) { free(xcalloc(SIZE_MAX / 2, 16)); }
static void die_plain(void) { die("disk %d", 7); }
static void die_with_prefix(void)
{
    die_set_prefix("rank 3 on node7: ");
    die("disk %d", 7);
}
static void die_of_usage(void)
{
    die_set_hook(hook);
    die_usage("no option %s", "--x");
}

/* Runs it in a child: exit code and what it printed on stdout and stderr. */
static int run_child(void (*body)(void), char *output, size_t room)
{
    int ends[2], status = 0;
    size_t length = 0;
    fflush(stdout);
    if (pipe(ends)) die("cannot make a pipe");
    pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], 1);
        dup2(ends[1], 2);
        close(ends[0]);
        close(ends[1]);
        body();
        exit(0);
    }
    close(ends[1]);
    for (ssize_t got; length + 1 < room && (got = read(ends[0], output + length, room - 1 - length)) > 0;)
        length += (size_t)got;
    output[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_die(void)
{
    char output[512];
    test_case("die: one line on stderr, exit codes 1 and 2, the hook");
    CHECK(run_child(die_plain, output, sizeof output) == EXIT_RUNTIME, "exit code");
    CHECK(strcmp(output, "error: disk 7\n") == 0, "%s", output);
    CHECK(run_child(die_with_prefix, output, sizeof output) == EXIT_RUNTIME, "exit code");
    CHECK(strcmp(output, "error: rank 3 on node7: disk 7\n") == 0, "%s", output);
    CHECK(run_child(die_of_usage, output, sizeof output) == EXIT_USAGE, "exit code");
    CHECK(strcmp(output, "error: no option --x\nhook 2") == 0, "%s", output);

    test_case("xcalloc: a product that overflows is out of memory");
    CHECK(run_child(die_overflow, output, sizeof output) != 0, "exit code");
}

int main(void)
{
    test_hash();
    test_errors();
    test_text();
    test_memory();
    test_small_functions();
    test_die();
    return test_done();
}
