/* The learning rate of a step: see schedule.h. Every decay is written as z + f * (1 - z) with z going from 1 to 0,
 * which is exactly 1 on a plateau and exactly f at the end; lr * (1 - (1 - f)) would not be. */
#include "schedule.h"

#include "mathfn.h"

/* What is left of the decay at step t of the decaying part, 1 .. 0. */
static double remaining(const Schedule *s, int64_t t)
{
    const double pi = 3.14159265358979323846;
    int64_t decay_steps = s->steps - s->warmup_steps;
    if (s->kind == SCHEDULE_CONSTANT) return 1;
    if (s->kind == SCHEDULE_WSD) {
        int64_t asked = (int64_t)floor(s->wsd_decay_fraction * (double)s->steps + 0.5);
        decay_steps = min_i64(decay_steps, max_i64(asked, 1));
    }
    double x = (double)(t + 1 - (s->steps - decay_steps)) / (double)decay_steps;
    if (x <= 0) return 1; /* the plateau of wsd */
    if (s->kind == SCHEDULE_WSD) return 1 - sqrt(x);
    if (s->kind == SCHEDULE_LINEAR) return 1 - x;

    double sine, cosine;
    f64_sin_cos(pi * x, &sine, &cosine);
    return (1 + cosine) / 2;
}

float schedule_lr(const Schedule *s, int64_t step)
{
    int64_t t = min_i64(step, s->steps - 1);
    if (t < s->warmup_steps) return (float)(s->lr * ((double)(t + 1) / (double)s->warmup_steps));
    double z = remaining(s, t);
    return (float)(s->lr * (z + s->final_lr_fraction * (1 - z)));
}
