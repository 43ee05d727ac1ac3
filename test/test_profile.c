/* profile.h: every entry of the table of operations that does work is timed, and those alone are other functions; a
 * call reaches the backend with its arguments. What is printed of whole runs is in test_profile.sh. */
#include "profile.h"

#include "cpu/backend.h"
#include "test.h"
#include "test_capture.h"

static int unpacked;
static void weight_unpack(Linear *w) { unpacked += w->weight.rows == 7; }

/* The entries of ops.h that are not timed: they run at the start or do no work. Empty ones stay empty. */
static bool untimed(size_t offset)
{
    static const size_t OFFSETS[] = {
        offsetof(Ops, alloc),           offsetof(Ops, free),       offsetof(Ops, tune),
        offsetof(Ops, workspace_bytes), offsetof(Ops, choices),    offsetof(Ops, measure),
        offsetof(Ops, workspace_set),   offsetof(Ops, view_bytes), offsetof(Ops, peak_flops),
        offsetof(Ops, choices_set),     offsetof(Ops, view_place), offsetof(Ops, product_counts),
        offsetof(Ops, weight_pieces)};
    for (size_t i = 0; i < sizeof OFFSETS / sizeof *OFFSETS; i++)
        if (OFFSETS[i] == offset) return true;
    return false;
}

int main(void)
{
    typedef void (*Entry)(void);
    const Ops *cpu;
    Error error;
    if (cpu_open(&cpu, "auto", 1, &error)) die("%s", error.text);
    Ops ops = *cpu;
    ops.weight_unpack = weight_unpack;
    ops.weight_amax = NULL;
    const Ops *timed = profile_open(&ops);

    test_case("every operation that works is timed");
    CHECK(timed->name == ops.name && timed->result_lag == ops.result_lag, "other data");
    for (size_t at = offsetof(Ops, alloc); at < sizeof(Ops); at += sizeof(Entry)) {
        Entry before, after;
        memcpy(&before, (const char *)&ops + at, sizeof before);
        memcpy(&after, (const char *)timed + at, sizeof after);
        bool same = before == after;
        CHECK(same == (untimed(at) || !before), "entry %zu is %s", (at - offsetof(Ops, alloc)) / sizeof(Entry),
              same ? "not timed" : "timed");
    }

    test_case("a call is passed on; before a step it is not counted, then it is");
    Linear w = {.weight = {.rows = 7}};
    float x[2] = {1, 2}, y[2] = {0};
    timed->weight_unpack(&w);
    timed->begin_step(&(Step){.seed = 1});
    timed->weight_unpack(&w);
    timed->copy_in(y, x, sizeof x);
    StepResult result = {.loss = 3}, back;
    timed->result_post(&result);
    timed->result_collect(&back);
    CHECK(unpacked == 2 && y[1] == 2 && back.loss == 3, "%d %g %g", unpacked, (double)y[1], back.loss);
    Capture capture = capture_start();
    profile_print();
    char *text = capture_end(&capture), *row = strstr(text, "\nweight_unpack");
    int calls = 0;
    CHECK(row && sscanf(row, " weight_unpack %d", &calls) == 1 && calls == 1, "%s", text);
    CHECK(!strstr(text, "\nadamw"), "an operation that was not called: %s", text);
    free(text);
    return test_done();
}
