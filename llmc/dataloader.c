/* The order of the data and the thread that reads ahead: see dataloader.h.
 *
 * The thread and its user share two slots, each with the data of one step. Step i (counted from the first) lives in
 * slot i % 2. Three counters, only ever growing, say who owns what:
 *
 *     released <= taken <= read <= released + 2
 *
 * The thread fills slot read % 2 while read < released + 2; dataloader_next gives the slot of the step before back
 * (released = taken), waits until taken < read, and hands slot taken % 2 out. No data is copied, and the step that the
 * user looks at is never overwritten.
 */
#include "dataloader.h"

#include "philox.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { FEISTEL_ROUNDS = 8 }; /* many for Philox, but half blocks may have a single bit here */

typedef struct {
    int32_t *tokens, *targets; /* [micro_steps][B][T] */
    uint64_t hash;
    bool failed;
    Error error;
} Slot;

struct DataLoader {
    DataLoaderConfig config; /* its pattern is not kept */
    int64_t micro_steps;     /* of this rank per step */
    TokenFile *files;        /* [file_count] */
    int64_t file_count;
    int64_t *first_window; /* [file_count + 1]; file f has windows first_window[f] to first_window[f + 1] - 1 */
    bool wrap;             /* every file is shorter than T + 1: one window per file, wrapped around */
    int half_bits;         /* the permutation works on numbers of 2 x half_bits bits */

    Slot slot[2];
    int32_t *window; /* [T + 1], the thread's */
    int64_t first_step;
    pthread_t thread;
    bool started;
    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    int64_t read, taken, released;
    bool stop;
};

/* ---- windows and their order ---- */

static void lay_out_windows(DataLoader *d)
{
    const int64_t T = d->config.T;
    d->first_window = xcalloc((size_t)d->file_count + 1, sizeof *d->first_window);
    for (int64_t f = 0; f < d->file_count; f++)
        d->first_window[f + 1] = d->first_window[f] + (d->files[f].tokens - 1) / T;
    d->wrap = dataloader_windows(d) == 0;
    for (int64_t f = 0; d->wrap && f < d->file_count; f++) d->first_window[f + 1] = f + 1;

    d->half_bits = 1;
    while (d->half_bits < 32 && dataloader_windows(d) > INT64_C(1) << 2 * d->half_bits) d->half_bits++;
}

/* A bijection of the numbers of 2 x half_bits bits, another one for every seed and epoch. */
static uint64_t feistel(const DataLoader *d, uint64_t x, uint64_t epoch)
{
    const uint32_t mask = (uint32_t)((UINT64_C(1) << d->half_bits) - 1);
    uint32_t left = (uint32_t)(x >> d->half_bits), right = (uint32_t)x & mask;
    for (uint32_t round = 0; round < FEISTEL_ROUNDS; round++) {
        uint32_t drawn = philox_draw(d->config.seed, right, round, (uint32_t)epoch, (uint32_t)(epoch >> 32) & 0xffff,
                                     ROLE_DATA_ORDER, 0)
                             .word[0];
        uint32_t next = left ^ (drawn & mask);
        left = right;
        right = next;
    }
    return (uint64_t)left << d->half_bits | right;
}

int64_t dataloader_window(const DataLoader *d, int64_t n)
{
    const int64_t windows = dataloader_windows(d), epoch = n / windows, place = n % windows;
    if (!d->config.shuffle) return place;
    /* Cycle walking: from inside [0, windows) the bijection's cycle always comes back inside, and where it first does
     * is itself a bijection. The range is at most 4 x windows, so this takes a few turns. */
    uint64_t x = (uint64_t)place;
    do x = feistel(d, x, (uint64_t)epoch);
    while (x >= (uint64_t)windows);
    return (int64_t)x;
}

/* The file that holds a window: the last whose first window is not after it. */
static int64_t file_of_window(const DataLoader *d, int64_t window)
{
    int64_t low = 0, high = d->file_count;
    while (high - low > 1) {
        int64_t middle = low + (high - low) / 2;
        if (d->first_window[middle] <= window)
            low = middle;
        else
            high = middle;
    }
    return low;
}

int dataloader_read_window(const DataLoader *d, int64_t window, int32_t *out, Error *error)
{
    const int64_t length = d->config.T + 1;
    if (window < 0 || window >= dataloader_windows(d))
        return error_set(error, "window %" PRId64 " asked for, there are %" PRId64, window, dataloader_windows(d));
    const int64_t f = file_of_window(d, window);
    const TokenFile *file = &d->files[f];
    const int64_t first = d->wrap ? 0 : (window - d->first_window[f]) * d->config.T;
    for (int64_t done = 0; done < length;) { /* one turn, or several around a short file */
        int64_t count = min_i64(length - done, file->tokens - first);
        token_file_read(file, first, count, out + done);
        done += count;
    }
    for (int64_t i = 0; i < length; i++)
        if ((uint32_t)out[i] >= d->config.vocab)
            return error_set(error,
                             "%s: token %" PRIu32 " at position %" PRId64 ", the vocabulary is %" PRId64
                             "; was the file made with another tokenizer?",
                             file->path, (uint32_t)out[i], (first + i) % file->tokens, d->config.vocab);
    return 0;
}

int64_t dataloader_windows(const DataLoader *d) { return d->first_window[d->file_count]; }

int64_t dataloader_raw_files(const DataLoader *d)
{
    int64_t raw = 0;
    for (int64_t i = 0; i < d->file_count; i++) raw += d->files[i].raw;
    return raw;
}

int64_t dataloader_tokens(const DataLoader *d)
{
    int64_t tokens = 0;
    for (int64_t f = 0; f < d->file_count; f++) tokens += d->files[f].tokens;
    return tokens;
}

uint64_t dataloader_file_list_hash(const DataLoader *d)
{
    uint64_t hash = 0;
    for (int64_t f = 0; f < d->file_count; f++) {
        const TokenFile *file = &d->files[f];
        const char *slash = strrchr(file->path, '/'), *name = slash ? slash + 1 : file->path;
        int32_t ends[2];
        token_file_read(file, 0, 1, &ends[0]);
        token_file_read(file, file->tokens - 1, 1, &ends[1]);
        hash = hash64(name, strlen(name), hash);
        hash = hash64(&file->tokens, sizeof file->tokens, hash);
        hash = hash64(ends, sizeof ends, hash);
    }
    return hash;
}

/* ---- reading ahead ---- */

/* All sequences of this rank in one step. */
static void fill_slot(DataLoader *d, Slot *slot, int64_t step)
{
    const DataLoaderConfig *c = &d->config;
    slot->hash = 0;
    for (int64_t m = 0; m < d->micro_steps; m++) {
        int64_t micro_batch = m * c->ranks + c->rank;
        for (int64_t s = 0; s < c->B; s++) {
            int64_t n = (step * c->micro_batches + micro_batch) * c->B + s;
            size_t at = (size_t)((m * c->B + s) * c->T), bytes = (size_t)c->T * sizeof(int32_t);
            if (dataloader_read_window(d, dataloader_window(d, n), d->window, &slot->error)) {
                slot->failed = true;
                return;
            }
            memcpy(slot->tokens + at, d->window, bytes);
            memcpy(slot->targets + at, d->window + 1, bytes);
            slot->hash += hash64(d->window, bytes + sizeof(int32_t), (uint64_t)n);
        }
    }
}

static void *read_ahead(void *argument)
{
    DataLoader *d = argument;
    pthread_mutex_lock(&d->mutex);
    for (bool failed = false; !failed;) {
        while (!d->stop && d->read == d->released + 2) pthread_cond_wait(&d->changed, &d->mutex);
        if (d->stop) break;
        Slot *slot = &d->slot[d->read % 2];
        const int64_t step = d->first_step + d->read;
        pthread_mutex_unlock(&d->mutex);
        fill_slot(d, slot, step);
        failed = slot->failed;
        pthread_mutex_lock(&d->mutex);
        d->read++;
        pthread_cond_signal(&d->changed);
    }
    pthread_mutex_unlock(&d->mutex);
    return NULL;
}

static int start_thread(DataLoader *d, Error *error)
{
    const size_t step_tokens = (size_t)(d->micro_steps * d->config.B * d->config.T);
    for (int i = 0; i < 2; i++) {
        d->slot[i].tokens = xcalloc(step_tokens, sizeof(int32_t));
        d->slot[i].targets = xcalloc(step_tokens, sizeof(int32_t));
    }
    int code = pthread_create(&d->thread, NULL, read_ahead, d);
    if (code) return error_set(error, "cannot start the data thread: %s", strerror(code));
    d->started = true;
    return 0;
}

int dataloader_next(DataLoader *d, StepData *data, Error *error)
{
    const double start = now_seconds();
    if (!d->started && start_thread(d, error)) return -1;
    pthread_mutex_lock(&d->mutex);
    d->released = d->taken;
    pthread_cond_signal(&d->changed);
    while (d->read == d->taken) pthread_cond_wait(&d->changed, &d->mutex);
    pthread_mutex_unlock(&d->mutex);

    const Slot *slot = &d->slot[d->taken % 2];
    if (slot->failed) return error_set(error, "%s", slot->error.text);
    *data = (StepData){.step = d->first_step + d->taken,
                       .micro_steps = d->micro_steps,
                       .tokens = slot->tokens,
                       .targets = slot->targets,
                       .hash = slot->hash,
                       .wait_ms = 1e3 * (now_seconds() - start)};
    d->taken++;
    return 0;
}

/* ---- opening and closing ---- */

static int check_config(const DataLoaderConfig *c, int64_t first_step, Error *error)
{
    int64_t step_tokens, sequences;
    if (c->B < 1 || c->T < 1 || c->micro_batches < 1 || c->vocab < 1 || first_step < 0)
        return error_set(error,
                         "data: batch size %" PRId64 ", sequence length %" PRId64 ", micro-batches %" PRId64
                         ", vocabulary %" PRId64 " must be at least 1 and the first step %" PRId64 " at least 0",
                         c->B, c->T, c->micro_batches, c->vocab, first_step);
    if (c->ranks < 1 || c->rank < 0 || c->rank >= c->ranks || c->micro_batches % c->ranks != 0)
        return error_set(error,
                         "data: rank %d of %d; the %" PRId64
                         " micro-batches of a step must be a multiple of the number of ranks",
                         c->rank, c->ranks, c->micro_batches);
    if (__builtin_mul_overflow(c->micro_batches, c->B, &sequences) ||
        __builtin_mul_overflow(sequences, c->T, &step_tokens) || step_tokens > INT64_MAX / 16 ||
        first_step > INT64_MAX / 2 / sequences)
        return error_set(error,
                         "data: %" PRId64 " micro-batches x %" PRId64 " sequences x %" PRId64
                         " tokens from step %" PRId64 " are too many to count",
                         c->micro_batches, c->B, c->T, first_step);
    return 0;
}

DataLoader *dataloader_open(const DataLoaderConfig *config, int64_t first_step, Error *error)
{
    if (check_config(config, first_step, error)) return NULL;
    DataLoader *d = xcalloc(1, sizeof *d);
    d->config = *config;
    d->config.pattern = NULL;
    d->first_step = first_step;
    d->micro_steps = config->micro_batches / config->ranks;
    pthread_mutex_init(&d->mutex, NULL);
    pthread_cond_init(&d->changed, NULL);

    int result = token_files_open(&d->files, &d->file_count, config->pattern, error);
    if (result == 0) {
        lay_out_windows(d);
        d->window = xcalloc((size_t)config->T + 1, sizeof *d->window);
    }
    if (result == 0) return d;
    dataloader_close(d);
    return NULL;
}

void dataloader_close(DataLoader *d)
{
    if (!d) return;
    if (d->started) {
        pthread_mutex_lock(&d->mutex);
        d->stop = true;
        pthread_cond_signal(&d->changed);
        pthread_mutex_unlock(&d->mutex);
        pthread_join(d->thread, NULL);
    }
    for (int i = 0; i < 2; i++) {
        free(d->slot[i].tokens);
        free(d->slot[i].targets);
    }
    free(d->window);
    free(d->first_window);
    token_files_close(d->files, d->file_count);
    pthread_cond_destroy(&d->changed);
    pthread_mutex_destroy(&d->mutex);
    free(d);
}
