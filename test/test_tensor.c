/* tensor.h: slices point where they say, the arena is aligned, remembers its peak, books every byte of it, gives the
 * same places counting and for real, and refuses what does not fit.
 */
#include "tensor.h"
#include "test.h"

#include <sys/wait.h>
#include <unistd.h>

static void test_tensors(void)
{
    test_case("bytes, rows and columns of tensors");
    char memory[1000];
    CHECK(dtype_bytes(DTYPE_FP32) == 4 && dtype_bytes(DTYPE_BF16) == 2 && dtype_bytes(DTYPE_INT32) == 4, "dtypes");
    Tensor t = {memory, DTYPE_BF16, 10, 20, 20};
    CHECK(tensor_bytes(t) == 400, "bytes %zu", tensor_bytes(t));
    Tensor slice = tensor_cols(tensor_rows(t, 3, 4), 5, 6);
    CHECK((char *)slice.data == memory + 2 * (3 * 20 + 5), "offset %d", (int)((char *)slice.data - memory));
    CHECK(slice.rows == 4 && slice.cols == 6 && slice.ld == 20 && slice.dtype == DTYPE_BF16, "shape");
    slice = tensor_rows(tensor_cols(t, 5, 6), 3, 4);
    CHECK((char *)slice.data == memory + 2 * (3 * 20 + 5), "columns first: %d", (int)((char *)slice.data - memory));
    Tensor big = {NULL, DTYPE_FP32, (int64_t)1 << 20, (int64_t)1 << 17, (int64_t)1 << 17};
    CHECK(tensor_bytes(big) == (size_t)1 << 39, "more than 32 bits");
    CHECK(!tensor_rows(big, 5, 1).data && !tensor_cols(big, 5, 1).data, "a slice of what is absent is absent");
}

static size_t booked(const Arena *a)
{
    size_t sum = 0;
    for (int p = 0; p < PURPOSE_COUNT; p++) sum += a->bytes[p];
    return sum;
}

static void test_bookings(void)
{
    test_case("the arena books every rise of its peak to the purpose of the moment");
    Arena a = {.purpose = PURPOSE_MASTER};
    CHECK(!arena_take(&a, 1000) && a.used == 1024 && a.peak == 1024, "used %zu", a.used);
    a.purpose = PURPOSE_SAVED;
    arena_take(&a, 1);
    size_t start = a.used;
    CHECK(start == 1280 && a.bytes[PURPOSE_MASTER] == 1024 && a.bytes[PURPOSE_SAVED] == 256, "after two");
    a.purpose = PURPOSE_SCRATCH;
    arena_take(&a, 600); /* 768 */
    a.used = start;
    arena_take(&a, 300); /* lies over it */
    CHECK(a.peak == start + 768 && a.bytes[PURPOSE_SCRATCH] == 768, "scratch %zu", a.bytes[PURPOSE_SCRATCH]);
    a.purpose = PURPOSE_WORKSPACE;
    arena_take(&a, 500); /* from 512 to 1024 behind start: 256 of it beyond the peak */
    CHECK(a.bytes[PURPOSE_WORKSPACE] == 256 && a.peak == start + 1024, "workspace %zu", a.bytes[PURPOSE_WORKSPACE]);
    arena_take(&a, 0);
    CHECK(a.peak == start + 1024, "nothing takes nothing");
    CHECK(booked(&a) == a.peak, "booked %zu of %zu", booked(&a), a.peak);
    for (int p = 0; p < PURPOSE_COUNT; p++)
        for (int q = 0; q < p; q++)
            CHECK(strcmp(purpose_name((Purpose)p), purpose_name((Purpose)q)), "purposes %d and %d share a name", p, q);
}

/* One layout with steps back, the same for every arena. */
static void lay_out(Arena *a, void **place, int count)
{
    size_t mark = 0;
    for (int i = 0; i < count; i++) {
        a->purpose = (Purpose)(i * 5 % PURPOSE_COUNT);
        if (i % 7 == 3) mark = a->used;
        if (i % 7 == 6) a->used = mark;
        place[i] = i % 2 ? arena_take(a, (size_t)i * 37 % 1500)
                         : arena_tensor(a, i % 3 ? DTYPE_BF16 : DTYPE_FP32, i % 11 + 1, i % 17 + 1).data;
    }
}

static void test_counting(void)
{
    enum { COUNT = 300 };
    void *place[COUNT];
    test_case("counting and placing agree; places are aligned, within, and fit exactly");
    Arena counted = {0};
    lay_out(&counted, place, COUNT);
    for (int i = 0; i < COUNT; i++) CHECK(!place[i], "counting gave memory");
    char *memory = aligned_alloc(256, counted.peak);
    if (!memory) die("out of memory");
    Arena real = {.base = memory, .capacity = counted.peak};
    lay_out(&real, place, COUNT);
    CHECK(real.peak == counted.peak && real.used == counted.used, "peak %zu, counted %zu", real.peak, counted.peak);
    CHECK(!memcmp(real.bytes, counted.bytes, sizeof real.bytes) && booked(&real) == real.peak, "bookings");
    for (int i = 0; i < COUNT; i++) {
        CHECK((uintptr_t)place[i] % 256 == 0, "piece %d is not aligned", i);
        CHECK((char *)place[i] >= memory && (char *)place[i] <= memory + counted.peak, "piece %d is outside", i);
    }
    Tensor t = arena_tensor(&(Arena){.base = memory, .capacity = counted.peak}, DTYPE_FP32, 3, 5);
    CHECK(t.rows == 3 && t.cols == 5 && t.ld == 5 && t.dtype == DTYPE_FP32 && t.data == memory, "a tensor's fields");
    free(memory);
}

static void test_over_capacity(void)
{
    test_case("over capacity: one message, exit code 1");
    int out[2], status;
    char text[512] = "";
    fflush(stdout);
    if (pipe(out)) die("pipe");
    pid_t child = fork();
    if (child == 0) {
        static char memory[1024];
        Arena a = {.base = memory, .capacity = sizeof memory, .purpose = PURPOSE_SAVED};
        dup2(out[1], STDERR_FILENO);
        arena_take(&a, 1024); /* fits */
        arena_take(&a, 1);
        _exit(0);
    }
    close(out[1]);
    ssize_t got = read(out[0], text, sizeof text - 1);
    close(out[0]);
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_RUNTIME, "status %x", (unsigned)status);
    CHECK(got > 0 && strstr(text, "1280 of 1024") && strstr(text, purpose_name(PURPOSE_SAVED)), "message: %s", text);
}

int main(void)
{
    test_tensors();
    test_bookings();
    test_counting();
    test_over_capacity();
    return test_done();
}
