/* schedule.c: every value against its formula in libm, exact ends and plateaus, no step upwards after the warm-up. */
#include "schedule.h"
#include "philox.h"
#include "test.h"

#include <math.h>

static const LrSchedule KINDS[] = {SCHEDULE_COSINE, SCHEDULE_LINEAR, SCHEDULE_CONSTANT, SCHEDULE_WSD};

/* The formulas of schedule.h as they stand there. */
static double reference(const Schedule *s, int64_t t)
{
    double f = s->final_lr_fraction, x = (double)(t + 1 - s->warmup_steps) / (double)(s->steps - s->warmup_steps);
    if (t < s->warmup_steps) return s->lr * (double)(t + 1) / (double)s->warmup_steps;
    if (s->kind == SCHEDULE_COSINE) return s->lr * (f + (1 - f) * (1 + cos(acos(-1) * x)) / 2);
    if (s->kind == SCHEDULE_LINEAR) return s->lr * (1 - (1 - f) * x);
    if (s->kind == SCHEDULE_CONSTANT) return s->lr;
    double decay = round(s->wsd_decay_fraction * (double)s->steps);
    double y = ((double)t + 1 - ((double)s->steps - decay)) / decay;
    return y <= 0 ? s->lr : s->lr * (1 - (1 - f) * sqrt(y));
}

static void test_formulas(void)
{
    for (int k = 0; k < 4; k++) {
        Schedule s = {KINDS[k], 3e-3, 0.1, 0.2, 1000, 100};
        test_case("every step against the formula");
        for (int64_t t = 0; t < s.steps; t++) {
            double expected = reference(&s, t), got = schedule_lr(&s, t);
            CHECK(fabs(got - expected) <= 1.2e-7 * s.lr, "schedule %d, step %ld: %.9g, not %.9g", k, (long)t, got,
                  expected);
        }
    }
}

/* Random schedules: warm-up rises to exactly lr, then nothing rises, then exactly lr * f. */
static void check_shape(const Schedule *s)
{
    float peak = (float)s->lr, last = schedule_lr(s, s->steps - 1), before = peak;
    float end = s->kind == SCHEDULE_CONSTANT ? peak : (float)(s->lr * s->final_lr_fraction);
    CHECK(last == end, "kind %d, lr %.17g, f %.17g, steps %ld: ends at %.9g, not %.9g", s->kind, s->lr,
          s->final_lr_fraction, (long)s->steps, (double)last, (double)end);
    CHECK(schedule_lr(s, s->steps) == last && schedule_lr(s, INT64_MAX) == last, "beyond the end");
    for (int64_t t = 0; t < s->warmup_steps; t++)
        CHECK(schedule_lr(s, t) > (t ? schedule_lr(s, t - 1) : 0), "warm-up step %ld does not rise", (long)t);
    if (s->warmup_steps) CHECK(schedule_lr(s, s->warmup_steps - 1) == peak, "warm-up ends below lr");
    for (int64_t t = s->warmup_steps; t < s->steps; t++) {
        float lr = schedule_lr(s, t);
        CHECK(lr <= before && lr >= end, "kind %d: step %ld of %ld rises or falls too low", s->kind, (long)t,
              (long)s->steps);
        before = lr;
    }
}

static void test_shapes(void)
{
    test_case("random schedules: exact peak, no rise, exact end");
    for (uint32_t i = 0; i < 400; i++) {
        Philox r = philox4x32(10, i, 0, 0, 0, 0, 0), q = philox4x32(10, i, 1, 0, 0, 0, 0);
        int64_t steps = 1 + r.word[0] % 300;
        Schedule s = {
            KINDS[i % 4],     1e-2 * (q.word[0] + 1.0) / 0x1p32, q.word[1] / 0x1p32, q.word[2] / 0x1p32, steps,
            r.word[1] % steps};
        check_shape(&s);
    }
}

static void test_edges(void)
{
    test_case("one step");
    for (int k = 0; k < 4; k++) {
        Schedule s = {KINDS[k], 0.1, 0.3, 0.2, 1, 0};
        check_shape(&s);
    }
    test_case("warm-up to the end: the last step has lr");
    Schedule s = {SCHEDULE_COSINE, 0.1, 0.3, 0.2, 10, 10};
    CHECK(schedule_lr(&s, 9) == 0.1f && schedule_lr(&s, 0) == (float)(0.1 * 0.1), "%.9g", (double)schedule_lr(&s, 9));

    test_case("wsd: plateau of exactly lr, decay over the asked part only");
    s = (Schedule){SCHEDULE_WSD, 0.7, 0.1, 0.25, 100, 10};
    for (int64_t t = 9; t < 75; t++) CHECK(schedule_lr(&s, t) == 0.7f, "step %ld", (long)t);
    CHECK(schedule_lr(&s, 75) < 0.7f, "step 75 does not decay");

    test_case("wsd: a decay of nothing is one step, of everything begins after the warm-up");
    s.wsd_decay_fraction = 0;
    CHECK(schedule_lr(&s, 98) == 0.7f && schedule_lr(&s, 99) == (float)(0.7 * 0.1), "decay of nothing");
    s.wsd_decay_fraction = 1;
    CHECK(schedule_lr(&s, 9) == 0.7f && schedule_lr(&s, 10) < 0.7f, "decay of everything");
    CHECK(fabs((double)schedule_lr(&s, 10) - 0.7 * (1 - 0.9 * sqrt(1 / 90.0))) < 1e-7,
          "decay of everything: first step");

    test_case("final fraction 0 and 1");
    for (int k = 0; k < 4; k++) {
        s = (Schedule){KINDS[k], 0.7, 0, 0.25, 100, 10};
        CHECK(k == 2 || schedule_lr(&s, 99) == 0, "does not end at 0");
        s.final_lr_fraction = 1e-20; /* 1 - (1 - f) would be 0 */
        CHECK(k == 2 || schedule_lr(&s, 99) == (float)(0.7 * 1e-20), "does not end at 0.7e-20");
        s.final_lr_fraction = 1;
        for (int64_t t = 10; t < 100; t++)
            CHECK(schedule_lr(&s, t) == 0.7f, "kind %d leaves lr at step %ld", k, (long)t);
    }
}

int main(void)
{
    test_formulas();
    test_shapes();
    test_edges();
    return test_done();
}
