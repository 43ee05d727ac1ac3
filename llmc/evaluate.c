/* See evaluate.h. */
#include "evaluate.h"

#include "tokenizer.h"

#include <math.h>
#include <stdlib.h>

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
