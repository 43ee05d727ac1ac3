/* See export.h. */
#include "export.h"

#include "file.h"
#include "hf.h"

#include <dirent.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct {
    Model *model;
    ExportFormat format;
    StWriter *writer;
} Export;

/* How fprop reads a matrix at this step, if it is to be exported in NVFP4; NULL: it is written in BF16. */
static const ViewFormat *packed_form(const Export *e, const Param *p)
{
    const Linear *linear = gpt_place(&e->model->gpt, p).linear;
    bool packed = e->format == EXPORT_NVFP4 && linear && linear->formats.w_row.format == FORMAT_NVFP4;
    return packed ? &linear->formats.w_row : NULL;
}

static int check_format(const Export *e, Error *error)
{
    const Model *model = e->model;
    int packed = 0;
    if (e->format == EXPORT_BF16) return 0;
    if (model->spec.config.arch == ARCH_GPT2)
        return error_set(error, "gpt2 in nvfp4: no reader of NVFP4 takes its transposed weights; use --format bf16");
    for (int i = 0; i < model->table.count; i++) {
        const Param *p = &model->table.param[i];
        if (!packed_form(e, p)) continue;
        if (p->cols % NVFP4_BLOCK)
            return error_set(error,
                             "%s: %" PRId64 " columns are not a multiple of 16, as readers of NVFP4 ask; use "
                             "--format bf16",
                             p->name, p->cols);
        packed++;
    }
    if (packed) return 0;
    return error_set(error,
                     "precision %s: at step %" PRIu32 " no layer's forward product reads its weight in NVFP4; use "
                     "--format bf16",
                     precision_name(model->spec.recipe.precision), model->gpt.step);
}

/* ---- weights ---- */

/* One parameter as BF16 [rows, cols] in host memory, owned by the caller: FP32 masters and vectors rounded. */
static uint16_t *bf16_values(const Model *model, int i)
{
    Tensor t = tensor_rows(model->zero.shard[i].master, 0, model->table.param[i].rows);
    char *memory = xmalloc(tensor_bytes(t));
    model->ops->copy_out(memory, t.data, tensor_bytes(t));
    for (int64_t k = 0; t.dtype == DTYPE_FP32 && k < t.rows * t.cols; k++) { /* in place: 2 k <= 4 k */
        float x;
        memcpy(&x, memory + 4 * k, sizeof x);
        uint16_t half = bf16_from_f32(x);
        memcpy(memory + 2 * k, &half, sizeof half);
    }
    return (uint16_t *)(void *)memory;
}

static float *fp32_values(const Model *model, int i)
{
    int64_t n = model->table.param[i].rows * model->table.param[i].cols;
    float *x = xmalloc((size_t)n * sizeof *x);
    uint16_t *half = bf16_values(model, i);
    for (int64_t k = 0; k < n; k++) x[k] = bf16_to_f32(half[k]);
    free(half);
    return x;
}

static int write_bf16(const Export *e, int i, const HfTensor *part, int parts, Error *error)
{
    const Param *p = &e->model->table.param[i];
    uint16_t *half = bf16_values(e->model, i);
    Tensor whole = {half, DTYPE_BF16, p->rows, p->cols, p->cols};
    uint64_t hash;
    int status = 0;
    for (int j = 0; j < parts && !status; j++) status = hf_write(e->writer, &part[j], whole, NULL, &hash, error);
    free(half);
    return status;
}

/* weight_scale_2: what code x block scale, exact in FP32, is multiplied with. In pow2 mode S_dec itself, and all is
 * exact. With amax the nearest FP32 to amax / (6 bound), which the products' alpha (nvfp4_alpha) comes to within its
 * own roundings. Parts of a fused matrix share it. A matrix of zeros has 1: a reader may divide by it. */
static int write_tensor_scale(const Export *e, int i, const ViewFormat *form, int parts, Error *error)
{
    const Param *p = &e->model->table.param[i];
    float *x = fp32_values(e->model, i);
    bool has_nan;
    float amax = nvfp4_amax(x, p->rows * p->cols, &has_nan);
    Nvfp4Scale tensor = nvfp4_scale(amax, has_nan, &form->nvfp4);
    free(x);
    if (!isfinite(tensor.stored)) return error_set(error, "%s: there are weights that are NaN or infinite", p->name);

    float scale = tensor.stored;
    if (form->nvfp4.tensor_scale == TENSOR_SCALE_AMAX) scale = f32_div(scale, 6 * nvfp4_bound(&form->nvfp4));
    if (tensor.amax == 0) scale = 1;
    int status = 0;
    for (int j = 0; j < parts && !status; j++) status = st_writer_data(e->writer, &scale, sizeof scale, error);
    return status;
}

/* The codes and block scales that fprop reads. ModelOpt has no block scale 0: such a block, whose values are zero
 * whatever its codes, is written as scale 1 with codes 0. */
static int write_packed(const Export *e, int i, const ViewFormat *form, const HfTensor *part, int parts, Error *error)
{
    const Param *p = &e->model->table.param[i];
    const GPT *gpt = &e->model->gpt;
    int64_t n = p->rows * p->cols, row_bytes = p->cols / 2, blocks = p->cols / NVFP4_BLOCK;
    Nvfp4Place place = {.seed = gpt->seed, .step = gpt->step, .layer = (uint32_t)p->layer, .role = form->role};
    float *x = fp32_values(e->model, i);
    uint8_t *codes = xmalloc((size_t)n), *scales = xmalloc((size_t)(p->rows * blocks)), one = e4m3_from_f32(1);
    nvfp4_quantize(codes, scales, x, p->rows, p->cols, &form->nvfp4, &place);
    free(x);
    for (int64_t b = 0; b < p->rows * blocks; b++) {
        if (scales[b]) continue;
        scales[b] = one;
        memset(codes + b * NVFP4_BLOCK, 0, NVFP4_BLOCK);
    }
    uint8_t *packed = xmalloc((size_t)(p->rows * row_bytes));
    nvfp4_pack(packed, codes, p->rows, p->cols);

    int status = 0;
    for (int j = 0; j < parts && !status; j++) {
        size_t rows = (size_t)part[j].rows, row0 = (size_t)part[j].row0;
        status = st_writer_data(e->writer, packed + row0 * (size_t)row_bytes, rows * (size_t)row_bytes, error);
        if (!status) status = st_writer_data(e->writer, scales + row0 * (size_t)blocks, rows * (size_t)blocks, error);
    }
    free(codes);
    free(scales);
    free(packed);
    return status;
}

/* Tensors stand by the size of their elements, so that each is aligned to it: readers map them. */
typedef enum { GROUP_TENSOR_SCALES, GROUP_BF16, GROUP_PACKED, GROUP_COUNT } Group;

static void declare(const Export *e, Group group, const HfTensor *t)
{
    char name[sizeof t->name + 16];
    snprintf(name, sizeof name, "%.95s_scale%s", t->name, group == GROUP_TENSOR_SCALES ? "_2" : "");
    if (group == GROUP_BF16) st_writer_add(e->writer, t->name, ST_BF16, t->rank, t->shape);
    if (group == GROUP_TENSOR_SCALES) st_writer_add(e->writer, name, ST_F32, 0, NULL);
    if (group != GROUP_PACKED) return;
    st_writer_add(e->writer, t->name, ST_U8, 2, (int64_t[]){t->rows, t->cols / 2});
    st_writer_add(e->writer, name, ST_F8_E4M3, 2, (int64_t[]){t->rows, t->cols / NVFP4_BLOCK});
}

/* The tensors that one parameter has in a group: declared, or written. */
static int put(const Export *e, Group group, int i, bool write, Error *error)
{
    const Param *p = &e->model->table.param[i];
    const ViewFormat *form = packed_form(e, p);
    HfTensor part[HF_PARTS];
    int parts = hf_tensors(&e->model->spec.config, p, part);
    if ((group == GROUP_BF16) != (form == NULL)) return 0;
    for (int j = 0; j < parts && !write; j++) declare(e, group, &part[j]);
    if (!write) return 0;
    if (group == GROUP_BF16) return write_bf16(e, i, part, parts, error);
    if (group == GROUP_TENSOR_SCALES) return write_tensor_scale(e, i, form, parts, error);
    return write_packed(e, i, form, part, parts, error);
}

static int write_weights(Export *e, const char *path, Error *error)
{
    int status = 0;
    e->writer = st_writer_new();
    for (int write = 0; write < 2 && !status; write++) {
        if (write) status = st_writer_begin(e->writer, path, error);
        for (int group = 0; group < GROUP_COUNT; group++)
            for (int i = 0; i < e->model->table.count && !status; i++) status = put(e, (Group)group, i, write, error);
    }
    if (!status) status = st_writer_end(e->writer, error);
    st_writer_free(e->writer);
    return status;
}

/* ---- config files ---- */

static void add_tokens(Json *json, const Model *model)
{
    json_add_int(json, "bos_token_id", model->spec.eot_token); /* a document begins with its end-of-text token */
    json_add_int(json, "eos_token_id", model->spec.eot_token);
}

static void add_gpt2(Json *json, const GPTConfig *c)
{
    json_add_int(json, "n_embd", c->C);
    json_add_int(json, "n_layer", c->L);
    json_add_int(json, "n_head", c->NH);
    json_add_int(json, "n_inner", c->F);
    json_add_int(json, "n_positions", c->T);
    json_add_string(json, "activation_function", "gelu_new");
    json_add_float(json, "layer_norm_epsilon", (double)c->norm_eps);
    json_add_int(json, "resid_pdrop", 0);
    json_add_int(json, "embd_pdrop", 0);
    json_add_int(json, "attn_pdrop", 0);
}

static void add_llama(Json *json, const GPTConfig *c)
{
    json_add_int(json, "hidden_size", c->C);
    json_add_int(json, "intermediate_size", c->F);
    json_add_int(json, "num_hidden_layers", c->L);
    json_add_int(json, "num_attention_heads", c->NH);
    json_add_int(json, "num_key_value_heads", c->NKV);
    json_add_int(json, "head_dim", c->HD);
    json_add_int(json, "max_position_embeddings", c->T);
    json_add_string(json, "hidden_act", "silu");
    json_add_float(json, "rms_norm_eps", (double)c->norm_eps);
    json_add_double(json, "rope_theta", c->rope_theta);
    json_add_bool(json, "attention_bias", false);
    if (c->arch == ARCH_LLAMA) json_add_bool(json, "mlp_bias", false);
    if (c->arch == ARCH_QWEN3) json_add_bool(json, "use_sliding_window", false);
    if (c->rope_factor == 0) return;
    Json *scaling = json_add_object(json, "rope_scaling");
    json_add_string(scaling, "rope_type", "llama3");
    json_add_double(scaling, "factor", c->rope_factor);
    json_add_double(scaling, "low_freq_factor", c->rope_low_freq_factor);
    json_add_double(scaling, "high_freq_factor", c->rope_high_freq_factor);
    json_add_int(scaling, "original_max_position_embeddings", c->rope_original_context);
}

static void add_producer(Json *json)
{
    Json *producer = json_add_object(json, "producer");
    json_add_string(producer, "name", "llm4.c");
    json_add_string(producer, "version", "1");
}

/* The linear layers that are not quantized, by the names of their modules. */
static void add_ignored(Json *names, const Export *e)
{
    json_append_string(names, "lm_head");
    for (int i = 0; i < e->model->table.count; i++) {
        const Param *p = &e->model->table.param[i];
        HfTensor part[HF_PARTS];
        if (p->bucket >= e->model->spec.config.L || !p->decay || packed_form(e, p)) continue;
        int parts = hf_tensors(&e->model->spec.config, p, part);
        for (int j = 0; j < parts; j++) {
            *strrchr(part[j].name, '.') = 0; /* ".weight" */
            json_append_string(names, part[j].name);
        }
    }
}

static const char ALGORITHM[] = "W4A16_NVFP4"; /* 4-bit weights, activations as they come */

static void add_quantization(Json *json, const Export *e)
{
    Json *quantization = json_add_object(json, "quantization_config");
    json_add_string(quantization, "quant_method", "modelopt");
    json_add_string(quantization, "quant_algo", ALGORITHM);
    Json *group = json_add_object(json_add_object(quantization, "config_groups"), "group_0");
    Json *weights = json_add_object(group, "weights");
    json_add_bool(weights, "dynamic", false);
    json_add_int(weights, "num_bits", 4);
    json_add_string(weights, "type", "float");
    json_add_int(weights, "group_size", NVFP4_BLOCK);
    json_append_string(json_add_array(group, "targets"), "Linear");
    add_ignored(json_add_array(quantization, "ignore"), e);
    add_producer(quantization);
}

static Json *model_config(const Export *e)
{
    static const char *const CLASSES[] = {"GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"};
    const GPTConfig *c = &e->model->spec.config;
    Json *json = json_new_object();
    json_append_string(json_add_array(json, "architectures"), CLASSES[c->arch]);
    json_add_string(json, "model_type", arch_name(c->arch));
    json_add_string(json, "torch_dtype", "bfloat16"); /* older readers, and */
    json_add_string(json, "dtype", "bfloat16");       /* transformers 5 */
    json_add_int(json, "vocab_size", c->V);
    json_add_bool(json, "tie_word_embeddings", c->tied);
    json_add_float(json, "initializer_range", (double)c->init_std);
    add_tokens(json, e->model);
    if (c->arch == ARCH_GPT2)
        add_gpt2(json, c);
    else
        add_llama(json, c);
    if (e->format == EXPORT_NVFP4) add_quantization(json, e);
    return json;
}

static Json *generation_config(const Export *e)
{
    Json *json = json_new_object();
    add_tokens(json, e->model);
    return json;
}

/* vLLM fails where one of these members of "quantization" is missing. */
static Json *quantization_file(const Export *e)
{
    Json *json = json_new_object();
    add_producer(json);
    Json *quantization = json_add_object(json, "quantization");
    json_add_string(quantization, "quant_algo", ALGORITHM);
    json_add_null(quantization, "kv_cache_quant_algo");
    json_add_int(quantization, "group_size", NVFP4_BLOCK);
    add_ignored(json_add_array(quantization, "exclude_modules"), e);
    return json;
}

/* Frees json. */
static int write_json(const char *folder, const char *name, Json *json, Error *error)
{
    char *path = xformat("%s/%s", folder, name), *text = json_print(json, true), *line = xformat("%s\n", text);
    int status = file_write_text(path, line, error);
    json_free(json);
    free(path);
    free(text);
    free(line);
    return status;
}

/* ---- the folder ---- */

static int check_output(const char *path, Error *error)
{
    DIR *dir = opendir(path);
    int entries = 0;
    if (!dir && errno == ENOENT) return 0;
    if (!dir) return error_set(error, "%s: %s; choose another --output", path, strerror(errno));
    while (readdir(dir)) entries++;
    closedir(dir);
    return entries <= 2 ? 0 : error_set(error, "%s is not empty; choose another --output", path); /* . and .. */
}

static int write_folder(Export *e, const char *folder, Error *error)
{
    char *weights = xformat("%s/model.safetensors", folder);
    int status = write_weights(e, weights, error);
    if (!status) status = write_json(folder, "config.json", model_config(e), error);
    if (!status) status = write_json(folder, "generation_config.json", generation_config(e), error);
    if (!status && e->format == EXPORT_NVFP4)
        status = write_json(folder, "hf_quant_config.json", quantization_file(e), error);
    if (!status) status = file_sync_folder(folder, error);
    free(weights);
    return status;
}

int export_model(Model *model, const char *dir, ExportFormat format, Error *error)
{
    Export e = {.model = model, .format = format};
    size_t length = strlen(dir);
    while (length > 1 && dir[length - 1] == '/') length--;
    char *path = xformat("%.*s", (int)length, dir), *fresh = xformat("%s.tmp", path);
    int status = check_format(&e, error);
    if (!status) status = check_output(path, error);
    if (!status && mkdir(fresh, 0777))
        status = error_set(error, "%s: cannot create the folder: %s%s", fresh, strerror(errno),
                           errno == EEXIST ? "; delete it if an export was stopped there" : "; check --output");
    else if (!status) {
        status = write_folder(&e, fresh, error);
        if (!status && rename(fresh, path)) /* onto an empty folder too */
            status = error_set(error, "%s: cannot rename to %s: %s", fresh, path, strerror(errno));
        if (status) file_delete_folder(fresh, NULL);
    }
    free(path);
    free(fresh);
    return status;
}
