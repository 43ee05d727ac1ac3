/* Checkpoints in process: what stands on the disk under Hugging Face's names, that it comes back bit for bit, and that
 * nothing broken is ever taken for whole. (Kills, full disks and resumed runs: test_kill.sh, test_damage.sh.)
 *
 * Every byte of the four files counts: headers are hashed with all that stands in them, so a change of the padding
 * spaces, which no reader would see, is found like any other. Over 600 lines because the names and shapes of all
 * architectures are listed here literally.
 */
#include "checkpoint.h"

#include <dlfcn.h>

#include "cpu/backend.h"
#include "hf.h"
#include "numerics.h"
#include "test.h"
#include "test_files.h"

static const Ops *ops;

static const char *const FILES[] = {"model.safetensors", "optimizer.safetensors", "config.json", "state.json"};
static const char CONFIG[] = "{\n\t\"options\": {\"arch\": \"llama\"},\n\t\"isa\": \"amx\"\n}\n";

static const RunState STATE = {.step = 7,
                               .seed = 3,
                               .data_hash = 0x0123456789abcdef,
                               .last_batch_hash = 0xfedcba9876543210,
                               .file_list_hash = 5,
                               .state_hash = UINT64_MAX};

static ModelSpec spec_of(Arch arch, Precision precision, Master master)
{
    bool gpt2 = arch == ARCH_GPT2;
    ModelSpec spec = {
        .config = {.arch = arch, .L = 2, .C = 32, .NH = 4, .F = 48, .V = 257, .T = 16, .tied = true, .init_std = 0.02f},
        .recipe = recipe_defaults(precision, master),
        .train = true,
        .B = 1,
        .micro_steps = 1};
    Error error;
    if (!gpt2) spec.config.NKV = 2;
    if (arch == ARCH_QWEN3) spec.config.HD = 16;
    if (!gpt2) spec.config.rope_theta = 10000;
    if (config_finish(&spec.config, &error)) die("%s", error.text);
    return spec;
}

static void open_model(Model *model, const ModelSpec *spec)
{
    Error error;
    if (model_open(model, spec, ops, &error)) die("%s", error.text);
}

/* Any bits whatever: NaN, infinities, denormals and signed zeros must come back as they were. */
static void fill(Tensor t, int64_t rows, uint32_t stream)
{
    unsigned char *bytes = t.data;
    for (int64_t i = 0; i < rows * t.cols * (int64_t)dtype_bytes(t.dtype); i += 16) {
        Philox draw = philox4x32(10, (uint32_t)i, stream, 1, 2, 3, 4);
        int64_t left = rows * t.cols * (int64_t)dtype_bytes(t.dtype) - i;
        memcpy(bytes + i, draw.word, (size_t)min_i64(left, 16));
    }
}

static void fill_model(const Model *model, uint32_t stream)
{
    for (int i = 0; i < model->table.count; i++) {
        const Shard *s = &model->zero.shard[i];
        int64_t rows = model->table.param[i].rows;
        fill(s->master, rows, stream + 3 * (uint32_t)i);
        fill(s->m, rows, stream + 3 * (uint32_t)i + 1);
        fill(s->v, rows, stream + 3 * (uint32_t)i + 2);
    }
}

static void write_checkpoint(const char *run, const Model *model, int64_t step, int64_t keep)
{
    RunState state = STATE;
    Error error = {""};
    state.step = step;
    CHECK(checkpoint_write(run, model, &state, CONFIG, keep, &error) == 0, "%s", error.text);
}

static bool verifies(const char *dir, Error *error)
{
    RunState state;
    Json *config;
    if (checkpoint_verify(dir, true, &state, &config, error)) return false;
    json_free(config);
    return true;
}

/* ---- names, shapes and layouts on the disk ---- */

typedef struct {
    const char *name, *shape;
    bool vector; /* F32 whatever the masters */
} OnDisk;

static const OnDisk GPT2[] = {
    {"h.0.attn.c_attn.weight", "[32,96]", false},
    {"h.0.attn.c_proj.weight", "[32,32]", false},
    {"h.0.mlp.c_fc.weight", "[32,48]", false},
    {"h.0.mlp.c_proj.weight", "[48,32]", false},
    {"h.0.attn.c_attn.bias", "[96]", true},
    {"h.0.attn.c_proj.bias", "[32]", true},
    {"h.0.mlp.c_fc.bias", "[48]", true},
    {"h.0.mlp.c_proj.bias", "[32]", true},
    {"h.0.ln_1.weight", "[32]", true},
    {"h.0.ln_1.bias", "[32]", true},
    {"h.0.ln_2.weight", "[32]", true},
    {"h.0.ln_2.bias", "[32]", true},
    {"h.1.attn.c_attn.weight", "[32,96]", false},
    {"h.1.attn.c_proj.weight", "[32,32]", false},
    {"h.1.mlp.c_fc.weight", "[32,48]", false},
    {"h.1.mlp.c_proj.weight", "[48,32]", false},
    {"h.1.attn.c_attn.bias", "[96]", true},
    {"h.1.attn.c_proj.bias", "[32]", true},
    {"h.1.mlp.c_fc.bias", "[48]", true},
    {"h.1.mlp.c_proj.bias", "[32]", true},
    {"h.1.ln_1.weight", "[32]", true},
    {"h.1.ln_1.bias", "[32]", true},
    {"h.1.ln_2.weight", "[32]", true},
    {"h.1.ln_2.bias", "[32]", true},
    {"wte.weight", "[257,32]", false},
    {"wpe.weight", "[16,32]", false},
    {"ln_f.weight", "[32]", true},
    {"ln_f.bias", "[32]", true},
};

static const OnDisk LLAMA_UNTIED[] = {
    {"model.layers.0.self_attn.q_proj.weight", "[32,32]", false},
    {"model.layers.0.self_attn.k_proj.weight", "[16,32]", false},
    {"model.layers.0.self_attn.v_proj.weight", "[16,32]", false},
    {"model.layers.0.self_attn.o_proj.weight", "[32,32]", false},
    {"model.layers.0.mlp.gate_proj.weight", "[48,32]", false},
    {"model.layers.0.mlp.up_proj.weight", "[48,32]", false},
    {"model.layers.0.mlp.down_proj.weight", "[32,48]", false},
    {"model.layers.0.input_layernorm.weight", "[32]", true},
    {"model.layers.0.post_attention_layernorm.weight", "[32]", true},
    {"model.layers.1.self_attn.q_proj.weight", "[32,32]", false},
    {"model.layers.1.self_attn.k_proj.weight", "[16,32]", false},
    {"model.layers.1.self_attn.v_proj.weight", "[16,32]", false},
    {"model.layers.1.self_attn.o_proj.weight", "[32,32]", false},
    {"model.layers.1.mlp.gate_proj.weight", "[48,32]", false},
    {"model.layers.1.mlp.up_proj.weight", "[48,32]", false},
    {"model.layers.1.mlp.down_proj.weight", "[32,48]", false},
    {"model.layers.1.input_layernorm.weight", "[32]", true},
    {"model.layers.1.post_attention_layernorm.weight", "[32]", true},
    {"model.embed_tokens.weight", "[257,32]", false},
    {"lm_head.weight", "[257,32]", false},
    {"model.norm.weight", "[32]", true},
};

static const OnDisk QWEN3[] = {
    {"model.layers.0.self_attn.q_proj.weight", "[64,32]", false},
    {"model.layers.0.self_attn.k_proj.weight", "[32,32]", false},
    {"model.layers.0.self_attn.v_proj.weight", "[32,32]", false},
    {"model.layers.0.self_attn.o_proj.weight", "[32,64]", false},
    {"model.layers.0.mlp.gate_proj.weight", "[48,32]", false},
    {"model.layers.0.mlp.up_proj.weight", "[48,32]", false},
    {"model.layers.0.mlp.down_proj.weight", "[32,48]", false},
    {"model.layers.0.input_layernorm.weight", "[32]", true},
    {"model.layers.0.post_attention_layernorm.weight", "[32]", true},
    {"model.layers.0.self_attn.q_norm.weight", "[16]", true},
    {"model.layers.0.self_attn.k_norm.weight", "[16]", true},
    {"model.layers.1.self_attn.q_proj.weight", "[64,32]", false},
    {"model.layers.1.self_attn.k_proj.weight", "[32,32]", false},
    {"model.layers.1.self_attn.v_proj.weight", "[32,32]", false},
    {"model.layers.1.self_attn.o_proj.weight", "[32,64]", false},
    {"model.layers.1.mlp.gate_proj.weight", "[48,32]", false},
    {"model.layers.1.mlp.up_proj.weight", "[48,32]", false},
    {"model.layers.1.mlp.down_proj.weight", "[32,48]", false},
    {"model.layers.1.input_layernorm.weight", "[32]", true},
    {"model.layers.1.post_attention_layernorm.weight", "[32]", true},
    {"model.layers.1.self_attn.q_norm.weight", "[16]", true},
    {"model.layers.1.self_attn.k_norm.weight", "[16]", true},
    {"model.embed_tokens.weight", "[257,32]", false},
    {"model.norm.weight", "[32]", true},
};

static void shape_text(const StTensor *t, char text[64])
{
    if (t->rank == 1)
        snprintf(text, 64, "[%lld]", (long long)t->shape[0]);
    else
        snprintf(text, 64, "[%lld,%lld]", (long long)t->shape[0], (long long)t->shape[1]);
}

/* One file: exactly these tensors in this order, each name with `prefix` (several: the list repeated). */
static void check_file(const char *path, const OnDisk *list, int count, const char *matrix_dtype)
{
    StFile file;
    Error error;
    char shape[64];
    if (!CHECK(st_open(&file, path, &error) == 0, "%s", error.text)) return;
    CHECK(file.count == count, "%s has %lld tensors, expected %d", path, (long long)file.count, count);
    CHECK(st_metadata(&file, "format") && !strcmp(st_metadata(&file, "format"), "pt"), "no format pt");
    for (int i = 0; i < count && i < file.count; i++) {
        const StTensor *t = &file.tensor[i];
        const OnDisk *expected = &list[i];
        const char *dtype = expected->vector ? "F32" : matrix_dtype;
        shape_text(t, shape);
        CHECK(!strcmp(t->name, expected->name), "tensor %d is %s, expected %s", i, t->name, expected->name);
        CHECK(!strcmp(shape, expected->shape), "%s is %s, expected %s", t->name, shape, expected->shape);
        CHECK(!strcmp(st_dtype_name(t->dtype), dtype), "%s is %s, expected %s", t->name, st_dtype_name(t->dtype),
              dtype);
    }
    st_close(&file);
}

/* m of every parameter under its own name and shape, then v. */
static void check_moments(const char *path, const ParamTable *table)
{
    StFile file;
    Error error;
    char name[128];
    if (!CHECK(st_open(&file, path, &error) == 0, "%s", error.text)) return;
    CHECK(file.count == 2 * table->count, "%s has %lld tensors", path, (long long)file.count);
    for (int i = 0; i < 2 * table->count && i < file.count; i++) {
        const StTensor *t = &file.tensor[i];
        const Param *p = &table->param[i % table->count];
        snprintf(name, sizeof name, "%s.%s", i < table->count ? "m" : "v", p->name);
        CHECK(!strcmp(t->name, name) && t->dtype == ST_F32 && t->rank == 2 && t->shape[0] == p->rows &&
                  t->shape[1] == p->cols,
              "tensor %d is %s, expected %s", i, t->name, name);
    }
    st_close(&file);
}

/* Element (row, column) of a parameter's FP32 master against element `at` of the tensor on the disk. */
static void check_element(const Model *model, const StFile *file, const char *param, int64_t row, int64_t column,
                          const char *name, int64_t at)
{
    uint32_t ours = 0, theirs = 1;
    const StTensor *t = st_find(file, name);
    for (int i = 0; i < model->table.count; i++) {
        const Tensor *master = &model->zero.shard[i].master;
        if (strcmp(model->table.param[i].name, param)) continue;
        memcpy(&ours, (const char *)master->data + 4 * (row * master->ld + column), 4);
    }
    if (t) memcpy(&theirs, (const char *)t->data + 4 * at, 4);
    CHECK(ours == theirs, "%s (%lld, %lld) is not element %lld of %s", param, (long long)row, (long long)column,
          (long long)at, name);
}

static void check_layouts(const Model *model, const char *path, Arch arch)
{
    StFile file;
    Error error;
    if (!CHECK(st_open(&file, path, &error) == 0, "%s", error.text)) return;
    if (arch == ARCH_GPT2) { /* Conv1D stores [in, out] */
        check_element(model, &file, "block.1.qkv", 70, 5, "h.1.attn.c_attn.weight", 5 * 96 + 70);
        check_element(model, &file, "block.1.o", 3, 30, "h.1.attn.c_proj.weight", 30 * 32 + 3);
        check_element(model, &file, "block.0.up", 47, 31, "h.0.mlp.c_fc.weight", 31 * 48 + 47);
        check_element(model, &file, "block.0.down", 31, 46, "h.0.mlp.c_proj.weight", 46 * 32 + 31);
        check_element(model, &file, "block.0.qkv_bias", 0, 95, "h.0.attn.c_attn.bias", 95);
        check_element(model, &file, "wte", 256, 1, "wte.weight", 256 * 32 + 1);
        check_element(model, &file, "wpe", 15, 2, "wpe.weight", 15 * 32 + 2);
    } else { /* qkv is q, then k, then v; up is gate, then up */
        check_element(model, &file, "block.1.qkv", 31, 4, "model.layers.1.self_attn.q_proj.weight", 31 * 32 + 4);
        check_element(model, &file, "block.1.qkv", 32, 0, "model.layers.1.self_attn.k_proj.weight", 0);
        check_element(model, &file, "block.1.qkv", 63, 31, "model.layers.1.self_attn.v_proj.weight", 15 * 32 + 31);
        check_element(model, &file, "block.0.up", 47, 31, "model.layers.0.mlp.gate_proj.weight", 47 * 32 + 31);
        check_element(model, &file, "block.0.up", 48, 1, "model.layers.0.mlp.up_proj.weight", 1);
        check_element(model, &file, "block.0.down", 31, 46, "model.layers.0.mlp.down_proj.weight", 31 * 48 + 46);
        check_element(model, &file, "lm_head", 256, 31, "lm_head.weight", 256 * 32 + 31);
    }
    st_close(&file);
}

static void test_names(const char *folder)
{
    static const struct {
        const char *name;
        Arch arch;
        bool tied;
        const OnDisk *list;
        int count;
    } CASES[] = {{"gpt2", ARCH_GPT2, true, GPT2, sizeof GPT2 / sizeof *GPT2},
                 {"llama, untied", ARCH_LLAMA, false, LLAMA_UNTIED, sizeof LLAMA_UNTIED / sizeof *LLAMA_UNTIED},
                 {"qwen3", ARCH_QWEN3, true, QWEN3, sizeof QWEN3 / sizeof *QWEN3}};
    for (int i = 0; i < 6; i++) {
        bool fp32 = i >= 3;
        char *name = xformat("names on disk: %s, %s masters", CASES[i % 3].name, fp32 ? "fp32" : "bf16");
        test_case(name);
        free(name);
        ModelSpec spec = spec_of(CASES[i % 3].arch, PRECISION_BF16, fp32 ? MASTER_FP32 : MASTER_BF16);
        spec.config.tied = CASES[i % 3].tied;
        Model model;
        open_model(&model, &spec);
        fill_model(&model, 100);
        write_checkpoint(folder, &model, 1, 1);

        char *weights = xformat("%s/checkpoints/step_00000001/%s", folder, FILES[0]);
        char *moments = xformat("%s/checkpoints/step_00000001/%s", folder, FILES[1]);
        check_file(weights, CASES[i % 3].list, CASES[i % 3].count, fp32 ? "F32" : "BF16");
        check_moments(moments, &model.table);
        if (fp32 && CASES[i % 3].arch != ARCH_QWEN3) check_layouts(&model, weights, CASES[i % 3].arch);
        free(weights);
        free(moments);
        model_close(&model);
    }
}

/* ---- there and back ---- */

static void check_equal(const char *what, const Param *p, Tensor a, Tensor b)
{
    size_t bytes = (size_t)(p->rows * p->cols) * dtype_bytes(a.dtype);
    const unsigned char *padding = (const unsigned char *)b.data + bytes;
    CHECK(memcmp(a.data, b.data, bytes) == 0, "%s of %s came back otherwise", what, p->name);
    for (size_t i = 0; i < (size_t)((p->rows_padded - p->rows) * p->cols) * dtype_bytes(a.dtype); i++)
        if (!CHECK(padding[i] == 0, "padding of %s, %s was written", p->name, what)) break;
}

static void test_round_trip(const char *folder)
{
    static const struct {
        Precision precision;
        Master master;
        const char *name;
    } FORMATS[] = {{PRECISION_FP32, MASTER_DEFAULT, "fp32"},
                   {PRECISION_BF16, MASTER_DEFAULT, "bf16"},
                   {PRECISION_BF16, MASTER_FP32, "bf16, fp32 masters"}};
    for (int i = 0; i < 12; i++) {
        Arch arch = i / 3 == 3 ? ARCH_LLAMA : (Arch)(i / 3);
        char *name = xformat("round trip: %s%s, %s", arch_name(arch), i / 3 == 3 ? " untied" : "", FORMATS[i % 3].name);
        test_case(name);
        free(name);
        ModelSpec spec = spec_of(arch, FORMATS[i % 3].precision, FORMATS[i % 3].master);
        spec.config.tied = i / 3 != 3;
        Model a, b;
        RunState state;
        Error error;
        Json *config = NULL;
        open_model(&a, &spec);
        open_model(&b, &spec);
        fill_model(&a, (uint32_t)i);
        write_checkpoint(folder, &a, 7, 1);

        char *dir = xformat("%s/checkpoints/step_00000007", folder);
        if (CHECK(checkpoint_verify(dir, true, &state, &config, &error) == 0, "%s", error.text)) {
            CHECK(state.step == STATE.step && state.seed == STATE.seed && state.data_hash == STATE.data_hash &&
                      state.last_batch_hash == STATE.last_batch_hash && state.file_list_hash == STATE.file_list_hash &&
                      state.state_hash == STATE.state_hash,
                  "the run's state came back otherwise");
            CHECK(json_string(json_get(config, "isa")) && !strcmp(json_string(json_get(config, "isa")), "amx"),
                  "config came back otherwise");
        }
        CHECK(checkpoint_load(dir, &b, true, &error) == 0, "%s", error.text);
        for (int p = 0; p < a.table.count; p++) {
            check_equal("master", &a.table.param[p], a.zero.shard[p].master, b.zero.shard[p].master);
            check_equal("m", &a.table.param[p], a.zero.shard[p].m, b.zero.shard[p].m);
            check_equal("v", &a.table.param[p], a.zero.shard[p].v, b.zero.shard[p].v);
        }
        CHECK(zero_state_hash(&a.zero) == zero_state_hash(&b.zero), "another state_hash");
        json_free(config);
        free(dir);
        model_close(&a);
        model_close(&b);
    }
}

/* ---- other models ---- */

/* Loading `from`'s checkpoint into `into`: 0, or -1 with a message. */
static int load_into(const char *folder, const ModelSpec *from, const ModelSpec *into, Error *error)
{
    Model a, b;
    char *dir = xformat("%s/checkpoints/step_00000009", folder);
    open_model(&a, from);
    open_model(&b, into);
    fill_model(&a, 50);
    write_checkpoint(folder, &a, 9, 1);
    int status = checkpoint_load(dir, &b, true, error);
    model_close(&a);
    model_close(&b);
    free(dir);
    return status;
}

static void check_refused(const char *folder, const ModelSpec *from, const ModelSpec *into, const char *what,
                          const char *text)
{
    Error error = {""};
    CHECK(load_into(folder, from, into, &error) == -1, "%s was taken", what);
    CHECK(strstr(error.text, text) != NULL, "%s: \"%s\" does not say \"%s\"", what, error.text, text);
}

static ModelSpec finished(ModelSpec spec)
{
    Error error;
    if (config_finish(&spec.config, &error)) die("%s", error.text);
    return spec;
}

static void test_other_models(const char *folder)
{
    test_case("a checkpoint of another model is refused");
    ModelSpec llama = spec_of(ARCH_LLAMA, PRECISION_BF16, MASTER_FP32), other = llama;
    ModelSpec gpt2 = spec_of(ARCH_GPT2, PRECISION_BF16, MASTER_FP32);
    ModelSpec qwen3 = spec_of(ARCH_QWEN3, PRECISION_BF16, MASTER_FP32);
    other.config.L = 1;
    check_refused(folder, &llama, &other, "a deeper one", "tensors");
    check_refused(folder, &other, &llama, "a shallower one", "has no tensor model.layers.1");
    other = llama;
    other.config.C = 64;
    other.config.HD = 0;
    other = finished(other);
    check_refused(folder, &llama, &other, "a narrower one", "shape");
    other = llama;
    other.config.V = 300;
    other = finished(other);
    check_refused(folder, &llama, &other, "another vocabulary", "shape");
    other = llama;
    other.config.tied = false;
    check_refused(folder, &llama, &other, "a tied one", "has no tensor lm_head.weight");
    check_refused(folder, &other, &llama, "an untied one", "tensors");
    check_refused(folder, &llama, &gpt2, "llama for gpt2", "has no tensor h.0.attn.c_attn.weight");
    check_refused(folder, &gpt2, &llama, "gpt2 for llama", "has no tensor model.layers.0.self_attn.q_proj.weight");
    llama.config.HD = 16; /* now all that llama has is in qwen3, with the same shapes */
    check_refused(folder, &qwen3, &llama, "qwen3 for llama", "tensors");
    check_refused(folder, &llama, &qwen3, "llama for qwen3", "has no tensor model.layers.0.self_attn.q_norm.weight");
    other = llama;
    other.recipe.master = MASTER_BF16;
    check_refused(folder, &llama, &other, "FP32 into BF16 masters", "dtype F32 does not fit bf16 weights");
}

static void test_widening(const char *folder)
{
    static const Arch ARCHS[] = {ARCH_GPT2, ARCH_QWEN3};
    for (int i = 0; i < 2; i++) {
        test_case(i ? "BF16 on disk widens into FP32 masters: qwen3" : "BF16 on disk widens into FP32 masters: gpt2");
        ModelSpec narrow = spec_of(ARCHS[i], PRECISION_BF16, MASTER_BF16), wide = narrow;
        Model a, b;
        Error error;
        char *dir = xformat("%s/checkpoints/step_00000011", folder);
        wide.recipe.master = MASTER_FP32;
        open_model(&a, &narrow);
        open_model(&b, &wide);
        fill_model(&a, 60);
        write_checkpoint(folder, &a, 11, 1);
        CHECK(checkpoint_load(dir, &b, true, &error) == 0, "%s", error.text);
        for (int p = 0; p < a.table.count; p++) {
            const Param *param = &a.table.param[p];
            if (!param->decay) {
                check_equal("vector", param, a.zero.shard[p].master, b.zero.shard[p].master);
                continue;
            }
            const uint16_t *from = a.zero.shard[p].master.data;
            for (int64_t e = 0; e < param->rows * param->cols; e++) {
                float expected = bf16_to_f32(from[e]);
                if (!CHECK(!memcmp((float *)b.zero.shard[p].master.data + e, &expected, 4), "%s, element %lld",
                           param->name, (long long)e))
                    break;
            }
        }
        free(dir);
        model_close(&a);
        model_close(&b);
    }
}

/* ---- broken files ---- */

typedef struct {
    char *path[4], *data[4]; /* the files as they were written */
    size_t bytes[4];
} Original;

static Original original_read(const char *dir)
{
    Original o;
    for (int f = 0; f < 4; f++) {
        o.path[f] = xformat("%s/%s", dir, FILES[f]);
        o.data[f] = test_read_file(o.path[f], &o.bytes[f]);
    }
    return o;
}

static void original_free(Original *o)
{
    for (int f = 0; f < 4; f++) {
        free(o->path[f]);
        free(o->data[f]);
    }
}

/* In place: emptying and filling a file anew makes some file systems wait for the disk each time. */
static void overwrite(const char *path, const char *data, size_t bytes)
{
    FILE *stream = fopen(path, "r+b");
    if (!stream || fwrite(data, 1, bytes, stream) != bytes || fflush(stream) ||
        ftruncate(fileno(stream), (off_t)bytes) || fclose(stream))
        die("cannot write %s", path);
}

/* The broken file is found, and loading it all the same does not crash. */
static void check_broken(const Original *o, const char *dir, int f, const char *data, size_t bytes, const char *what,
                         int64_t i, Model *model)
{
    Error error = {""}, unused;
    overwrite(o->path[f], data, bytes);
    CHECK(!verifies(dir, &error), "%s: %s %lld goes unseen", FILES[f], what, (long long)i);
    CHECK(strstr(error.text, FILES[f]) != NULL, "%s: %s %lld: \"%s\" does not name the file", FILES[f], what,
          (long long)i, error.text);
    if (f < 2) checkpoint_load(dir, model, true, &unused);
    overwrite(o->path[f], o->data[f], o->bytes[f]);
}

/* One bit of every byte of the texts and headers; of the tensors here and there. */
static void test_flips(const Original *o, const char *dir, Model *model)
{
    for (int f = 0; f < 4; f++) {
        char *name = xformat("flipped bits: %s", FILES[f]), *data = xmalloc(o->bytes[f]);
        uint64_t header = 0;
        test_case(name);
        memcpy(data, o->data[f], o->bytes[f]);
        if (f < 2) memcpy(&header, data, sizeof header);
        int64_t dense = f < 2 ? (int64_t)header + 8 : (int64_t)o->bytes[f], stride = test_long() ? 7 : 1009;
        for (int64_t i = 0; i < (int64_t)o->bytes[f]; i += i < dense + 8 ? 1 : stride) {
            char bit = (char)(1 << i % 8);
            data[i] ^= bit;
            check_broken(o, dir, f, data, o->bytes[f], "a flip at", i, model);
            data[i] ^= bit;
        }
        free(data);
        free(name);
    }
}

static void test_fuzz(const Original *o, const char *dir, Model *model)
{
    uint32_t rounds = test_long() ? 40000 : 2000;
    test_case("random damage");
    for (uint32_t i = 0; i < rounds; i++) {
        int f = (int)(i / 4 % 4);
        size_t bytes = o->bytes[f];
        char *data = xmalloc(bytes + 1);
        memcpy(data, o->data[f], bytes);
        test_mutate(data, &bytes, f < 2 ? 2500 : 400, i);
        if (bytes != o->bytes[f] || memcmp(data, o->data[f], bytes))
            check_broken(o, dir, f, data, bytes, "mutation", (int64_t)i, model);
        free(data);
    }
}

static void test_cuts(const Original *o, const char *dir, Model *model)
{
    test_case("files cut short, grown, empty, missing");
    for (int f = 0; f < 4; f++) {
        char *grown = xmalloc(o->bytes[f] + 1);
        memcpy(grown, o->data[f], o->bytes[f]);
        grown[o->bytes[f]] = f < 2 ? 0 : '\n';
        check_broken(o, dir, f, grown, o->bytes[f] + 1, "a byte more", 1, model);
        for (size_t left = 0; left < o->bytes[f]; left += 1 + left / 3)
            check_broken(o, dir, f, grown, left, "cut to", (int64_t)left, model);
        check_broken(o, dir, f, grown, o->bytes[f] - 1, "cut by", 1, model);
        free(grown);
        Error error = {""};
        remove(o->path[f]);
        CHECK(!verifies(dir, &error) && strstr(error.text, FILES[f]), "no %s: \"%s\"", FILES[f], error.text);
        test_write_file(o->path[f], o->data[f], o->bytes[f]);
    }
    uint64_t huge = UINT64_C(1) << 60;
    char *claims = xmalloc(o->bytes[0]);
    memcpy(claims, o->data[0], o->bytes[0]);
    memcpy(claims, &huge, sizeof huge);
    check_broken(o, dir, 0, claims, o->bytes[0], "a header of 2^", 60, model);
    free(claims);
}

static void test_broken(const char *folder)
{
    ModelSpec spec = spec_of(ARCH_QWEN3, PRECISION_BF16, MASTER_BF16);
    Model model;
    Error error;
    spec.config.L = 1;
    spec.config.C = 16;
    spec.config.V = 40;
    spec = finished(spec);
    open_model(&model, &spec);
    fill_model(&model, 70);
    test_case("the checkpoint to break is whole");
    write_checkpoint(folder, &model, 13, 1);
    char *dir = xformat("%s/checkpoints/step_00000013", folder);
    CHECK(verifies(dir, &error), "%s", error.text);

    Original o = original_read(dir);
    test_flips(&o, dir, &model);
    test_cuts(&o, dir, &model);
    test_fuzz(&o, dir, &model);
    test_case("whole again");
    CHECK(verifies(dir, &error), "%s", error.text);
    original_free(&o);
    free(dir);
    model_close(&model);
}

/* ---- the order in which things reach the disk: our fsync and rename stand before the C library's ---- */

static char events[4096]; /* "fsync NAME;rename NAME NAME;" with the last parts of the paths */

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static void event(const char *text, const char *a, const char *b)
{
    size_t length = strlen(events);
    snprintf(events + length, sizeof events - length, "%s %s%s%s;", text, last_part(a), *b ? " " : "", last_part(b));
}

int fsync(int descriptor)
{
    int (*real)(int) = NULL;
    char link[64], path[512] = "";
    *(void **)&real = dlsym(RTLD_NEXT, "fsync");
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    if (readlink(link, path, sizeof path - 1) > 0) event("fsync", path, "");
    return real(descriptor);
}

int rename(const char *from, const char *to)
{
    int (*real)(const char *, const char *) = NULL;
    *(void **)&real = dlsym(RTLD_NEXT, "rename");
    event("rename", from, to);
    return real(from, to);
}

/* kill -9 cannot show a missing fsync, because the page cache outlives the process; a power cut would. */
static void test_order(void)
{
    char *folder = test_folder();
    ModelSpec spec = spec_of(ARCH_LLAMA, PRECISION_BF16, MASTER_BF16);
    Model model;
    test_case("everything is on the disk before the name appears, and the old goes after");
    open_model(&model, &spec);
    fill_model(&model, 90);
    write_checkpoint(folder, &model, 1, 1);
    events[0] = 0;
    write_checkpoint(folder, &model, 2, 1);
    CHECK(!strcmp(events, "fsync model.safetensors;fsync optimizer.safetensors;fsync config.json.tmp;rename "
                          "config.json.tmp config.json;fsync state.json.tmp;"
                          "rename state.json.tmp state.json;"
                          "fsync step_00000002.tmp;rename step_00000002.tmp step_00000002;fsync checkpoints;"
                          "rename step_00000001 step_00000001.old;"),
          "%s", events);
    model_close(&model);
    test_folder_remove(folder);
}

/* ---- folders ---- */

static bool exists(const char *folder, const char *name)
{
    char *path = xformat("%s/checkpoints/%s", folder, name);
    bool there = access(path, F_OK) == 0;
    free(path);
    return there;
}

static void test_folders(void)
{
    char *folder = test_folder(), *dir = NULL;
    ModelSpec spec = spec_of(ARCH_LLAMA, PRECISION_BF16, MASTER_BF16);
    Model model;
    RunState state;
    Json *config = NULL;
    Error error = {""};
    open_model(&model, &spec);
    fill_model(&model, 80);

    test_case("an empty run has no checkpoint");
    CHECK(checkpoint_newest(folder, &dir, &state, &config) == 0, "one was found");
    CHECK(checkpoint_count(folder) == 0, "%lld counted", (long long)checkpoint_count(folder));

    test_case("keep_checkpoints: the newest stay, leftovers are swept");
    for (int64_t step = 1; step <= 3; step++) write_checkpoint(folder, &model, step, 0);
    CHECK(checkpoint_count(folder) == 3, "keep 0 kept %lld", (long long)checkpoint_count(folder));
    char *left = xformat("%s/checkpoints/step_00000099.tmp", folder), *half = xformat("%s/model.safetensors", left);
    mkdir(left, 0777);
    test_write_file(half, "x", 1);
    CHECK(checkpoint_count(folder) == 3, "a leftover counts");
    write_checkpoint(folder, &model, 100, 2);
    CHECK(checkpoint_count(folder) == 2 && exists(folder, "step_00000003") && exists(folder, "step_00000100"),
          "keep 2 kept %lld", (long long)checkpoint_count(folder));
    CHECK(!exists(folder, "step_00000099.tmp"), "the leftover stays");

    test_case("a full disk: reason, no leftover, the others whole");
    test_disk_full(20000);
    int status = checkpoint_write(folder, &model, &STATE, CONFIG, 1, &error);
    test_disk_normal();
    CHECK(status == -1, "it was written");
    CHECK(strstr(error.text, "safetensors") && strstr(error.text, "free some space"), "\"%s\"", error.text);
    CHECK(!exists(folder, "step_00000007") && !exists(folder, "step_00000007.tmp"), "something is left");
    CHECK(checkpoint_count(folder) == 2, "%lld left", (long long)checkpoint_count(folder));

    test_case("the newest whole one is found, the same step is replaced");
    char *newest = xformat("%s/checkpoints/step_00000100/state.json", folder);
    test_write_file(newest, "{}", 2);
    if (CHECK(checkpoint_newest(folder, &dir, &state, &config) == 1, "none was found")) {
        CHECK(state.step == 3, "step %lld", (long long)state.step);
        json_free(config);
        free(dir);
    }
    write_checkpoint(folder, &model, 100, 2);
    if (CHECK(checkpoint_newest(folder, &dir, &state, &config) == 1, "none was found")) {
        CHECK(state.step == 100, "step %lld", (long long)state.step);
        json_free(config);
        free(dir);
    }

    test_case("all can be deleted");
    CHECK(checkpoint_delete_after(folder, -1, &error) == 0, "%s", error.text);
    CHECK(checkpoint_count(folder) == 0, "%lld left", (long long)checkpoint_count(folder));
    free(newest);
    free(left);
    free(half);
    model_close(&model);
    test_folder_remove(folder);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 1, &error)) die("%s", error.text);
    char *folder = test_folder();
    test_names(folder);
    test_round_trip(folder);
    test_other_models(folder);
    test_widening(folder);
    test_broken(folder);
    test_order();
    test_folders();
    test_folder_remove(folder);
    return test_done();
}
