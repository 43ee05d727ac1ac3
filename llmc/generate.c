/* See generate.h. */
#include "generate.h"

#include "numerics.h"
#include "sampler.h"

#include <stdlib.h>
#include <string.h>

/* Logits after `count` more tokens at position0, as FP32 on the host. */
static void next_logits(Model *model, const int32_t *tokens, int64_t count, int64_t position0, float *logits)
{
    int64_t V = model->spec.config.V;
    model_use(model, USE_GENERATE, count);
    Batch batch = model_upload_tokens(model, tokens, count);
    Tensor t = gpt_logits(&model->gpt, &batch, position0);
    model->ops->copy_out(logits, t.data, (size_t)V * dtype_bytes(t.dtype));
    if (t.dtype != DTYPE_BF16) return;
    for (int64_t v = V - 1; v >= 0; v--) { /* in place, from the end */
        uint16_t half;
        memcpy(&half, (const char *)logits + 2 * v, sizeof half);
        logits[v] = bf16_to_f32(half);
    }
}

int generate(Model *model, const int32_t *prompt, int64_t length, const Sampling *s,
             void (*emit)(void *context, int32_t token), void *context, Error *error)
{
    int64_t T = model->spec.config.T, V = model->spec.config.V, done = 0, status = 0;
    int32_t *window = xmalloc((size_t)T * sizeof *window); /* the tokens in the context */
    float *logits = xmalloc((size_t)V * sizeof *logits), *scratch = xmalloc((size_t)V * sizeof *scratch);
    int64_t count = min_i64(length, T), cached = 0; /* tokens in the window; those of them already in the cache */
    memcpy(window, prompt + length - count, (size_t)count * sizeof *window);

    for (; done < s->tokens && !status; done++) {
        next_logits(model, window + cached, count - cached, cached, logits);
        cached = count;
        int32_t token = sampler_pick(logits, V, s->temperature, s->top_k, s->seed, (uint32_t)done, scratch);
        if (token < 0) {
            status = error_set(error, "generate: no finite logit after %lld tokens; are the weights NaN?",
                               (long long)done);
            break;
        }
        emit(context, token);
        if (count == T) {
            count = T / 2;
            memmove(window, window + T - count, (size_t)count * sizeof *window);
            cached = 0;
        }
        if (count < T) window[count++] = token;
    }
    free(window);
    free(logits);
    free(scratch);
    return (int)status;
}
