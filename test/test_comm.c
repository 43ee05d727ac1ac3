/* comm.h on one rank: who owns what for any number of ranks and units, the sizes that follow, what one rank's
 * collectives do, and that a program without MPI refuses to be one of many. Many ranks: ranks_comm.c.
 */
#include "comm_cases.h"

#include <limits.h>
#include <math.h>
#include <sys/wait.h>
#include <unistd.h>

/* Marks every byte of every share of one piece: each exactly once, in rank order, cut at whole units. */
static void check_owners(size_t unit, size_t bytes, int ranks)
{
    static char memory[41 * 48];
    static int owner[sizeof memory];
    Piece piece = {0, 0, unit, bytes};
    Bucket b = {memory, false, 1, &piece};
    int64_t units = ceil_div((int64_t)bytes, (int64_t)unit);
    size_t sum = 0;

    memset(owner, -1, sizeof owner);
    for (int r = 0; r < ranks; r++) {
        Share s = bucket_share(&b, 0, r, ranks);
        int64_t first = units * r / ranks, end = units * (r + 1) / ranks;
        CHECK(share_bytes(&b, r, ranks) == s.bytes, "share_bytes of one piece");
        CHECK((s.bytes == 0) == (first == end), "rank %d of %d, %lld units: %zu bytes", r, ranks, (long long)units,
              s.bytes);
        sum += s.bytes;
        if (s.bytes == 0) continue;
        CHECK((size_t)(s.data - memory) == (size_t)first * unit, "start at unit %lld", (long long)first);
        for (size_t i = 0; i < s.bytes; i++) {
            CHECK(owner[s.data - memory + (ptrdiff_t)i] == -1, "byte %zu has two owners", i);
            owner[s.data - memory + (ptrdiff_t)i] = r;
        }
    }
    CHECK(sum == bytes && bucket_bytes(&b) == bytes, "%zu of %zu bytes", sum, bytes);
    for (size_t i = 0; i < bytes; i++) CHECK(owner[i] >= 0, "byte %zu has no owner", i);
    if (units == 1) CHECK(owner[0] == ranks - 1, "a vector belongs to the last rank");
}

static void test_owners(void)
{
    test_case("shares: every byte once, units 0 to 40, 1 to 9 ranks, whole and short last units");
    for (int ranks = 1; ranks <= 9; ranks++)
        for (size_t units = 0; units <= 40; units++)
            for (size_t unit = 1; unit <= 48; unit += 47) {
                check_owners(unit, units * unit, ranks);
                if (units && unit > 1) check_owners(unit, units * unit - 17, ranks);
            }

    test_case("shares: more bytes than 32 bits hold");
    Piece large = {0, 0, (size_t)16 * 16384 * 4, ((size_t)128256 * 16384 - 5 * 16384) * 4};
    Bucket b = {NULL, false, 1, &large};
    size_t sum = 0;
    for (int r = 0; r < 7; r++) sum += share_bytes(&b, r, 7);
    CHECK(sum == large.bytes, "%zu of %zu", sum, large.bytes);
}

static void test_sizes(void)
{
    test_case("a bucket of several pieces: shares in whole and own buffers, work");
    const Shape shape[] = {{192, 192 * 7 - 36}, {148, 148}, {320, 320 * 40}, {64, 0}, {64, 128}};
    for (int ranks = 1; ranks <= 9; ranks++) {
        size_t all = 0;
        for (int r = 0; r < ranks; r++) {
            static char memory[32768];
            Piece piece[5];
            size_t whole_bytes, own_bytes, sum = 0;
            lay_pieces(piece, shape, 5, r, ranks, &whole_bytes, &own_bytes);
            Bucket whole = {memory, false, 5, piece}, own = {memory, true, 5, piece};
            for (int p = 0; p < 5; p++) {
                Share a = bucket_share(&whole, p, r, ranks), o = bucket_share(&own, p, r, ranks);
                CHECK(a.bytes == o.bytes && !a.data == !o.data, "own and whole differ");
                if (o.data) CHECK((size_t)(o.data - memory) == piece[p].own, "own offset of piece %d", p);
                sum += a.bytes;
            }
            CHECK(share_bytes(&whole, r, ranks) == sum && share_bytes(&own, r, ranks) == sum, "rank %d", r);
            CHECK(comm_reduce_scatter_work(&whole, r, ranks) == (size_t)(ranks - 1) * sum, "work");
            all += sum;
        }
        CHECK(comm_all_reduce_work(40, ranks) == (size_t)(ranks - 1) * 40, "work");
        Bucket b = {
            .pieces = 5,
            .piece = (Piece[5]){
                {0, 0, 192, 192 * 7 - 36}, {0, 0, 148, 148}, {0, 0, 320, 12800}, {0, 0, 64, 0}, {0, 0, 64, 128}}};
        CHECK(all == bucket_bytes(&b), "%zu of %zu", all, bucket_bytes(&b));
    }

    test_case("messages: counts that an int holds, together all of it");
    const size_t sizes[] = {
        0,          1, ((size_t)1 << 26) - 1, (size_t)1 << 26, ((size_t)1 << 26) + 1, (size_t)1 << 31, (size_t)5 << 31,
        12345678901};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t done = 0, messages = 0;
        while (done < sizes[i] && messages++ < 1000) {
            size_t next = comm_message_bytes(sizes[i] - done);
            CHECK(next > 0 && next <= INT_MAX, "a message of %zu bytes", next);
            done += next;
        }
        CHECK(done == sizes[i], "%zu of %zu", done, sizes[i]);
    }
    CHECK(comm_message_bytes(0) == 0, "nothing");
}

static void test_arithmetic(void)
{
    test_case("maximum: NaN wins and has one form, +0 over -0, in any order");
    const float x[] = {-INFINITY, -3, -1e-40f, -0.0f, 0.0f, 1e-40f, 2, INFINITY};
    for (int i = 0; i < 8; i++)
        for (int j = 0; j < 8; j++) {
            float max = comm_max(x[i], x[j]), want = x[i > j ? i : j];
            CHECK(memcmp(&max, &want, sizeof max) == 0, "max of %g and %g is %g", (double)x[i], (double)x[j],
                  (double)max);
        }
    uint32_t bits = 0xffc12345, result;
    float nan, max;
    memcpy(&nan, &bits, sizeof nan);
    for (int i = 0; i < 3; i++) {
        max = comm_max(i == 1 ? 1 : nan, i == 0 ? INFINITY : nan);
        memcpy(&result, &max, sizeof result);
        CHECK(result == 0x7fc00000, "NaN is %08x", result);
    }

    test_case("additions: one a value, of any length");
    enum { N = 70001 };
    float *sum = xmalloc(N * sizeof *sum), *add = xmalloc(N * sizeof *add), *want = xmalloc(N * sizeof *want);
    for (size_t n = 0; n <= N; n = n < 40 ? n + 1 : n * 3 > N && n < N ? N : n * 3) {
        for (size_t i = 0; i < N; i++) {
            sum[i] = value(1, 0, i);
            add[i] = value(2, 0, i);
            volatile float one = sum[i];
            if (i < n) one = one + add[i];
            want[i] = one;
        }
        comm_add(sum, add, n);
        CHECK(memcmp(sum, want, N * sizeof *sum) == 0, "%zu values", n);
        if (n == N) break;
    }
    free(sum);
    free(add);
    free(want);
}

static void test_self(void)
{
    enum { PIECES = 3 };
    const Shape shape[PIECES] = {{192, 192 * 7 - 36}, {148, 148}, {64, 128}};
    Piece piece[PIECES];
    size_t whole_bytes, own_bytes;
    float a[1024], b[1024], before[1024], want;
    Comm c;

    test_case("one rank: reduce-scatter adds, touches nothing beside; gather, sums and maxima keep");
    comm_open(&c);
    CHECK(c.rank == 0 && c.ranks == 1 && c.hang_timeout_s > 0, "rank %d of %d", c.rank, c.ranks);
    lay_pieces(piece, shape, PIECES, 0, 1, &whole_bytes, &own_bytes);
    CHECK(whole_bytes <= sizeof a && own_bytes <= sizeof a, "room");
    for (int own = 0; own < 2; own++) {
        for (size_t i = 0; i < 1024; i++) before[i] = a[i] = value(3, 0, i), b[i] = value(4, 0, i);
        Bucket sum = {(char *)a, own, PIECES, piece}, contribution = {(char *)b, false, PIECES, piece};
        c.finish(&c, c.reduce_scatter_start(&c, sum, contribution, own ? REDUCE_FAST : REDUCE_ORDERED, NULL));
        for (int p = 0; p < PIECES; p++)
            for (size_t i = 0; i < piece[p].bytes / 4; i++) {
                size_t to = (own ? piece[p].own : piece[p].offset) / 4 + i;
                want = before[to] + b[piece[p].offset / 4 + i];
                CHECK(memcmp(&a[to], &want, 4) == 0, "piece %d, %zu", p, i);
                a[to] = before[to];
            }
        CHECK(memcmp(a, before, sizeof a) == 0, "wrote beside its pieces");

        c.finish(&c, c.all_gather_start(&c, contribution, sum));
        for (int p = 0; p < PIECES; p++)
            CHECK(memcmp((char *)b + piece[p].offset, (char *)a + (own ? piece[p].own : piece[p].offset),
                         piece[p].bytes) == 0,
                  "gather of piece %d", p);
    }
    memcpy(before, a, sizeof a);
    Bucket both = {(char *)a, false, PIECES, piece};
    c.finish(&c, c.reduce_scatter_start(&c, both, both, REDUCE_FAST, NULL));
    c.finish(&c, c.all_gather_start(&c, both, both));
    CHECK(memcmp(a, before, sizeof a) == 0, "one buffer: its own total");

    float x[3] = {-2, NAN, -0.0f};
    double y[2] = {-1.5, 1e300};
    c.finish(&c, c.all_reduce_max_start(&c, x, 3, NULL));
    c.finish(&c, c.all_reduce_sum_start(&c, y, 2, NULL));
    CHECK(x[0] == -2 && isnan(x[1]) && x[2] == 0 && signbit(x[2]) && y[0] == -1.5 && y[1] == 1e300, "values kept");
    uint64_t word = 77;
    c.broadcast(&c, &word, sizeof word, 0);
    c.barrier(&c);
    comm_check_equal(&c, "config", word);
    CHECK(word == 77 && c.bytes_sent == 0, "sent %zu bytes", c.bytes_sent);
    comm_close(&c);
}

static void open_self(void)
{
    Comm c;
    comm_self_open(&c);
}

static void reduce_in_place(void)
{
    Comm c;
    float x[4] = {0};
    Piece piece = {0, 0, 16, 16};
    Bucket b = {(char *)x, false, 1, &piece};
    comm_self_open(&c);
    c.reduce_scatter_start(&c, b, b, REDUCE_ORDERED, NULL);
}

static int run_child(void (*body)(void), const char *name, const char *ranks, char *output, size_t room)
{
    int ends[2], status = 0;
    size_t length = 0;
    fflush(stdout);
    if (pipe(ends)) die("cannot make a pipe");
    pid_t child = fork();
    if (child == 0) {
        if (name) setenv(name, ranks, 1);
        dup2(ends[1], 2);
        body();
        _exit(0);
    }
    close(ends[1]);
    for (ssize_t got; length + 1 < room && (got = read(ends[0], output + length, room - 1 - length)) > 0;)
        length += (size_t)got;
    output[length] = 0;
    close(ends[0]);
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_refusals(void)
{
    char output[1024];
    const char *const names[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"};
    test_case("one rank refuses to be one of many, and says what to do");
    for (int i = 0; i < 3; i++) {
        CHECK(run_child(open_self, names[i], "3", output, sizeof output) == EXIT_RUNTIME, "%s: exit code", names[i]);
        CHECK(strstr(output, "one of 3 ranks") && strstr(output, "MPI"), "%s", output);
        CHECK(run_child(open_self, names[i], "1", output, sizeof output) == 0, "%s=1: %s", names[i], output);
        CHECK(run_child(open_self, names[i], "", output, sizeof output) == 0, "%s=: %s", names[i], output);
    }
    test_case("an ordered reduction onto its own input is refused");
    CHECK(run_child(reduce_in_place, NULL, NULL, output, sizeof output) == EXIT_RUNTIME, "exit code");
    CHECK(strstr(output, "one buffer"), "%s", output);
}

int main(void)
{
    unsetenv("OMPI_COMM_WORLD_SIZE");
    unsetenv("PMI_SIZE");
    unsetenv("SLURM_STEP_NUM_TASKS");
    test_owners();
    test_sizes();
    test_arithmetic();
    test_self();
    test_refusals();
    return test_done();
}
