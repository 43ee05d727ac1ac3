/* See params.h. */
#include "params.h"

#include "mathfn.h"
#include "philox.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static const char *const KIND_NAME[PARAM_KIND_COUNT] = {
    "qkv",       "o",          "up",         "down",       "qkv_bias",   "o_bias", "up_bias",
    "down_bias", "norm1_gain", "norm1_bias", "norm2_gain", "norm2_bias", "q_gain", "k_gain",
    "wte",       "wpe",        "lm_head",    "final_gain", "final_bias"};

static void add(ParamTable *table, int bucket, int layer, ParamKind kind, int64_t rows, int64_t cols, DType master,
                Init init, float std)
{
    Param *p = &table->param[table->count++];
    bool vocabulary = kind == PARAM_WTE || kind == PARAM_LM_HEAD;
    *p = (Param){
        .kind = kind, .bucket = bucket, .layer = layer, .rows = rows, .cols = cols, .init = init, .init_std = std};
    if (layer < table->layers)
        snprintf(p->name, sizeof p->name, "block.%d.%s", layer, KIND_NAME[kind]);
    else
        snprintf(p->name, sizeof p->name, "%s", KIND_NAME[kind]);
    p->rows_padded = vocabulary ? round_up(rows, VOCAB_MULTIPLE) : rows;
    p->decay = init == INIT_NORMAL; /* matrices and nothing else are drawn */
    p->master = p->decay ? master : DTYPE_FP32;
    p->offset = table->bucket_elements[bucket];
    table->bucket_elements[bucket] += (size_t)round_up(p->rows_padded * cols, 64);
}

static void add_vector(ParamTable *table, int bucket, int layer, ParamKind kind, int64_t cols, Init init)
{
    add(table, bucket, layer, kind, 1, cols, DTYPE_FP32, init, 0);
}

static void add_block(ParamTable *t, const GPTConfig *c, DType master, int l)
{
    float deep = (float)((double)c->init_std / sqrt(2.0 * (double)c->L)); /* GPT-2: residual projections scaled down */
    add(t, l, l, PARAM_QKV, config_qkv_cols(c), c->C, master, INIT_NORMAL, c->init_std);
    add(t, l, l, PARAM_O, c->C, c->NH * c->HD, master, INIT_NORMAL, deep);
    add(t, l, l, PARAM_UP, config_up_cols(c), c->C, master, INIT_NORMAL, c->init_std);
    add(t, l, l, PARAM_DOWN, c->C, c->F, master, INIT_NORMAL, deep);
    if (c->bias) {
        add_vector(t, l, l, PARAM_QKV_BIAS, config_qkv_cols(c), INIT_ZERO);
        add_vector(t, l, l, PARAM_O_BIAS, c->C, INIT_ZERO);
        add_vector(t, l, l, PARAM_UP_BIAS, config_up_cols(c), INIT_ZERO);
        add_vector(t, l, l, PARAM_DOWN_BIAS, c->C, INIT_ZERO);
    }
    add_vector(t, l, l, PARAM_NORM1_GAIN, c->C, INIT_ONE);
    if (c->norm == NORM_LAYERNORM) add_vector(t, l, l, PARAM_NORM1_BIAS, c->C, INIT_ZERO);
    add_vector(t, l, l, PARAM_NORM2_GAIN, c->C, INIT_ONE);
    if (c->norm == NORM_LAYERNORM) add_vector(t, l, l, PARAM_NORM2_BIAS, c->C, INIT_ZERO);
    if (c->qk_norm) {
        add_vector(t, l, l, PARAM_Q_GAIN, c->HD, INIT_ONE);
        add_vector(t, l, l, PARAM_K_GAIN, c->HD, INIT_ONE);
    }
}

ParamTable params_table(const GPTConfig *c, DType master)
{
    int embedding = (int)c->L, head = embedding + (c->tied ? 0 : 1), layer = (int)c->L;
    ParamTable t = {.buckets = head + 1, .layers = (int)c->L};
    t.param = xcalloc((size_t)c->L * 14 + 5, sizeof *t.param);
    t.bucket_elements = xcalloc((size_t)t.buckets, sizeof *t.bucket_elements);

    for (int l = 0; l < (int)c->L; l++) add_block(&t, c, master, l);
    add(&t, embedding, layer, PARAM_WTE, c->V, c->C, master, INIT_NORMAL, c->embedding_init_std);
    if (!c->rope) add(&t, embedding, layer, PARAM_WPE, c->T, c->C, master, INIT_NORMAL, c->embedding_init_std);
    if (!c->tied) add(&t, head, layer, PARAM_LM_HEAD, c->V, c->C, master, INIT_NORMAL, c->init_std);
    add_vector(&t, head, layer, PARAM_FINAL_GAIN, c->C, INIT_ONE);
    if (c->norm == NORM_LAYERNORM) add_vector(&t, head, layer, PARAM_FINAL_BIAS, c->C, INIT_ZERO);
    return t;
}

void params_free(ParamTable *table)
{
    free(table->param);
    free(table->bucket_elements);
    *table = (ParamTable){0};
}

/* Columns 16 block .. 16 block + 15 of one row: word w of call i is element 4 i + w. */
static void normal_block(const Param *p, uint64_t seed, int64_t row, int64_t block, float *out)
{
    int64_t columns = min_i64(16, p->cols - 16 * block);
    for (int64_t i = 0; 4 * i < columns; i++) {
        Philox draw = philox_draw(seed, (uint32_t)row, (uint32_t)block, 0, (uint32_t)p->layer,
                                  ROLE_INIT + (uint32_t)p->kind, (uint32_t)i);
        for (int64_t w = 0; w < 4 && 4 * i + w < columns; w++)
            out[4 * i + w] = (float)(f64_inverse_normal(((double)draw.word[w] + 0.5) * 0x1p-32) * (double)p->init_std);
    }
}

void params_initial(const Param *p, uint64_t seed, int64_t row0, int64_t rows, float *out)
{
    if (p->init != INIT_NORMAL) {
        for (int64_t i = 0; i < rows * p->cols; i++) out[i] = p->init == INIT_ONE ? 1.0f : 0.0f;
        return;
    }
#pragma omp parallel for schedule(static)
    for (int64_t r = 0; r < rows; r++)
        for (int64_t block = 0; block < ceil_div(p->cols, 16); block++)
            normal_block(p, seed, row0 + r, block, out + r * p->cols + 16 * block);
}
