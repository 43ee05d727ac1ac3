/* See model.h. */
#include "model.h"

#include <stdlib.h>

static Shape train_shape(const ModelSpec *s)
{
    return (Shape){s->B, s->config.T, s->train ? USE_TRAIN : USE_EVALUATE, s->recompute};
}

static Shape generate_shape(int64_t tokens) { return (Shape){1, tokens, USE_GENERATE, RECOMPUTE_NONE}; }

static void lay_out_activations(Model *model, Shape shape)
{
    for (int phase = 0; phase < model->recipe.phases; phase++) {
        model->arena.used = model->gpt.arena_start;
        gpt_layout(&model->gpt.acts, &model->arena, model->ops, &model->spec.config, &model->recipe, phase, &shape);
    }
}

static void widen_need(Need *need, Need other)
{
    need->N = max_i64(need->N, other.N);
    need->T = max_i64(need->T, other.T);
    need->cols = max_i64(need->cols, other.cols);
    need->V = max_i64(need->V, other.V);
    need->head_dim = max_i64(need->head_dim, other.head_dim);
    need->group = max_i64(need->group, other.group);
    need->heads = max_i64(need->heads, other.heads);
}

static void place_shadow(Model *model)
{
    int64_t elements = 0;
    for (int i = 0; i < model->table.count; i++)
        if (model->table.param[i].kind <= PARAM_DOWN)
            elements += model->table.param[i].rows * model->table.param[i].cols;
    model->arena.purpose = PURPOSE_GRADIENT;
    model->shadow = arena_tensor(&model->arena, DTYPE_FP32, 1, elements);
}

/* Blocks of 16 along tokens, and the transform's, stay within a micro-batch. */
static int check_tokens(const ModelSpec *s, const Recipe *recipe, Error *error)
{
    if (!s->train || !recipe_quantizes_tokens(recipe) || s->B * s->config.T % NVFP4_BLOCK == 0) return 0;
    return error_set(error,
                     "batch %lld x seq_len %lld is no multiple of 16: weight gradients in nvfp4 are made of blocks of "
                     "16 tokens; choose another --batch, or --wgrad bf16",
                     (long long)s->B, (long long)s->config.T);
}

/* The whole memory of a run, in model->arena, which counts or has memory. */
static void lay_out(Model *model)
{
    const ModelSpec *s = &model->spec;
    const Ops *ops = model->ops;
    Arena *arena = &model->arena;
    Shape batch = train_shape(s), generate = generate_shape(s->config.T);
    size_t tokens = (size_t)(max_i64(s->B, 1) * s->config.T) * sizeof(int32_t);

    zero_create(&model->zero, &model->table, &model->recipe, ops, &s->sharding, s->train, arena);
    if (s->train && s->recipe.shadow) place_shadow(model);
    if (s->train) optimizer_create(&model->optimizer, &model->zero, s->micro_steps * s->sharding.comm->ranks, arena);
    arena->purpose = PURPOSE_WORKSPACE;
    model->tokens = arena_take(arena, tokens * (size_t)s->micro_steps);
    model->targets = arena_take(arena, tokens * (size_t)s->micro_steps);
    if (s->document_mask) model->first_key = arena_take(arena, tokens * (size_t)s->micro_steps);
    model->loss = arena_take(arena, sizeof *model->loss);

    model->need = (Need){.fast_sums = s->sharding.order == REDUCE_FAST, .native_rounding = s->native_rounding};
    model->need.attention_backward = s->train && model->recipe.act == DTYPE_BF16 && !s->document_mask;
    if (s->B) widen_need(&model->need, gpt_need(&s->config, &batch));
    if (s->generate) widen_need(&model->need, gpt_need(&s->config, &generate));
    for (int i = 0; i < model->table.count && recipe_quantizes(&model->recipe); i++) {
        const Param *p = &model->table.param[i];
        if (p->kind > PARAM_DOWN) continue;
        model->need.weight_rows = max_i64(model->need.weight_rows, p->rows);
        model->need.weight_elements = max_i64(model->need.weight_elements, p->rows * p->cols);
    }
    model->workspace = arena_take(arena, ops->workspace_bytes(&model->need));

    gpt_create(&model->gpt, &s->config, ops, &model->recipe, arena);
    model->gpt.seed = s->seed;
    if (s->B) lay_out_activations(model, batch);
    if (s->generate) lay_out_activations(model, generate);
}

int model_plan(Model *model, const ModelSpec *spec, const Ops *ops, Error *error)
{
    *model = (Model){.spec = *spec, .ops = ops};
    if (!model->spec.sharding.comm) model->spec.sharding.comm = comm_alone();
    model->spec.sharding.micro_steps = spec->micro_steps;
    if (recipe_make(&model->recipe, &model->spec.config, &spec->recipe, error)) return -1;
    if (check_tokens(spec, &model->recipe, error)) {
        recipe_free(&model->recipe);
        return -1;
    }
    model->table = params_table(&model->spec.config, model->recipe.master);
    lay_out(model);
    return 0;
}

int model_open(Model *model, const ModelSpec *spec, const Ops *ops, Error *error)
{
    if (model_plan(model, spec, ops, error)) return -1;
    size_t bytes = model->arena.peak;
    zero_free(&model->zero);
    gpt_free(&model->gpt);

    model->arena = (Arena){.base = ops->alloc(bytes), .capacity = bytes};
    lay_out(model);
    model->host = xmalloc((size_t)(max_i64(spec->B, 1) * spec->config.T) * sizeof *model->host);
    ops->workspace_set(model->workspace, &model->need);
    zero_bind(&model->zero, &model->gpt);
    Shape shape = spec->B ? train_shape(spec) : generate_shape(1);
    gpt_set_shape(&model->gpt, &shape);
    return 0;
}

void model_close(Model *model)
{
    zero_free(&model->zero);
    gpt_free(&model->gpt);
    params_free(&model->table);
    recipe_free(&model->recipe);
    if (model->arena.base) model->ops->free(model->arena.base, model->arena.capacity);
    free(model->host);
    *model = (Model){0};
}

void model_use(Model *model, Use use, int64_t tokens)
{
    Shape shape = use == USE_GENERATE ? generate_shape(tokens) : train_shape(&model->spec);
    gpt_set_shape(&model->gpt, &shape);
}

Batch model_upload(Model *model, int64_t m, const int32_t *tokens, const int32_t *targets)
{
    const ModelSpec *s = &model->spec;
    int64_t N = s->B * s->config.T;
    int64_t j = m * s->sharding.comm->ranks + s->sharding.comm->rank; /* among the micro-batches of all ranks */
    size_t bytes = (size_t)N * sizeof(int32_t);
    Batch batch = {.tokens = model->tokens + m * N, .targets = model->targets + m * N, .row0 = j * N};

    model->ops->copy_in(model->tokens + m * N, tokens, bytes);
    model->ops->copy_in(model->targets + m * N, targets, bytes);
    if (s->document_mask) {
        gpt_document_starts(model->host, tokens, s->B, s->config.T, (int32_t)s->eot_token);
        model->ops->copy_in(model->first_key + m * N, model->host, bytes);
        batch.first_key = model->first_key + m * N;
    }
    batch.loss = s->train ? model->optimizer.loss[model->optimizer.turn] + j : model->loss;
    return batch;
}

Batch model_upload_tokens(Model *model, const int32_t *tokens, int64_t count)
{
    model->ops->copy_in(model->tokens, tokens, (size_t)count * sizeof *tokens);
    return (Batch){.tokens = model->tokens, .targets = model->targets, .loss = model->loss};
}
