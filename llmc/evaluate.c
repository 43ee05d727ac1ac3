/* See evaluate.h. */
#include "evaluate.h"

#include "tokenizer.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int32_t *window, *tokens, *targets; /* [T + 1], [B][T], [B][T] */
    float *losses;                      /* [B][T] */
} Buffers;

static Buffers buffers_new(int64_t B, int64_t T)
{
    size_t N = (size_t)(B * T);
    return (Buffers){xmalloc((size_t)(T + 1) * sizeof(int32_t)), xmalloc(N * sizeof(int32_t)),
                     xmalloc(N * sizeof(int32_t)), xmalloc(N * sizeof(float))};
}

static void buffers_free(Buffers *b)
{
    free(b->window);
    free(b->tokens);
    free(b->targets);
    free(b->losses);
}

static int read_batch(const Buffers *b, const DataLoader *data, int64_t first, int64_t B, int64_t T, Error *error)
{
    int64_t windows = dataloader_windows(data);
    for (int64_t s = 0; s < B; s++) {
        if (dataloader_read_window(data, (first + s) % windows, b->window, error)) return -1;
        for (int64_t t = 0; t < T; t++) {
            b->tokens[s * T + t] = b->window[t];
            b->targets[s * T + t] = b->window[t + 1];
        }
    }
    return 0;
}

int evaluate(Model *model, const DataLoader *data, int64_t batches, Evaluation *result, Error *error)
{
    int64_t B = model->spec.B, T = model->spec.config.T, windows = dataloader_windows(data), bytes = 0;
    int64_t last = batches > 0 && batches * B < windows ? batches * B : windows;
    Buffers b = buffers_new(B, T);
    int status = 0;
    double sum = 0;

    for (int64_t first = 0; first < last && !status; first += B) {
        int64_t rows = min_i64(B, last - first) * T;
        if ((status = read_batch(&b, data, first, B, T, error))) break;
        Batch batch = model_upload(model, 0, b.tokens, b.targets);
        gpt_evaluate(&model->gpt, &batch);
        model->ops->copy_out(b.losses, model->gpt.acts.losses.data, (size_t)rows * sizeof *b.losses);
        for (int64_t i = 0; i < rows; i++) {
            sum += (double)b.losses[i];
            bytes += b.targets[i] < BYTE_TOKENIZER_EOT;
        }
    }
    buffers_free(&b);
    bool byte_tokens = model->spec.config.V == BYTE_TOKENIZER_VOCAB && bytes > 0;
    *result = (Evaluation){.loss = sum / (double)(last * T), .tokens = last * T};
    result->bits_per_byte = byte_tokens ? sum / (double)bytes / 0x1.62e42fefa39efp-1 : NAN;
    return status;
}

/* ---- multiple choice ---- */

/* What one sequence of a batch is: completion k of a question; its losses are [first, first + count) of the T. */
typedef struct {
    int label, completions, k;
    int64_t first, count;
} Row;

/* The walk over all completions of all questions. */
typedef struct {
    const HellaSwag *file;
    int64_t next;             /* question */
    HellaSwagExample example; /* the one before it, */
    int k;                    /* and its next completion */
} Walk;

static int smallest(const double *values, int count)
{
    int best = 0;
    for (int k = 1; k < count; k++)
        if (values[k] < values[best]) best = k;
    return best;
}

/* Goes to a question with completions left, past those that T + 1 tokens do not hold; false at the end. */
static bool find_question(Walk *w, int64_t T, ChoiceEvaluation *result)
{
    if (w->k < w->example.completions) return true;
    for (; w->next < w->file->examples; result->skipped++) {
        hellaswag_example(w->file, w->next++, &w->example);
        w->k = 0;
        if (hellaswag_longest(&w->example) <= T + 1) return true;
    }
    return false;
}

/* Up to B sequences, padded with token 0; returns how many. */
static int64_t fill_batch(const Buffers *b, Row *rows, Walk *w, int64_t B, int64_t T, ChoiceEvaluation *result)
{
    int64_t used = 0;
    memset(b->tokens, 0, (size_t)(B * T) * sizeof *b->tokens);
    memset(b->targets, 0, (size_t)(B * T) * sizeof *b->targets);
    for (; used < B && find_question(w, T, result); used++, w->k++) {
        const HellaSwagExample *e = &w->example;
        size_t bytes = (size_t)(hellaswag_tokens(w->file, e, w->k, b->window) - 1) * sizeof *b->window;
        memcpy(b->tokens + used * T, b->window, bytes);
        memcpy(b->targets + used * T, b->window + 1, bytes);
        rows[used] = (Row){e->label, e->completions, w->k, e->context_tokens - 1, e->completion_tokens[w->k]};
    }
    return used;
}

/* Adds one completion's loss, and judges after the question's last. sum, mean: of this question. */
static void score(const Row *row, const float *losses, double *sum, double *mean, ChoiceEvaluation *result)
{
    sum[row->k] = 0;
    for (int64_t i = 0; i < row->count; i++) sum[row->k] += (double)losses[row->first + i];
    mean[row->k] = sum[row->k] / (double)row->count;
    if (row->k < row->completions - 1) return;
    result->examples++;
    result->by_mean += smallest(mean, row->completions) == row->label;
    result->by_sum += smallest(sum, row->completions) == row->label;
}

int evaluate_choices(Model *model, const HellaSwag *questions, ChoiceEvaluation *result, Error *error)
{
    int64_t B = model->spec.B, T = model->spec.config.T, used;
    double sum[HELLASWAG_COMPLETIONS], mean[HELLASWAG_COMPLETIONS];
    Walk walk = {.file = questions};
    *result = (ChoiceEvaluation){0};
    if (questions->largest_id >= model->spec.config.V)
        return error_set(error,
                         "%s: holds token %" PRId64 ", the model's vocabulary has %" PRId64 "; another tokenizer?",
                         questions->path, questions->largest_id, model->spec.config.V);

    Buffers b = buffers_new(B, T);
    Row *rows = xcalloc((size_t)B, sizeof *rows);
    while ((used = fill_batch(&b, rows, &walk, B, T, result)) > 0) {
        Batch batch = model_upload(model, 0, b.tokens, b.targets);
        gpt_evaluate(&model->gpt, &batch);
        model->ops->copy_out(b.losses, model->gpt.acts.losses.data, (size_t)(used * T) * sizeof *b.losses);
        for (int64_t r = 0; r < used; r++) score(&rows[r], b.losses + r * T, sum, mean, result);
    }
    free(rows);
    buffers_free(&b);
    if (result->examples) return 0;
    return error_set(error, "%s: none of %" PRId64 " questions fits into the model's context of %" PRId64 " tokens",
                     questions->path, questions->examples, T);
}
