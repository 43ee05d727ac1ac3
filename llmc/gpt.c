/* Forward and backward of GPT-2, Llama and Qwen3, written once over the table of operations.
 *
 * How to read it. A block is two branches on the residual stream x:
 *
 *     x2 = x  + O(attention(QKV(norm1(x))))        x, x2   [N, C]   N = B*T tokens
 *     x' = x2 + Down(activation(Up(norm2(x2))))
 *
 * Each of the four linear layers reads an operand: a (for qkv), o (for O), b (for Up), u (for Down). Forward makes an
 * operand and multiplies; backward makes the operand of the output gradient (dY), multiplies twice (dW = dY^T X,
 * dX = dY W), and goes on with dX. dx is the gradient of the stream: a branch adds to it.
 *
 * Every operand call names the views it wants: the row view is for the product at hand, the column view for the
 * weight gradient. What is `late` (recomputed) is left out forward and made by the same call backward. Precision,
 * sharding, streams: not here. Order: block, model, training and other uses, set-up, then the layout of all
 * activations.
 * Over 600 lines because the layout mirrors the order of the calls: the two are read, and changed, together.
 */
#include "gpt.h"

#include "mathfn.h"

#include <stdlib.h>

/* ---- one block ---- */

static Attention attention_shape(const GPT *gpt, const Batch *batch, int64_t position0, int64_t T)
{
    const GPTConfig *c = gpt->config;
    return (Attention){.B = gpt->shape.B,
                       .Tq = T,
                       .Tk = gpt->shape.use == USE_GENERATE ? c->T : T,
                       .NH = c->NH,
                       .NKV = c->NKV,
                       .HD = c->HD,
                       .position0 = position0,
                       .first_key = batch->first_key};
}

static Tensor q_of(const GPTConfig *c, Tensor qkv) { return tensor_cols(qkv, 0, c->NH * c->HD); }
static Tensor k_of(const GPTConfig *c, Tensor qkv) { return tensor_cols(qkv, c->NH * c->HD, c->NKV * c->HD); }
static Tensor v_of(const GPTConfig *c, Tensor qkv)
{
    return tensor_cols(qkv, (c->NH + c->NKV) * c->HD, c->NKV * c->HD);
}

/* x[l] -> h, the pre-activation: all of the block but its last product, and so all that recomputation repeats. */
static void block_forward_to_h(GPT *gpt, int l, const Attention *attn, unsigned views)
{
    const GPTConfig *c = gpt->config;
    const Ops *op = gpt->ops;
    const Block *w = &gpt->block[l];
    BlockActivations *s = &gpt->acts.block[l];
    Tensor x = gpt->acts.x[l], stats = gpt->acts.stats[l], y = gpt->acts.y;

    op->operand_from_norm(&s->a, x, stats, &w->norm1, views & ~s->a.late);
    op->linear_forward(s->qkv, &s->a, &w->qkv);
    if (c->rope) op->qk_norm_rope_forward(s->rotated, s->qkv, w->q_gain, w->k_gain, c->norm_eps, gpt->cos_sin, attn);
    Tensor q = q_of(c, s->rotated), k = k_of(c, s->rotated), v = v_of(c, s->rotated);
    if (gpt->shape.use == USE_GENERATE) { /* this call's keys and values join the earlier ones */
        op->copy(tensor_rows(gpt->acts.k_cache[l], attn->position0, attn->Tq), k);
        op->copy(tensor_rows(gpt->acts.v_cache[l], attn->position0, attn->Tq), v);
        k = gpt->acts.k_cache[l];
        v = gpt->acts.v_cache[l];
    }
    op->attention_forward(s->att, s->lse, q, k, v, attn);
    op->operand_from_tensor(&s->o, s->att, views & ~s->o.late);
    op->linear_forward(y, &s->o, &w->o);
    op->residual_add(s->x2, s->stats2, x, y, &w->norm2);

    op->operand_from_norm(&s->b, s->x2, s->stats2, &w->norm2, views & ~s->b.late);
    op->linear_forward(s->h, &s->b, &w->up);
}

/* x[l] -> x[l+1] */
static void block_forward(GPT *gpt, int l, const Attention *attn, unsigned views)
{
    const Ops *op = gpt->ops;
    const Block *w = &gpt->block[l];
    BlockActivations *s = &gpt->acts.block[l];
    Tensor y = gpt->acts.y;

    block_forward_to_h(gpt, l, attn, views);
    op->operand_from_activation(&s->u, s->h, gpt->config->activation, views & ~s->u.late);
    op->linear_forward(y, &s->u, &w->down);
    op->residual_add(gpt->acts.x[l + 1], gpt->acts.stats[l + 1], s->x2, y, &w->norm1); /* stats for the next norm */
}

/* dx: gradient of x[l+1] -> gradient of x[l] */
static void block_backward(GPT *gpt, int l, const Attention *attn)
{
    const GPTConfig *c = gpt->config;
    const Ops *op = gpt->ops;
    Block *w = &gpt->block[l];
    BlockActivations *s = &gpt->acts.block[l];
    Tensor x = gpt->acts.x[l], stats = gpt->acts.stats[l], dx = gpt->acts.dx, dnorm = gpt->acts.dnorm;

    /* x' = x2 + Down(activation(Up(norm2(x2)))) */
    op->operand_from_gradient(&s->dy_down, dx, w->down.dbias);
    op->operand_from_activation(&s->u, s->h, c->activation, s->u.late);
    op->linear_backward_weight(&w->down, &s->dy_down, &s->u);
    op->linear_backward_input(s->du, &s->dy_down, &w->down);
    op->operand_from_activation_backward(&s->dy_up, s->du, s->h, c->activation, w->up.dbias);
    op->operand_from_norm(&s->b, s->x2, s->stats2, &w->norm2, s->b.late);
    op->linear_backward_weight(&w->up, &s->dy_up, &s->b);
    op->linear_backward_input(dnorm, &s->dy_up, &w->up);
    op->norm_backward(dx, &w->norm2, dnorm, s->x2, s->stats2);

    /* x2 = x + O(attention(QKV(norm1(x)))) */
    op->operand_from_gradient(&s->dy_o, dx, w->o.dbias);
    op->operand_from_tensor(&s->o, s->att, s->o.late);
    op->linear_backward_weight(&w->o, &s->dy_o, &s->o);
    op->linear_backward_input(s->datt, &s->dy_o, &w->o);
    if (c->qk_norm) /* q and k before the norm are what is saved */
        op->qk_norm_rope_forward(s->rotated, s->qkv, w->q_gain, w->k_gain, c->norm_eps, gpt->cos_sin, attn);
    op->attention_backward(q_of(c, s->dqkv), k_of(c, s->dqkv), v_of(c, s->dqkv), s->datt, s->att, s->lse,
                           q_of(c, s->rotated), k_of(c, s->rotated), v_of(c, s->rotated), attn);
    if (c->rope)
        op->qk_norm_rope_backward(s->dqkv, w->dq_gain, w->dk_gain, s->qkv, w->q_gain, w->k_gain, c->norm_eps,
                                  gpt->cos_sin, attn);
    op->operand_from_gradient(&s->dy_qkv, s->dqkv, w->qkv.dbias);
    op->operand_from_norm(&s->a, x, stats, &w->norm1, s->a.late);
    op->linear_backward_weight(&w->qkv, &s->dy_qkv, &s->a);
    op->linear_backward_input(dnorm, &s->dy_qkv, &w->qkv);
    op->norm_backward(dx, &w->norm1, dnorm, x, stats);
}

/* ---- the model ---- */

static int embedding_bucket(const GPT *gpt) { return (int)gpt->config->L; }
static int head_bucket(const GPT *gpt) { return (int)gpt->config->L + (gpt->config->tied ? 0 : 1); }

/* tokens -> x[L] */
static void forward(GPT *gpt, const Batch *batch, const Attention *attn, unsigned views)
{
    const Hooks *hooks = &gpt->hooks;
    int embedding = embedding_bucket(gpt);

    hooks->block_acquire(hooks->context, embedding, FORWARD);
    gpt->ops->embedding_forward(gpt->acts.x[0], gpt->acts.stats[0], batch->tokens, gpt->wte, gpt->wpe, attn->Tq,
                                attn->position0, &gpt->final_norm);
    hooks->block_release(hooks->context, embedding, FORWARD);
    for (int l = 0; l < gpt->config->L; l++) {
        hooks->block_acquire(hooks->context, l, FORWARD);
        block_forward(gpt, l, attn, views);
        hooks->block_release(hooks->context, l, FORWARD);
    }
}

/* x[L] -> losses, and with `gradient` also dx and the head's gradients. By chunks: full logits never exist. */
static void classifier(GPT *gpt, const Batch *batch, bool gradient)
{
    const Ops *op = gpt->ops;
    const Hooks *hooks = &gpt->hooks;
    const GPTConfig *c = gpt->config;
    Activations *s = &gpt->acts;
    Direction direction = gradient ? BACKWARD : FORWARD;

    hooks->block_acquire(hooks->context, head_bucket(gpt), direction);
    if (gradient) op->zero(s->dx);
    for (int64_t n = 0; n < s->N; n += s->chunk) {
        int64_t rows = min_i64(s->chunk, s->N - n);
        Tensor x = tensor_rows(s->x[c->L], n, rows), stats = tensor_rows(s->stats[c->L], n, rows);
        Tensor logits = tensor_rows(s->logits, 0, rows), losses = tensor_rows(s->losses, n, rows);
        s->f.row0 = s->dy_head.row0 = n;
        s->f.rows = s->dy_head.rows = rows;
        op->operand_from_norm(&s->f, x, stats, &gpt->final_norm, gradient ? VIEW_ROW | VIEW_COL : VIEW_ROW);
        op->linear_forward(logits, &s->f, &gpt->head);
        op->softmax_cross_entropy(losses, logits, batch->targets + n, c->V, gradient);
        if (!gradient) continue;
        Tensor df = tensor_rows(s->df, 0, rows);
        op->operand_from_gradient(&s->dy_head, logits, gpt->head.dbias);
        op->linear_backward_weight(&gpt->head, &s->dy_head, &s->f);
        op->linear_backward_input(df, &s->dy_head, &gpt->head);
        op->norm_backward(tensor_rows(s->dx, n, rows), &gpt->final_norm, df, x, stats);
    }
    op->loss_sum(batch->loss, s->losses);
    hooks->block_release(hooks->context, head_bucket(gpt), direction);
    if (gradient && !c->tied) hooks->grads_ready(hooks->context, head_bucket(gpt));
}

/* dx of x[L] -> gradients of all blocks and of the embedding */
static void backward(GPT *gpt, const Batch *batch, const Attention *attn)
{
    const Hooks *hooks = &gpt->hooks;
    int embedding = embedding_bucket(gpt);

    for (int l = (int)gpt->config->L - 1; l >= 0; l--) {
        hooks->block_acquire(hooks->context, l, BACKWARD);
        if (gpt->shape.recompute == RECOMPUTE_BLOCK) block_forward_to_h(gpt, l, attn, VIEW_ROW | VIEW_COL);
        block_backward(gpt, l, attn);
        hooks->block_release(hooks->context, l, BACKWARD);
        hooks->grads_ready(hooks->context, l);
    }
    hooks->block_acquire(hooks->context, embedding, BACKWARD);
    gpt->ops->embedding_backward(gpt->dwte, gpt->dwpe, gpt->acts.dx, batch->tokens, gpt->shape.T);
    hooks->block_release(hooks->context, embedding, BACKWARD);
    hooks->grads_ready(hooks->context, embedding);
}

/* ---- training and other uses ---- */

static void lay_out(GPT *gpt)
{
    gpt->arena->used = gpt->arena_start;
    gpt_layout(&gpt->acts, gpt->arena, gpt->ops, gpt->config, gpt->recipe, gpt->phase, &gpt->shape);
}

void gpt_set_shape(GPT *gpt, const Shape *shape)
{
    gpt->shape = *shape;
    if (gpt->phase >= 0) lay_out(gpt);
}

static void set_formats(Linear *w, const LinearFormats *f)
{
    w->formats = *f;
    w->weight.row.format = f->w_row;
    w->weight.col.format = f->w_col;
}

/* On a change of phase activations are laid out anew in the same memory, which was planned for the widest phase;
 * nothing lives in it between steps. */
static void enter_phase(GPT *gpt, int phase)
{
    const Recipe *r = gpt->recipe;
    if (phase == gpt->phase) return;
    for (int64_t l = 0; l < gpt->config->L; l++) {
        const LinearFormats *f = recipe_formats(r, phase, l, 0);
        Block *w = &gpt->block[l];
        set_formats(&w->qkv, &f[PROJ_QKV]);
        set_formats(&w->o, &f[PROJ_O]);
        set_formats(&w->up, &f[PROJ_UP]);
        set_formats(&w->down, &f[PROJ_DOWN]);
    }
    set_formats(&gpt->head, &r->head);
    gpt->phase = phase;
    lay_out(gpt);
}

void gpt_enter_step(GPT *gpt, uint32_t step)
{
    gpt->step = step;
    enter_phase(gpt, recipe_phase(gpt->recipe, step));
    gpt->hooks.prepare_weights(gpt->hooks.context);
}

void gpt_enter_shadow(GPT *gpt)
{
    enter_phase(gpt, gpt->recipe->shadow_phase);
    gpt->hooks.prepare_weights(gpt->hooks.context);
}

void gpt_gradients(GPT *gpt, const Step *step, const Batch *micro_batch, int64_t micro_steps)
{
    /* A forward pass that will be repeated makes no column views. */
    unsigned views = gpt->shape.recompute == RECOMPUTE_BLOCK ? VIEW_ROW : VIEW_ROW | VIEW_COL;

    if (gpt->phase < 0 || gpt->step != step->step) gpt_enter_step(gpt, step->step);
    gpt->ops->begin_step(step);
    for (int64_t m = 0; m < micro_steps; m++) {
        const Batch *batch = &micro_batch[m];
        Attention attn = attention_shape(gpt, batch, 0, gpt->shape.T);
        gpt->ops->begin_micro_step(batch->row0);
        forward(gpt, batch, &attn, views);
        classifier(gpt, batch, true);
        backward(gpt, batch, &attn);
    }
}

/* Evaluation and generation draw their rounding bits, where a recipe has any forward, as the step of the weights. */
static void begin_use(const GPT *gpt, int64_t row0)
{
    gpt->ops->begin_step(&(Step){.seed = gpt->seed, .step = gpt->step});
    gpt->ops->begin_micro_step(row0);
}

void gpt_evaluate(GPT *gpt, const Batch *batch)
{
    Attention attn = attention_shape(gpt, batch, 0, gpt->shape.T);
    begin_use(gpt, batch->row0);
    forward(gpt, batch, &attn, VIEW_ROW);
    classifier(gpt, batch, false);
}

Tensor gpt_logits(GPT *gpt, const Batch *batch, int64_t position0)
{
    const Ops *op = gpt->ops;
    Activations *s = &gpt->acts;
    const Hooks *hooks = &gpt->hooks;
    Attention attn = attention_shape(gpt, batch, position0, gpt->shape.T);
    int64_t last = gpt->shape.T - 1;
    Tensor x = tensor_rows(s->x[gpt->config->L], last, 1), stats = tensor_rows(s->stats[gpt->config->L], last, 1);

    begin_use(gpt, position0);
    forward(gpt, batch, &attn, VIEW_ROW);
    hooks->block_acquire(hooks->context, head_bucket(gpt), FORWARD);
    op->operand_from_norm(&s->f, x, stats, &gpt->final_norm, VIEW_ROW);
    op->linear_forward(s->logits, &s->f, &gpt->head);
    hooks->block_release(hooks->context, head_bucket(gpt), FORWARD);
    return s->logits;
}

void gpt_document_starts(int32_t *first_key, const int32_t *tokens, int64_t B, int64_t T, int32_t eot)
{
    for (int64_t b = 0; b < B; b++) {
        int32_t start = 0;
        for (int64_t t = 0; t < T; t++) {
            if (tokens[b * T + t] == eot) start = (int32_t)t;
            first_key[b * T + t] = start;
        }
    }
}

/* ---- set-up ---- */

/* Row t: cos of HD/2 angles, then sin. Angle = t theta^(-2i/HD); Llama 3 divides low frequencies by `factor`, leaves
 * high ones, and blends between (wavelengths original_context / high_freq_factor .. / low_freq_factor). */
static double rope_frequency(const GPTConfig *c, int64_t i)
{
    double frequency = f64_exp(-2.0 * (double)i / (double)c->HD * f64_log(c->rope_theta));
    if (c->rope_factor == 0) return frequency;

    double turns = (double)c->rope_original_context * frequency / 6.283185307179586; /* within the original context */
    double blend = (turns - c->rope_low_freq_factor) / (c->rope_high_freq_factor - c->rope_low_freq_factor);
    blend = blend < 0 ? 0 : blend > 1 ? 1 : blend;
    return (1 - blend) * frequency / c->rope_factor + blend * frequency;
}

static void rope_table(GPT *gpt)
{
    const GPTConfig *c = gpt->config;
    int64_t half = c->HD / 2;
    float *table = xmalloc((size_t)(c->T * c->HD) * sizeof *table);
    for (int64_t i = 0; i < half; i++) {
        double frequency = rope_frequency(c, i);
        for (int64_t t = 0; t < c->T; t++) {
            double sine, cosine;
            f64_sin_cos((double)t * frequency, &sine, &cosine);
            table[t * c->HD + i] = (float)cosine;
            table[t * c->HD + half + i] = (float)sine;
        }
    }
    gpt->ops->copy_in(gpt->cos_sin.data, table, tensor_bytes(gpt->cos_sin));
    free(table);
}

void gpt_activations_new(Activations *acts, const GPTConfig *c)
{
    size_t L = (size_t)c->L;
    *acts = (Activations){.x = xcalloc(L + 1, sizeof(Tensor)),
                          .stats = xcalloc(L + 1, sizeof(Tensor)),
                          .block = xcalloc(L, sizeof(BlockActivations)),
                          .k_cache = xcalloc(L, sizeof(Tensor)),
                          .v_cache = xcalloc(L, sizeof(Tensor))};
}

void gpt_activations_free(Activations *acts)
{
    free(acts->x);
    free(acts->stats);
    free(acts->block);
    free(acts->k_cache);
    free(acts->v_cache);
    *acts = (Activations){0};
}

void gpt_create(GPT *gpt, const GPTConfig *config, const Ops *ops, const Recipe *recipe, Arena *arena)
{
    *gpt = (GPT){.config = config, .ops = ops, .recipe = recipe, .phase = -1, .arena = arena};
    gpt->block = xcalloc((size_t)config->L, sizeof *gpt->block);
    gpt_activations_new(&gpt->acts, config);
    gpt->final_norm = (Norm){.kind = config->norm, .eps = config->norm_eps};
    for (int64_t l = 0; l < config->L; l++) gpt->block[l].norm1 = gpt->block[l].norm2 = gpt->final_norm;
    if (config->rope) {
        arena->purpose = PURPOSE_WORKSPACE;
        gpt->cos_sin = arena_tensor(arena, DTYPE_FP32, config->T, config->HD);
        if (arena->base) rope_table(gpt);
    }
    gpt->arena_start = arena->used;
}

void gpt_free(GPT *gpt)
{
    gpt_activations_free(&gpt->acts);
    free(gpt->block);
    *gpt = (GPT){0};
}

void gpt_tune(const GPT *gpt)
{
    for (int64_t l = 0; l < gpt->config->L; l++) {
        const Block *b = &gpt->block[l];
        const Linear *layer[] = {&b->qkv, &b->o, &b->up, &b->down};
        for (int i = 0; i < 4; i++) gpt->ops->tune(layer[i], gpt->acts.N);
    }
    gpt->ops->tune(&gpt->head, gpt->acts.chunk);
}

void gpt_tie_head(GPT *gpt)
{
    Linear *head = &gpt->head;
    head->weight = (Operand){.rows = gpt->wte.rows, .cols = gpt->wte.cols, .layer = (int)gpt->config->L};
    head->weight.row.data = head->weight.col.data = gpt->wte.data;
    head->dW = gpt->dwte;
}

ParamPlace gpt_place(GPT *gpt, const Param *p)
{
    Block *w = p->layer < gpt->config->L ? &gpt->block[p->layer] : NULL;
    switch (p->kind) {
    case PARAM_QKV:
        return (ParamPlace){.linear = &w->qkv};
    case PARAM_O:
        return (ParamPlace){.linear = &w->o};
    case PARAM_UP:
        return (ParamPlace){.linear = &w->up};
    case PARAM_DOWN:
        return (ParamPlace){.linear = &w->down};
    case PARAM_QKV_BIAS:
        return (ParamPlace){NULL, &w->qkv.bias, &w->qkv.dbias};
    case PARAM_O_BIAS:
        return (ParamPlace){NULL, &w->o.bias, &w->o.dbias};
    case PARAM_UP_BIAS:
        return (ParamPlace){NULL, &w->up.bias, &w->up.dbias};
    case PARAM_DOWN_BIAS:
        return (ParamPlace){NULL, &w->down.bias, &w->down.dbias};
    case PARAM_NORM1_GAIN:
        return (ParamPlace){NULL, &w->norm1.gain, &w->norm1.dgain};
    case PARAM_NORM1_BIAS:
        return (ParamPlace){NULL, &w->norm1.bias, &w->norm1.dbias};
    case PARAM_NORM2_GAIN:
        return (ParamPlace){NULL, &w->norm2.gain, &w->norm2.dgain};
    case PARAM_NORM2_BIAS:
        return (ParamPlace){NULL, &w->norm2.bias, &w->norm2.dbias};
    case PARAM_Q_GAIN:
        return (ParamPlace){NULL, &w->q_gain, &w->dq_gain};
    case PARAM_K_GAIN:
        return (ParamPlace){NULL, &w->k_gain, &w->dk_gain};
    case PARAM_WTE:
        return (ParamPlace){NULL, &gpt->wte, &gpt->dwte};
    case PARAM_WPE:
        return (ParamPlace){NULL, &gpt->wpe, &gpt->dwpe};
    case PARAM_LM_HEAD:
        return (ParamPlace){.linear = &gpt->head};
    case PARAM_FINAL_GAIN:
        return (ParamPlace){NULL, &gpt->final_norm.gain, &gpt->final_norm.dgain};
    case PARAM_FINAL_BIAS:
        return (ParamPlace){NULL, &gpt->final_norm.bias, &gpt->final_norm.dbias};
    case PARAM_KIND_COUNT:
        break;
    }
    die("gpt_place: unknown parameter %s; this is a bug", p->name);
}

Need gpt_need(const GPTConfig *c, const Shape *shape)
{
    int64_t cols = max_i64(config_qkv_cols(c), max_i64(config_up_cols(c), c->C));
    return (Need){.N = shape->B * shape->T,
                  .T = c->T,
                  .cols = cols,
                  .V = c->V,
                  .head_dim = c->HD,
                  .heads = c->NH,
                  .group = c->NH / c->NKV};
}

/* ---- the layout of activations: which buffer lives from where to where ----
 *
 *     | x, stats     | saved per block    | y dx dnorm losses | scratch, laid over itself:             |
 *     | per block    | (one set for all   | rotated (qwen3)   |   forward of block l: a | o | b | u     |
 *     |              |  when recomputed)  |                   |   classifier chunk                     |
 *     |              |                    |                   |   backward of block l: ffn | attention |
 */

static const Tensor COMPUTED; /* "no source": the op computes what it quantizes */

static int64_t stats_cols(const GPTConfig *c) { return c->norm == NORM_LAYERNORM ? 2 : 1; }

static bool is_source(Format f, Tensor t)
{
    return format_is_plain(f) && (f == FORMAT_FP32) == (t.dtype == DTYPE_FP32);
}

/* A view that is its source takes no memory. */
static void place(Arena *arena, const Ops *op, Operand *o, unsigned view, Tensor source)
{
    View *v = view == VIEW_ROW ? &o->row : &o->col;
    if (v->format.format == FORMAT_NONE) return;
    if (source.cols && is_source(v->format.format, source))
        v->data = source.data;
    else
        op->view_place(v, view, o->rows, o->cols,
                       arena_take(arena, op->view_bytes(&v->format, view, o->rows, o->cols)));
}

static bool one_memory(const Operand *o) { return views_are_one(&o->row.format, &o->col.format); }

/* The column view is in the row view's memory, or the other way round; each keeps its format. */
static void share(View *to, const View *from)
{
    to->data = from->data;
    to->block_scale = from->block_scale;
    to->tensor_scale = from->tensor_scale;
}

/* What outlives the forward pass: the column view, and a row view that is the same memory. */
static void place_saved(Arena *arena, const Ops *op, Operand *o, Tensor source)
{
    if (o->late & VIEW_COL) return;
    place(arena, op, o, VIEW_COL, source);
    if (one_memory(o)) share(&o->row, &o->col);
}

static void place_row(Arena *arena, const Ops *op, Operand *o, Tensor source)
{
    if (!one_memory(o) || (o->late & VIEW_COL)) place(arena, op, o, VIEW_ROW, source);
}

static void place_late(Arena *arena, const Ops *op, Operand *o, Tensor source)
{
    if (o->late & VIEW_COL) place(arena, op, o, VIEW_COL, source);
}

void gpt_place_operand(Arena *arena, const Ops *op, Operand *o, Tensor source)
{
    place(arena, op, o, VIEW_ROW, source);
    if (one_memory(o))
        share(&o->col, &o->row);
    else
        place(arena, op, o, VIEW_COL, source);
}

static Operand operand(int64_t rows, int64_t cols, int layer, ViewFormat row, ViewFormat col, unsigned late)
{
    return (Operand){.rows = rows, .cols = cols, .layer = layer, .late = late, .row.format = row, .col.format = col};
}

/* Names and formats of a block's operands. Evaluation has no columns and no gradients. */
static void block_operands(BlockActivations *s, const GPTConfig *c, const LinearFormats *f, int64_t N, int l,
                           const Shape *shape)
{
    const LinearFormats *qkv = &f[PROJ_QKV], *o = &f[PROJ_O], *up = &f[PROJ_UP], *down = &f[PROJ_DOWN];
    ViewFormat none = {0};
    bool train = shape->use == USE_TRAIN;
    unsigned late = train && shape->recompute == RECOMPUTE_OPERANDS ? VIEW_COL : 0;
    unsigned late_u = train && shape->recompute != RECOMPUTE_NONE ? VIEW_COL : 0; /* recomputation stops at h */

    s->a = operand(N, c->C, l, qkv->x_row, train ? qkv->x_col : none, late);
    s->o = operand(N, c->NH * c->HD, l, o->x_row, train ? o->x_col : none, late);
    s->b = operand(N, c->C, l, up->x_row, train ? up->x_col : none, late);
    s->u = operand(N, c->F, l, down->x_row, train ? down->x_col : none, late_u);
    if (!train) return;
    s->dy_qkv = operand(N, config_qkv_cols(c), l, qkv->dy_row, qkv->dy_col, 0);
    s->dy_o = operand(N, c->C, l, o->dy_row, o->dy_col, 0);
    s->dy_up = operand(N, config_up_cols(c), l, up->dy_row, up->dy_col, 0);
    s->dy_down = operand(N, c->C, l, down->dy_row, down->dy_col, 0);
}

/* What a block saves for its backward, or one working set for all blocks when they are recomputed or not trained. */
static void layout_saved(BlockActivations *s, Arena *arena, const Ops *op, const GPTConfig *c, DType act, int64_t N)
{
    size_t start = arena->used, operands;

    s->qkv = s->rotated = arena_tensor(arena, act, N, config_qkv_cols(c));
    s->att = arena_tensor(arena, act, N, c->NH * c->HD);
    s->lse = arena_tensor(arena, DTYPE_FP32, N, c->NH);
    s->x2 = arena_tensor(arena, act, N, c->C);
    s->stats2 = arena_tensor(arena, DTYPE_FP32, N, stats_cols(c));
    s->h = arena_tensor(arena, act, N, config_up_cols(c));
    operands = arena->used;
    place_saved(arena, op, &s->a, COMPUTED);
    place_saved(arena, op, &s->o, s->att);
    place_saved(arena, op, &s->b, COMPUTED);
    place_saved(arena, op, &s->u, COMPUTED);
    s->saved = arena->used - start;
    s->saved_operands = arena->used - operands;
}

/* Each view starts at the same byte: one is dead when the next is written. */
static void layout_forward(BlockActivations *s, Arena *arena, const Ops *op)
{
    size_t start = arena->used;

    place_row(arena, op, &s->a, COMPUTED); /* norm1 .. qkv */
    arena->used = start;
    place_row(arena, op, &s->o, s->att); /* attention .. o */
    arena->used = start;
    place_row(arena, op, &s->b, COMPUTED); /* norm2 .. up */
    arena->used = start;
    place_row(arena, op, &s->u, COMPUTED); /* activation .. down */
    arena->used = start;
}

static void layout_backward(BlockActivations *s, Arena *arena, const Ops *op, const GPTConfig *c, DType act, Tensor dx)
{
    size_t start = arena->used, inner;

    s->du = arena_tensor(arena, act, dx.rows, c->F); /* down's dgrad .. activation backward */
    inner = arena->used;
    gpt_place_operand(arena, op, &s->dy_down, dx);
    place_late(arena, op, &s->u, COMPUTED); /* ... down's two products */
    arena->used = inner;
    gpt_place_operand(arena, op, &s->dy_up, COMPUTED);
    place_late(arena, op, &s->b, COMPUTED); /* ... up's two products */
    arena->used = start;

    s->datt = arena_tensor(arena, act, dx.rows, c->NH * c->HD); /* o's dgrad .. attention backward */
    inner = arena->used;
    gpt_place_operand(arena, op, &s->dy_o, dx);
    place_late(arena, op, &s->o, s->att); /* ... o's two products */
    arena->used = inner;
    s->dqkv = arena_tensor(arena, act, dx.rows, config_qkv_cols(c)); /* attention backward .. qkv's products */
    gpt_place_operand(arena, op, &s->dy_qkv, s->dqkv);
    place_late(arena, op, &s->a, COMPUTED);
    arena->used = start;
}

/* Equal chunks of at most about 2^25 logits, each a multiple of 16 tokens; the last may be shorter. */
static int64_t classifier_chunk(int64_t N, int64_t Vp)
{
    int64_t chunks = ceil_div(N * Vp, (int64_t)1 << 25);
    return min_i64(N, round_up(ceil_div(N, chunks), 16));
}

static void layout_classifier(Activations *s, Arena *arena, const Ops *op, const GPTConfig *c, const LinearFormats *f,
                              DType act, bool train)
{
    ViewFormat none = {0};
    size_t start = arena->used;

    s->logits = arena_tensor(arena, act, s->chunk, c->Vp);
    s->f = operand(s->chunk, c->C, (int)c->L, f->x_row, train ? f->x_col : none, 0);
    place_saved(arena, op, &s->f, COMPUTED);
    place_row(arena, op, &s->f, COMPUTED);
    if (train) {
        s->dy_head = operand(s->chunk, c->Vp, (int)c->L, f->dy_row, f->dy_col, 0);
        gpt_place_operand(arena, op, &s->dy_head, s->logits);
        s->df = arena_tensor(arena, act, s->chunk, c->C);
    }
    arena->used = start;
}

static void layout_caches(Activations *acts, Arena *arena, const GPTConfig *c, DType act)
{
    arena->purpose = PURPOSE_SCRATCH;
    for (int64_t l = 0; l < c->L; l++) {
        acts->k_cache[l] = arena_tensor(arena, act, c->T, c->NKV * c->HD);
        acts->v_cache[l] = arena_tensor(arena, act, c->T, c->NKV * c->HD);
    }
}

void gpt_layout(Activations *acts, Arena *arena, const Ops *op, const GPTConfig *c, const Recipe *recipe, int phase,
                const Shape *shape)
{
    const LinearFormats *formats = &recipe->formats[phase * c->L * PROJ_COUNT];
    DType act = recipe->act;
    int64_t N = shape->B * shape->T;
    bool train = shape->use == USE_TRAIN, keep = train && shape->recompute != RECOMPUTE_BLOCK;
    size_t start, end;

    acts->N = N;
    acts->chunk = shape->use == USE_GENERATE ? 1 : classifier_chunk(N, c->Vp);

    if (shape->use == USE_GENERATE) layout_caches(acts, arena, c, act);
    arena->purpose = PURPOSE_RESIDUAL; /* without a backward, x[l+1] may overwrite x[l] */
    for (int64_t l = 0; l <= c->L; l++) {
        acts->x[l] = train || l == 0 ? arena_tensor(arena, act, N, c->C) : acts->x[0];
        acts->stats[l] = train || l == 0 ? arena_tensor(arena, DTYPE_FP32, N, stats_cols(c)) : acts->stats[0];
    }

    arena->purpose = PURPOSE_SAVED;
    start = end = arena->used;
    for (int64_t l = 0; l < c->L; l++) {
        if (!keep) arena->used = start;
        block_operands(&acts->block[l], c, &formats[l * PROJ_COUNT], N, (int)l, shape);
        layout_saved(&acts->block[l], arena, op, c, act, N);
        if (arena->used > end) end = arena->used;
    }

    arena->purpose = PURPOSE_SCRATCH;
    arena->used = end;
    acts->y = arena_tensor(arena, act, N, c->C);
    acts->losses = arena_tensor(arena, DTYPE_FP32, N, 1);
    if (train) acts->dx = arena_tensor(arena, act, N, c->C);
    if (train) acts->dnorm = arena_tensor(arena, act, N, c->C);
    Tensor rotated = c->qk_norm ? arena_tensor(arena, act, N, config_qkv_cols(c)) : COMPUTED; /* made again backward */
    for (int64_t l = 0; l < c->L; l++) { /* blocks may differ: NVFP4 and BF16 side by side */
        if (c->qk_norm) acts->block[l].rotated = rotated;
        layout_forward(&acts->block[l], arena, op);
        if (train) layout_backward(&acts->block[l], arena, op, c, act, acts->dx);
    }
    layout_classifier(acts, arena, op, c, &recipe->head, act, train);
    arena->used = arena->peak;
}
