/* See plan.h. */
#include "plan.h"

#include "checkpoint.h"

#include <stdio.h>
#include <string.h>

void plan_bytes_text(char text[32], double bytes)
{
    if (bytes >= 0x1p30)
        snprintf(text, 32, "%.2f GiB", bytes / 0x1p30);
    else if (bytes >= 0x1p20)
        snprintf(text, 32, "%.1f MiB", bytes / 0x1p20);
    else
        snprintf(text, 32, "%.1f KiB", bytes / 0x1p10);
}

void plan_print_line(const Model *model)
{
    const Arena *arena = &model->arena;
    char text[32];
    plan_bytes_text(text, (double)arena->peak);
    printf("memory      %s:", text);
    for (int p = 0, printed = 0; p < PURPOSE_COUNT; p++) {
        if (!arena->bytes[p]) continue;
        plan_bytes_text(text, (double)arena->bytes[p]);
        printf("%s %s %s", printed++ ? "," : "", purpose_name((Purpose)p), text);
    }
    printf("\n");
}

void plan_print_precision(const Model *model, bool automatic, const char *reason)
{
    char census[CENSUS_BYTES];
    Json *table = json_new_array();
    recipe_census(&model->recipe, &model->spec.config, census, sizeof census);
    recipe_census_table(&model->recipe, table);
    if (automatic) printf("precision   auto: %s\n", reason);
    printf("%-12s%s\n", automatic ? "" : "precision", census);
    for (const Json *row = json_first(table); row; row = json_next(row)) {
        const char *first = json_string(json_get(row, "first")), *second = json_string(json_get(row, "second"));
        int64_t from = 1;
        json_int(json_get(row, "from_step"), &from);
        if (!strstr(first, "nvfp4")) continue;
        printf("%12s%s  %s | %s", "", json_string(json_get(row, "product")), first, second);
        if (from > 1) printf(" (from step %lld)", (long long)from);
        printf("\n");
    }
    json_free(table);
}

/* What blocks keep from forward to backward, in the first phase of the recipe. */
static void print_saved(const Model *model)
{
    const ModelSpec *s = &model->spec;
    int64_t L = s->config.L, tokens = s->B * s->config.T;
    Shape shape = {s->B, s->config.T, USE_TRAIN, s->recompute};
    Activations acts;
    Arena count = {0};
    gpt_activations_new(&acts, &s->config);
    gpt_layout(&acts, &count, model->ops, &s->config, &model->recipe, 0, &shape);
    printf("saved for backward, bytes per token and block%s:\n",
           s->recompute == RECOMPUTE_BLOCK ? " (one set: every block is made again in it)" : "");
    for (int64_t first = 0, next; first < L; first = next) {
        const BlockActivations *b = &acts.block[first];
        for (next = first + 1; next < L && acts.block[next].saved == b->saved;) next++;
        printf("  in blocks %lld-%lld %14.9g: %.9g of operands of weight gradients, %.9g for norms, attention, "
               "activation\n",
               (long long)first, (long long)next - 1, (double)b->saved / (double)tokens,
               (double)b->saved_operands / (double)tokens, (double)(b->saved - b->saved_operands) / (double)tokens);
    }
    gpt_activations_free(&acts);
}

void plan_print(const Model *model, int64_t global_batch_tokens, bool checkpoint_async)
{
    const Arena *arena = &model->arena;
    const GPTConfig *c = &model->spec.config;
    char text[32];
    printf("parameters            %lld\n", (long long)config_parameters(c));
    printf("FLOPs per token       %.4g (forward and backward)\n", config_flops_per_token(c));
    printf("tokens per step       %lld in %lld micro-batches of %lld x %lld\n\n", (long long)global_batch_tokens,
           (long long)model->spec.micro_steps, (long long)model->spec.B, (long long)c->T);
    printf("memory by purpose            bytes               share\n");
    for (int p = 0; p < PURPOSE_COUNT; p++) {
        plan_bytes_text(text, (double)arena->bytes[p]);
        printf("  %-20s %15zu %12s %5.1f%%\n", purpose_name((Purpose)p), arena->bytes[p], text,
               100.0 * (double)arena->bytes[p] / (double)arena->peak);
    }
    plan_bytes_text(text, (double)arena->peak);
    printf("  %-20s %15zu %12s 100.0%%\n", "total", arena->peak, text);
    size_t copy = checkpoint_copy_bytes(model, checkpoint_async);
    plan_bytes_text(text, (double)copy);
    if (copy) printf("  beside it, in host memory: %zu (%s), the copy that a checkpoint is written from\n", copy, text);
    printf("\n");
    print_saved(model);
    if (model->spec.sharding.comm->ranks == 1) return;
    size_t wire = zero_wire_bytes(&model->zero, &model->recipe, 0);
    plan_bytes_text(text, (double)wire);
    printf("\non the wire, per step   %zu bytes (%s), sent by all %d ranks at zero_stage %d\n", wire, text,
           model->spec.sharding.comm->ranks, model->spec.sharding.stage);
}
