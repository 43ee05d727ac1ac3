/* comm.h on many ranks: run under mpirun by test_comm_mpi.sh, and with NCCL under it (staged_comm.cu) by
 * test_cuda_ranks.sh. Every rank computes what every other one gives, so each
 * checks its own result.
 *
 *     ranks_comm check          all collectives; rank 0 prints the last line, a rank with a failure exits 1
 *     ranks_comm FAULT MARK     the last rank but one has the fault in step 3 of a loop; the rest must end by themselves
 *     ranks_comm large          shares of more than one message
 *     ranks_comm pause          all are stopped for longer than hang_timeout_s, then go on
 */
#include "comm_cases.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

/* A matrix with a short last unit, a vector, more units than ranks, nothing, two units, messages beyond eager size. */
static const Shape shapes[] = {{192, 192 * 7 - 36}, {148, 148},           {320, 320 * 40}, {64, 0},
                               {64, 128},           {8192, 8192 * 95 - 4}};
static const Shape byte_shapes[] = {{9, 9 * 40}, {72, 72 * 11 - 5}, {1, 1}, {4096, 4096 * 150}};
enum { PIECES = sizeof shapes / sizeof *shapes, BYTE_PIECES = sizeof byte_shapes / sizeof *byte_shapes };

typedef struct { /* one reduction or gather: its memory, filled the same way every time */
    Piece *piece;
    Bucket to, from;
    size_t whole_bytes, own_bytes, to_bytes;
    char *before; /* `to` as it was */
    void *work;
    size_t sends;
    ReduceOrder order;
    uint64_t seed;
    bool own; /* `to` (a reduction) or `from` (a gather) holds only own shares */
} Case;

static void case_free(Case *k)
{
    if (k->from.data != k->to.data) free(k->from.data);
    free(k->to.data);
    free(k->piece);
    free(k->before);
    free(k->work);
}

/* Byte i of piece p in a gather. */
static char byte_of(uint64_t seed, int p, size_t i) { return (char)draw(seed, (uint64_t)p, i); }

static void fill_floats(char *data, size_t bytes, uint64_t seed, int rank)
{
    for (size_t i = 0; i < bytes / 4; i++) {
        float x = value(seed, rank, i);
        memcpy(data + 4 * i, &x, 4);
    }
}

static Case reduce_case(const Comm *c, uint64_t seed, ReduceOrder order, bool own, bool one_buffer)
{
    Case k = {.seed = seed, .order = order, .own = own};
    k.piece = xcalloc(PIECES, sizeof *k.piece);
    lay_pieces(k.piece, shapes, PIECES, c->rank, c->ranks, &k.whole_bytes, &k.own_bytes);
    k.to_bytes = own ? k.own_bytes : k.whole_bytes;
    k.from = (Bucket){xmalloc(k.whole_bytes), false, PIECES, k.piece};
    k.to = (Bucket){one_buffer ? k.from.data : xmalloc(k.to_bytes), own, PIECES, k.piece};
    k.before = xmalloc(k.to_bytes);
    fill_floats(k.to.data, k.to_bytes, seed + 1, c->rank);
    fill_floats(k.from.data, k.whole_bytes, seed, c->rank);
    memcpy(k.before, k.to.data, k.to_bytes);
    k.work = xmalloc(comm_reduce_scatter_work(&k.from, c->rank, c->ranks));
    k.sends = bucket_bytes(&k.from) - share_bytes(&k.from, c->rank, c->ranks);
    return k;
}

static Request reduce_start(Comm *c, Case *k) { return c->reduce_scatter_start(c, k->to, k->from, k->order, k->work); }

static float float_at(const char *p)
{
    float x;
    memcpy(&x, p, 4);
    return x;
}

/* One element: in ordered mode the bits of the sum in rank order, else within the rounding of R additions. */
static void check_sum(const Comm *c, const Case *k, int p, size_t at, float result, float start)
{
    bool in_place = k->to.data == k->from.data;
    volatile float ordered = start;
    double exact = in_place ? 0 : (double)start, size = fabs(exact);
    for (int r = 0; r < c->ranks; r++) {
        float x = value(k->seed, r, at / 4);
        ordered = ordered + x;
        exact += (double)x;
        size += fabs((double)x);
    }
    float want = ordered;
    if (k->order == REDUCE_ORDERED)
        CHECK(memcmp(&result, &want, 4) == 0, "rank %d, piece %d: %a, serially %a", c->rank, p, (double)result,
              (double)want);
    else
        CHECK(fabs((double)result - exact) <= c->ranks * FLT_EPSILON * size, "rank %d, piece %d: %a, exactly %a",
              c->rank, p, (double)result, exact);
}

static void reduce_check(const Comm *c, Case *k)
{
    for (int p = 0; p < PIECES; p++) {
        Share to = bucket_share(&k->to, p, c->rank, c->ranks), from = bucket_share(&k->from, p, c->rank, c->ranks);
        for (size_t i = 0; i < to.bytes; i += 4) {
            size_t at = (size_t)(to.data - k->to.data) + i;
            check_sum(c, k, p, (size_t)(from.data - k->from.data) + i, float_at(to.data + i), float_at(k->before + at));
            memcpy(to.data + i, k->before + at, 4);
        }
    }
    CHECK(memcmp(k->to.data, k->before, k->to_bytes) == 0, "rank %d: wrote beside its shares", c->rank);
    char *from = xmalloc(k->whole_bytes);
    fill_floats(from, k->whole_bytes, k->seed, c->rank);
    CHECK(memcmp(k->from.data, from, k->whole_bytes) == 0, "rank %d: the contribution changed", c->rank);
    free(from);
    case_free(k);
}

static Case gather_case(const Comm *c, uint64_t seed, bool own)
{
    Case k = {.seed = seed, .own = own};
    k.piece = xcalloc(BYTE_PIECES, sizeof *k.piece);
    lay_pieces(k.piece, byte_shapes, BYTE_PIECES, c->rank, c->ranks, &k.whole_bytes, &k.own_bytes);
    k.to_bytes = k.whole_bytes;
    k.to = (Bucket){xmalloc(k.whole_bytes), false, BYTE_PIECES, k.piece};
    k.from = (Bucket){own ? xmalloc(k.own_bytes) : k.to.data, own, BYTE_PIECES, k.piece};
    memset(k.to.data, 0x55, k.whole_bytes);
    k.before = xmalloc(k.whole_bytes);
    memcpy(k.before, k.to.data, k.whole_bytes);
    for (int p = 0; p < BYTE_PIECES; p++) {
        Share place = bucket_share(&k.to, p, c->rank, c->ranks), s = bucket_share(&k.from, p, c->rank, c->ranks);
        size_t first = s.bytes ? (size_t)(place.data - k.to.data) - k.piece[p].offset : 0;
        for (size_t i = 0; i < s.bytes; i++) s.data[i] = byte_of(seed, p, first + i);
    }
    k.sends = (size_t)(c->ranks - 1) * share_bytes(&k.from, c->rank, c->ranks);
    return k;
}

static Request gather_start(Comm *c, Case *k) { return c->all_gather_start(c, k->to, k->from); }

static void gather_check(const Comm *c, Case *k)
{
    for (int p = 0; p < BYTE_PIECES; p++)
        for (size_t i = 0; i < k->piece[p].bytes; i++) {
            char *at = k->to.data + k->piece[p].offset + i;
            CHECK(*at == byte_of(k->seed, p, i), "rank %d, piece %d, byte %zu", c->rank, p, i);
            *at = 0x55;
        }
    CHECK(memcmp(k->to.data, k->before, k->whole_bytes) == 0, "rank %d: wrote between the pieces", c->rank);
    case_free(k);
}

enum { VALUES = 9001 }; /* beyond eager size as doubles */

static float amax_of(uint64_t seed, int rank, int64_t i)
{
    if (i % 17 == 0) return -fabsf(value(seed, rank, (size_t)i)); /* a maximum below zero */
    if (i % 31 == 1 && draw(seed, (uint64_t)rank, (uint64_t)i) % 4 == 0) return -NAN;
    if (i % 19 == 2) return rank % 2 ? -0.0f : 0.0f;
    if (i % 23 == 3) return -INFINITY;
    return value(seed, rank, (size_t)i);
}

static double part_of(const Comm *c, uint64_t seed, int rank, int64_t i) /* odd: one rank has it; even: all add */
{
    if (i % 2 && i % c->ranks != rank) return 0;
    return (double)value(seed, rank, (size_t)i);
}

static void fill_values(const Comm *c, uint64_t seed, float *x, double *y)
{
    for (int64_t i = 0; i < VALUES; i++) x[i] = amax_of(seed, c->rank, i), y[i] = part_of(c, seed, c->rank, i);
}

static void check_values(const Comm *c, uint64_t seed, const float *x, const double *y)
{
    for (int64_t i = 0; i < VALUES; i++) {
        float max = amax_of(seed, 0, i);
        double sum = part_of(c, seed, 0, i);
        for (int r = 0; r < c->ranks; r++) {
            max = comm_max(max, amax_of(seed, r, i));
            if (r) sum += part_of(c, seed, r, i);
        }
        CHECK(memcmp(&x[i], &max, sizeof max) == 0, "rank %d: maximum %lld is %a, not %a", c->rank, (long long)i,
              (double)x[i], (double)max);
        CHECK(memcmp(&y[i], &sum, sizeof sum) == 0, "rank %d: sum %lld is %a, not %a", c->rank, (long long)i, y[i],
              sum);
    }
}

/* ---- cases ---- */

static void check_sent(Comm *c, size_t want)
{
    CHECK(c->bytes_sent == want, "rank %d sent %zu bytes, by the formula %zu", c->rank, c->bytes_sent, want);
    c->bytes_sent = 0;
}

static void test_reductions(Comm *c)
{
    test_case("ordered reduce-scatter: the bits of serial additions in rank order; bytes sent");
    for (int own = 0; own < 2; own++) {
        Case k = reduce_case(c, 10, REDUCE_ORDERED, own, false);
        c->finish(c, reduce_start(c, &k));
        check_sent(c, k.sends);
        reduce_check(c, &k);
    }
    test_case("fast reduce-scatter, also within one buffer");
    for (int kind = 0; kind < 3; kind++) {
        Case k = reduce_case(c, 20, REDUCE_FAST, kind == 1, kind == 2);
        c->finish(c, reduce_start(c, &k));
        check_sent(c, k.sends);
        reduce_check(c, &k);
    }
}

static void test_gathers(Comm *c)
{
    test_case("all-gather of uneven pieces, in place and from own shares; bytes sent");
    for (int own = 0; own < 2; own++) {
        Case k = gather_case(c, 30, own);
        c->finish(c, gather_start(c, &k));
        check_sent(c, k.sends);
        gather_check(c, &k);
    }
}

static void test_values(Comm *c)
{
    test_case("maxima and sums: NaN, zeros, values below zero, rank order; none at all; bytes sent");
    float *x = xmalloc(VALUES * sizeof *x);
    double *y = xmalloc(VALUES * sizeof *y);
    void *work = xmalloc(comm_all_reduce_work(VALUES * sizeof *y, c->ranks));
    fill_values(c, 40, x, y);
    c->finish(c, c->all_reduce_max_start(c, x, VALUES, work));
    check_sent(c, (size_t)(c->ranks - 1) * VALUES * sizeof *x);
    c->finish(c, c->all_reduce_sum_start(c, y, VALUES, work));
    check_sent(c, (size_t)(c->ranks - 1) * VALUES * sizeof *y);
    check_values(c, 40, x, y);
    c->finish(c, c->all_reduce_max_start(c, x, 0, NULL));
    check_sent(c, 0);
    free(x);
    free(y);
    free(work);
}

static void test_host(Comm *c)
{
    test_case("broadcast from every rank, barrier, finish of nothing");
    size_t bytes = 300000;
    char *data = xmalloc(bytes);
    for (int root = 0; root < c->ranks; root++) {
        for (size_t i = 0; i < bytes; i++) data[i] = c->rank == root ? byte_of(50, root, i) : 0;
        c->broadcast(c, data, bytes, root);
        check_sent(c, c->rank == root ? (size_t)(c->ranks - 1) * bytes : 0);
        for (size_t i = 0; i < bytes; i++) CHECK(data[i] == byte_of(50, root, i), "byte %zu from %d", i, root);
    }
    free(data);
    for (int late = 0; late < c->ranks; late++) {
        if (c->rank == late) usleep(20000);
        double entered = now_seconds(), left;
        c->barrier(c);
        left = now_seconds();
        check_sent(c, 0);
        c->broadcast(c, &entered, sizeof entered, late); /* one machine, one clock */
        c->bytes_sent = 0;
        CHECK(left >= entered, "rank %d left the barrier before rank %d came", c->rank, late);
    }
    c->finish(c, 0);
    comm_check_equal(c, "config", 1234);
    c->bytes_sent = 0;
}

/* All kinds at once, several times; each rank finishes in an order of its own. */
static void test_in_flight(Comm *c, int rounds)
{
    test_case("several in flight, finished in other orders than started");
    float *x = xmalloc(VALUES * sizeof *x);
    double *y = xmalloc(VALUES * sizeof *y);
    void *work_x = xmalloc(comm_all_reduce_work(VALUES * sizeof *x, c->ranks));
    void *work_y = xmalloc(comm_all_reduce_work(VALUES * sizeof *y, c->ranks));
    for (int round = 0; round < rounds; round++) {
        enum { STARTED = 6 };
        uint64_t seed = 100 + 10 * (uint64_t)round;
        Case k[4] = {reduce_case(c, seed, REDUCE_ORDERED, true, false), gather_case(c, seed, false),
                     reduce_case(c, seed + 3, REDUCE_FAST, false, false), gather_case(c, seed + 4, true)};
        size_t sends = (size_t)(c->ranks - 1) * VALUES * (sizeof *x + sizeof *y);
        for (int i = 0; i < 4; i++) sends += k[i].sends;
        fill_values(c, seed, x, y);
        if (round % 2 && c->rank == round % c->ranks) usleep(3000); /* one is late */
        Request request[STARTED] = {reduce_start(c, &k[0]),
                                    gather_start(c, &k[1]),
                                    c->all_reduce_max_start(c, x, VALUES, work_x),
                                    reduce_start(c, &k[2]),
                                    c->all_reduce_sum_start(c, y, VALUES, work_y),
                                    gather_start(c, &k[3])};
        for (int i = 0; i < STARTED; i++) {
            int turn = (int)((i * (round % 2 ? 5 : 1) + c->rank + round) % STARTED);
            c->finish(c, request[turn]);
        }
        check_sent(c, sends);
        check_values(c, seed, x, y);
        reduce_check(c, &k[0]);
        gather_check(c, &k[1]);
        reduce_check(c, &k[2]);
        gather_check(c, &k[3]);
    }
    free(x);
    free(y);
    free(work_x);
    free(work_y);

    test_case("as many in flight as there is room for, again and again");
    static double one[COMM_IN_FLIGHT], work[COMM_IN_FLIGHT][64];
    for (int round = 0; round < 5; round++) {
        Request request[COMM_IN_FLIGHT];
        for (int i = 0; i < COMM_IN_FLIGHT; i++)
            one[i] = i, request[i] = c->all_reduce_sum_start(c, &one[i], 1, work[i]);
        for (int i = COMM_IN_FLIGHT - 1; i >= 0; i--) c->finish(c, request[i]);
        for (int i = 0; i < COMM_IN_FLIGHT; i++) CHECK(one[i] == (double)i * c->ranks, "sum %d is %g", i, one[i]);
    }
}

static void test_large(Comm *c)
{
    test_case("a share of several messages: gathered and added");
    size_t unit = comm_message_bytes(SIZE_MAX) / 4 * 5 + 4096, n = unit / sizeof(float);
    Piece piece = {0, 0, unit, (size_t)c->ranks * unit};
    float *x = xmalloc(piece.bytes), *sum = xmalloc(unit);
    void *work = xmalloc((size_t)(c->ranks - 1) * unit);
    Bucket whole = {(char *)x, false, 1, &piece}, own = {(char *)sum, true, 1, &piece};
    for (size_t i = 0; i < n; i++) sum[i] = (float)((i + 7 * (size_t)c->rank) % 65521);
    c->finish(c, c->all_gather_start(c, whole, own));
    size_t wrong = 0;
    for (int r = 0; r < c->ranks; r++)
        for (size_t i = 0; i < n; i++) wrong += x[(size_t)r * n + i] != (float)((i + 7 * (size_t)r) % 65521);
    CHECK(wrong == 0, "rank %d: %zu values gathered wrong", c->rank, wrong);
    for (size_t i = 0; i < n; i++) sum[i] = 0;
    c->finish(c, c->reduce_scatter_start(c, own, whole, REDUCE_ORDERED, work));
    for (size_t i = 0; i < n; i++) wrong += sum[i] != (float)c->ranks * (float)((i + 7 * (size_t)c->rank) % 65521);
    CHECK(wrong == 0, "rank %d: %zu values added wrong", c->rank, wrong);
    CHECK(c->bytes_sent == 2 * (size_t)(c->ranks - 1) * unit, "sent %zu bytes", c->bytes_sent);
    free(x);
    free(sum);
    free(work);
}

/* ---- faults ---- */

static volatile sig_atomic_t told;
static void on_term(int number) { told = number; }
static bool is_told(void) { return told != 0; }

static void *die_in_thread(void *unused)
{
    (void)unused;
    die("planted: disk full");
}

static void fault(Comm *c, const char *kind)
{
    uint32_t word[2] = {0};
    pthread_t thread;
    if (strcmp(kind, "exit") == 0) _exit(0);
    if (strcmp(kind, "kill") == 0) raise(SIGKILL);
    if (strcmp(kind, "stop") == 0) raise(SIGSTOP);
    if (strcmp(kind, "die") == 0) die("planted: disk full");
    if (strcmp(kind, "differ") == 0) comm_check_equal(c, "config", 2);
    if (strcmp(kind, "order") == 0) c->broadcast(c, word, 4, 0); /* the others send and want 8 */
    if (strcmp(kind, "many") == 0)
        for (int i = 0; i <= COMM_IN_FLIGHT; i++) c->all_reduce_max_start(c, NULL, 0, NULL);
    if (strcmp(kind, "thread") == 0 && !pthread_create(&thread, NULL, die_in_thread, NULL)) pthread_join(thread, NULL);
}

static void loop(Comm *c, const char *kind, int64_t steps)
{
    bool equal = strcmp(kind, "differ") == 0 || strcmp(kind, "order") == 0;
    signal(SIGTERM, on_term);
    c->hang_timeout_s = 1.5;
    c->stopping = is_told;
    for (c->step = 0; c->step < steps; c->step++) {
        Case k = reduce_case(c, (uint64_t)c->step, REDUCE_ORDERED, false, false);
        if (c->step == 3 && c->rank == max_i64(c->ranks - 2, 0)) fault(c, kind);
        if (c->step == 3 && equal) comm_check_equal(c, "config", 1);
        c->finish(c, reduce_start(c, &k));
        case_free(&k);
    }
}

static void test_pause(Comm *c)
{
    test_case("a job that is stopped as a whole and goes on has not hung");
    if (fork() == 0) {
        usleep(300000);
        kill(getppid(), SIGSTOP);
        usleep(2000000);
        kill(getppid(), SIGCONT);
        _exit(0);
    }
    double start = now_seconds();
    loop(c, "pause", 60);
    CHECK(now_seconds() - start > 2, "was not stopped");
}

#ifdef COMM_STAGED
void staged_open(Comm *c); /* staged_comm.cu */
#endif

int main(int argc, char **argv)
{
    Comm c;
    const char *kind = argc > 1 ? argv[1] : "check";
    if (comm_launched_ranks() > 1)
        comm_open(&c);
    else
        comm_mpi_open(&c);
    if (c.ranks != comm_launched_ranks()) die("%d ranks of %d", c.ranks, comm_launched_ranks());
#ifdef COMM_STAGED
    staged_open(&c);
#endif
    if (strcmp(kind, "check") == 0) {
        test_reductions(&c);
        test_gathers(&c);
        test_values(&c);
        test_host(&c);
        test_in_flight(&c, test_long() ? 40 : 6);
    } else if (strcmp(kind, "large") == 0) {
        test_large(&c);
    } else if (strcmp(kind, "pause") == 0) {
        test_pause(&c);
    } else {
        loop(&c, kind, 100000);
    }
    test_close();
    int failures = test_state.failures;
    if (c.rank == 0) test_done();
    comm_close(&c);
    return failures ? 1 : 0;
}
