/* Two runs, or two groups of runs, side by side: see compare.h. */
#include "compare.h"

#include "json.h"
#include "logger.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS_MAX = 20 }; /* of a printed table */

typedef struct { /* one number of a log by step, steps ascending and distinct */
    int64_t n;
    int64_t *step; /* [n] owned */
    double *value; /* [n] owned */
} Series;

static void series_free(Series *s)
{
    free(s->step);
    free(s->value);
    *s = (Series){0};
}

typedef struct {
    int64_t step, place;
    double value;
} Entry;

static int compare_entries(const void *a, const void *b)
{
    const Entry *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->place < y->place ? -1 : x->place > y->place;
}

/* One run's numbers; of a step that the log has twice the later line counts. */
static int series_read(Series *s, const char *run, const char *key, Error *error)
{
    s->n = log_read(run, key, &s->step, &s->value, error);
    if (s->n < 0) return -1;

    Entry *entry = xcalloc((size_t)s->n, sizeof *entry);
    for (int64_t i = 0; i < s->n; i++) entry[i] = (Entry){s->step[i], i, s->value[i]};
    qsort(entry, (size_t)s->n, sizeof *entry, compare_entries);
    int64_t kept = 0;
    for (int64_t i = 0; i < s->n; i++) {
        if (i + 1 < s->n && entry[i + 1].step == entry[i].step) continue;
        s->step[kept] = entry[i].step;
        s->value[kept++] = entry[i].value;
    }
    s->n = kept;
    free(entry);
    return 0;
}

/* Both keep only the steps that both have. */
static void series_intersect(Series *x, Series *y)
{
    int64_t n = 0;
    for (int64_t i = 0, j = 0; i < x->n && j < y->n;) {
        if (x->step[i] != y->step[j]) {
            if (x->step[i] < y->step[j])
                i++;
            else
                j++;
            continue;
        }
        x->step[n] = y->step[n] = x->step[i];
        x->value[n] = x->value[i++];
        y->value[n++] = y->value[j++];
    }
    x->n = y->n = n;
}

/* The n-th name of a comma-separated list, or NULL beyond its end. Owned by the caller. */
static char *list_name(const char *list, int64_t n)
{
    for (; n > 0 && list; n--) {
        list = strchr(list, ',');
        if (list) list++;
    }
    return list ? xformat("%.*s", (int)strcspn(list, ","), list) : NULL;
}

/* The mean of `key` over the runs of a list, at the steps that all of them have. */
static int side_read(Series *side, const char *runs, const char *key, Error *error)
{
    int64_t count = 0;
    *side = (Series){0};
    for (char *run; (run = list_name(runs, count)); free(run), count++) {
        Series one = {0};
        if (series_read(count ? &one : side, run, key, error)) {
            free(run);
            series_free(side);
            return -1;
        }
        if (count) {
            series_intersect(side, &one);
            for (int64_t i = 0; i < side->n; i++) side->value[i] += one.value[i];
        }
        series_free(&one);
    }
    for (int64_t i = 0; i < side->n; i++) side->value[i] /= (double)count;
    return 0;
}

/* Both sides at their common steps; checks that every value is finite. */
static int sides_read(Series *x, Series *y, const char *a, const char *b, const char *key, Error *error)
{
    *y = (Series){0};
    if (side_read(x, a, key, error)) return -1;
    int result = side_read(y, b, key, error);
    if (result == 0) series_intersect(x, y);
    for (int64_t i = 0; i < x->n && result == 0; i++) {
        if (isfinite(x->value[i]) && isfinite(y->value[i])) continue;
        result = error_set(error, "%s is not finite at step %" PRId64 " of %s: nothing to compare", key, x->step[i],
                           isfinite(x->value[i]) ? b : a);
    }
    if (result) {
        series_free(x);
        series_free(y);
    }
    return result;
}

/* Bytes per token that every run of the list has in its config.json, or 0: unknown, or not the same. */
static double side_bytes_per_token(const char *runs)
{
    double known = 0;
    char *run;
    for (int64_t i = 0; (run = list_name(runs, i)); i++) {
        double value = 0;
        char *path = xformat("%s/config.json", run);
        Json *json = json_read_file(path, NULL);
        bool found = json_number(json_get(json, "bytes_per_token"), &value) && value > 0;
        json_free(json);
        free(path);
        free(run);
        if (!found || (i > 0 && value != known)) return 0;
        known = value;
    }
    return known;
}

static double mean_of(const double *value, int64_t n)
{
    double sum = 0;
    for (int64_t i = 0; i < n; i++) sum += value[i];
    return sum / (double)n;
}

Gap gap_of_blocks(const double *gap, int64_t n, int64_t block_steps)
{
    int64_t size = min_i64(block_steps, n), blocks = n / size, first = n - blocks * size;
    Gap result = {.blocks = blocks, .first = first, .mean = mean_of(gap + first, blocks * size), .error = NAN};
    double squares = 0;
    for (int64_t k = 0; k < blocks; k++) {
        double deviation = mean_of(gap + first + k * size, size) - result.mean;
        squares += deviation * deviation;
    }
    if (blocks > 1) result.error = sqrt(squares / (double)(blocks - 1) / (double)blocks);
    return result;
}

/* ---- printing ---- */

/* Means over `per` entries a row, for entries first .. n-1. */
static void print_rows(const char *title, const Series *a, const Series *b, const double *gap, int64_t first,
                       int64_t per)
{
    printf("\n%22s  %10s %10s %11s\n", title, "loss A", "loss B", "gap");
    for (int64_t i = first; i < a->n; i += per) {
        int64_t n = min_i64(per, a->n - i);
        if (n > 1)
            printf("%9" PRId64 " .. %9" PRId64, a->step[i], a->step[i + n - 1]);
        else
            printf("%22" PRId64, a->step[i]);
        printf("  %10.5f %10.5f %+11.6f\n", mean_of(a->value + i, n), mean_of(b->value + i, n), mean_of(gap + i, n));
    }
}

static void print_gap(const char *what, double mean, double error, const char *unit)
{
    printf("%-12s %+.6f", what, mean);
    if (isfinite(error)) printf(" +- %.6f", error);
    printf(" %s\n", unit);
}

static double *gaps(const Series *a, const Series *b)
{
    double *gap = xcalloc((size_t)a->n, sizeof *gap);
    for (int64_t i = 0; i < a->n; i++) gap[i] = b->value[i] - a->value[i];
    return gap;
}

/* Training loss: the table, the mean gap and its error. */
static Gap print_training(const Series *a, const Series *b, int64_t block_steps, double bytes_per_token)
{
    double *gap = gaps(a, b);
    Gap result = gap_of_blocks(gap, a->n, block_steps);
    int64_t size = (a->n - result.first) / result.blocks, per = size * ceil_div(result.blocks, ROWS_MAX);
    printf("%" PRId64 " common steps; %" PRId64 " blocks of %" PRId64 "; gap = loss B - loss A, nats per token\n", a->n,
           result.blocks, size);
    print_rows("steps", a, b, gap, result.first, per);
    printf("\n");
    print_gap("mean gap", result.mean, result.error, "nats per token (+- standard error of the block means)");
    if (bytes_per_token > 0) {
        double bits = 1 / (log(2) * bytes_per_token);
        print_gap("", result.mean * bits, result.error * bits, "bits per byte");
    }
    free(gap);
    return result;
}

static void print_validation(const Series *a, const Series *b, double bytes_per_token)
{
    if (a->n == 0) return;
    double *gap = gaps(a, b);
    print_rows("validation at steps", a, b, gap, 0, ceil_div(a->n, ROWS_MAX));
    printf("\n");
    print_gap("last gap", gap[a->n - 1], NAN, "nats per token");
    if (bytes_per_token > 0) print_gap("", gap[a->n - 1] / (log(2) * bytes_per_token), NAN, "bits per byte");
    free(gap);
}

static int verdict(double mean, double max_gap)
{
    if (max_gap < 0) return 0;
    bool beyond = mean > max_gap;
    printf("\n%s max_gap %g\n", beyond ? "BEYOND" : "within", max_gap);
    return beyond ? EXIT_GAP : 0;
}

/* Leaves the last part of the steps. */
static void series_last(Series *s, double fraction)
{
    int64_t kept = max_i64(min_i64(s->n, 1), (int64_t)(fraction * (double)s->n + 0.5)), first = s->n - kept;
    for (int64_t i = 0; i < kept; i++) {
        s->step[i] = s->step[first + i];
        s->value[i] = s->value[first + i];
    }
    s->n = kept;
}

int compare_runs(const char *a, const char *b, int64_t block_steps, double last_fraction, double max_gap, Error *error)
{
    Series loss_a, loss_b, val_a, val_b;
    if (sides_read(&loss_a, &loss_b, a, b, "loss", error)) return -1;
    int result = sides_read(&val_a, &val_b, a, b, "val_loss", error);
    if (result == 0 && loss_a.n == 0)
        result = error_set(error, "%s and %s have no step with a \"loss\" in common", a, b);
    if (result == 0) {
        double bytes_a = side_bytes_per_token(a), bytes_b = side_bytes_per_token(b);
        double bytes_per_token = bytes_a == bytes_b ? bytes_a : 0;
        printf("A  %s\nB  %s\n", a, b);
        series_last(&loss_a, last_fraction);
        series_last(&loss_b, last_fraction);
        if (bytes_a > 0 && bytes_b > 0 && bytes_a != bytes_b)
            printf("note: %g and %g bytes per token: nats per token of the two do not compare\n", bytes_a, bytes_b);
        Gap gap = print_training(&loss_a, &loss_b, block_steps, bytes_per_token);
        print_validation(&val_a, &val_b, bytes_per_token);
        result = verdict(gap.mean, max_gap);
    }
    series_free(&loss_a);
    series_free(&loss_b);
    series_free(&val_a);
    series_free(&val_b);
    return result;
}
