/* export.c: the folders that it writes, read back: BF16 of every architecture against the masters; NVFP4 by
 * dev/reference/read_export.py, which decodes and quantizes by itself; config files; what is refused, and that then
 * nothing is left. */
#include "export.h"

#include <math.h>

#include "cpu/backend.h"
#include "hf.h"
#include "test.h"
#include "test_files.h"

static const Ops *ops;
static char *folder;

static ModelSpec spec_of(Arch arch, Precision precision)
{
    Error error;
    ModelSpec s = {.recipe = recipe_defaults(precision, MASTER_DEFAULT),
                   .seed = 5,
                   .generate = true,
                   .micro_steps = 1,
                   .eot_token = 256};
    s.recipe.steps = 100;
    s.config = (GPTConfig){.arch = arch,
                           .L = 3,
                           .C = 48,
                           .NH = 8,
                           .NKV = arch == ARCH_GPT2    ? 8
                                  : arch == ARCH_LLAMA ? 2
                                                       : 1,
                           .HD = arch == ARCH_LLAMA ? 8 : 6, /* qwen3: k ends within a block of 16 rows */
                           .F = 48,
                           .V = 257,
                           .T = 16,
                           .rope_theta = 5e5,
                           .tied = arch != ARCH_LLAMA};
    s.config.init_std = s.config.embedding_init_std = 0.05f;
    if (arch == ARCH_LLAMA) {
        s.config.rope_factor = 8;
        s.config.rope_low_freq_factor = 1;
        s.config.rope_high_freq_factor = 4;
        s.config.rope_original_context = 8192;
    }
    if (config_finish(&s.config, &error)) die("%s", error.text);
    return s;
}

static void no_views(void *context) { (void)context; } /* export quantizes by itself */

static void open_at(Model *model, const ModelSpec *spec, uint32_t step)
{
    Error error;
    if (model_open(model, spec, ops, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 7);
    model->gpt.hooks.prepare_weights = no_views;
    gpt_enter_step(&model->gpt, step);
}

static char *path_of(const char *name) { return xformat("%s/%s", folder, name); }

static bool exists(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0;
}

static Json *json_of(const char *dir, const char *name)
{
    Error error;
    char *path = xformat("%s/%s", dir, name);
    Json *json = json_read_file(path, &error);
    if (!json) die("%s", error.text);
    free(path);
    return json;
}

/* "key": value of a config file, as JSON text; NULL: must be absent. */
static void check_member(const Json *json, const char *key, const char *value)
{
    const Json *member = json_get(json, key);
    char *text = member ? json_print(member, false) : NULL;
    CHECK(value ? text && strcmp(text, value) == 0 : !text, "%s is %s, not %s", key, text ? text : "absent",
          value ? value : "absent");
    free(text);
}

/* ---- BF16 ---- */

static float master_at(const Model *model, int i, int64_t k)
{
    const Tensor *t = &model->zero.shard[i].master;
    return t->dtype == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)t->data)[k]) : ((const float *)t->data)[k];
}

static void check_tensor(const Model *model, int i, const HfTensor *t, const StFile *file)
{
    const StTensor *on_disk = st_find(file, t->name);
    if (!CHECK(on_disk && on_disk->dtype == ST_BF16 && on_disk->rank == t->rank, "%s: absent or another type", t->name))
        return;
    for (int d = 0; d < t->rank; d++) CHECK(on_disk->shape[d] == t->shape[d], "%s: shape", t->name);
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t c = 0; c < t->cols; c++) {
            uint16_t expected = bf16_from_f32(master_at(model, i, (t->row0 + r) * t->cols + c)), found;
            int64_t place = t->transposed ? c * t->rows + r : r * t->cols + c;
            memcpy(&found, (const char *)on_disk->data + 2 * place, 2);
            CHECK(found == expected, "%s: row %d, column %d", t->name, (int)r, (int)c);
        }
}

static void check_bf16(Arch arch, Precision precision, Master master)
{
    Model model;
    Error error;
    ModelSpec spec = spec_of(arch, precision);
    spec.recipe.master = master;
    StFile file;
    char *dir = path_of("bf16"), *path = xformat("%s/model.safetensors", dir);
    int64_t tensors = 0;
    open_at(&model, &spec, 3);
    CHECK(export_model(&model, dir, EXPORT_BF16, &error) == 0, "%s", error.text);
    if (st_open(&file, path, &error)) die("%s", error.text);
    for (int i = 0; i < model.table.count; i++) {
        HfTensor part[HF_PARTS];
        int parts = hf_tensors(&spec.config, &model.table.param[i], part);
        for (int j = 0; j < parts; j++) check_tensor(&model, i, &part[j], &file);
        tensors += parts;
    }
    CHECK(file.count == tensors, "%d tensors, not %d", (int)file.count, (int)tensors);
    CHECK(st_metadata(&file, "format") && !strcmp(st_metadata(&file, "format"), "pt"), "metadata");
    st_close(&file);

    Json *config = json_of(dir, "config.json"), *generation = json_of(dir, "generation_config.json");
    check_member(config, "vocab_size", "257");
    check_member(config, "torch_dtype", "\"bfloat16\"");
    check_member(config, "quantization_config", NULL);
    check_member(config, "eos_token_id", "256");
    check_member(generation, "bos_token_id", "256");
    char *other = xformat("%s/hf_quant_config.json", dir);
    CHECK(!exists(other), "a quantization config beside BF16 weights");
    json_free(config);
    json_free(generation);
    model_close(&model);
    test_folder_remove(dir);
    free(path);
    free(other);
}

static void test_bf16(void)
{
    test_case("bf16: gpt2, Conv1D weights transposed");
    check_bf16(ARCH_GPT2, PRECISION_BF16, MASTER_DEFAULT);
    test_case("bf16: llama from FP32 masters");
    check_bf16(ARCH_LLAMA, PRECISION_FP32, MASTER_DEFAULT);
    test_case("bf16: qwen3 trained in NVFP4: the masters");
    check_bf16(ARCH_QWEN3, PRECISION_NVFP4, MASTER_FP32);
}

static Json *config_of(Arch arch)
{
    Model model;
    Error error;
    ModelSpec spec = spec_of(arch, PRECISION_BF16);
    char *dir = path_of("config");
    open_at(&model, &spec, 0);
    CHECK(export_model(&model, dir, EXPORT_BF16, &error) == 0, "%s", error.text);
    Json *config = json_of(dir, "config.json");
    model_close(&model);
    test_folder_remove(dir);
    return config;
}

static void test_configs(void)
{
    test_case("config.json of gpt2");
    Json *config = config_of(ARCH_GPT2);
    check_member(config, "architectures", "[\"GPT2LMHeadModel\"]");
    check_member(config, "model_type", "\"gpt2\"");
    check_member(config, "n_embd", "48");
    check_member(config, "n_layer", "3");
    check_member(config, "n_head", "8");
    check_member(config, "n_inner", "48");
    check_member(config, "n_positions", "16");
    check_member(config, "activation_function", "\"gelu_new\"");
    check_member(config, "layer_norm_epsilon", "9.99999975e-06");
    check_member(config, "tie_word_embeddings", "true");
    check_member(config, "rope_theta", NULL);
    json_free(config);

    test_case("config.json of llama");
    config = config_of(ARCH_LLAMA);
    check_member(config, "architectures", "[\"LlamaForCausalLM\"]");
    check_member(config, "model_type", "\"llama\"");
    check_member(config, "hidden_size", "48");
    check_member(config, "intermediate_size", "48");
    check_member(config, "num_hidden_layers", "3");
    check_member(config, "num_attention_heads", "8");
    check_member(config, "num_key_value_heads", "2");
    check_member(config, "head_dim", "8");
    check_member(config, "max_position_embeddings", "16");
    check_member(config, "rms_norm_eps", "9.99999975e-06");
    check_member(config, "rope_theta", "500000");
    check_member(config, "hidden_act", "\"silu\"");
    check_member(config, "tie_word_embeddings", "false");
    check_member(config, "attention_bias", "false");
    check_member(config, "mlp_bias", "false");
    check_member(config, "dtype", "\"bfloat16\"");
    check_member(config, "rope_scaling",
                 "{\"rope_type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_factor\":4,"
                 "\"original_max_position_embeddings\":8192}");
    json_free(config);

    test_case("config.json of qwen3");
    config = config_of(ARCH_QWEN3);
    check_member(config, "architectures", "[\"Qwen3ForCausalLM\"]");
    check_member(config, "model_type", "\"qwen3\"");
    check_member(config, "head_dim", "6");
    check_member(config, "rms_norm_eps", "9.99999997e-07");
    check_member(config, "tie_word_embeddings", "true");
    check_member(config, "use_sliding_window", "false");
    check_member(config, "rope_scaling", NULL);
    check_member(config, "mlp_bias", NULL);
    json_free(config);
}

/* ---- NVFP4 ---- */

/* Exports both formats and has the independent reader compare them; `packed`: modules expected. */
static void check_nvfp4(Model *model, const char *options, int packed)
{
    Error error;
    char *bf16 = path_of("bf16"), *nvfp4 = path_of("nvfp4"), line[256] = "", last[256] = "";
    char *command = xformat("python3 dev/reference/read_export.py %s --weights %s --seed 5 %s 2>&1", nvfp4, bf16,
                            options);
    CHECK(export_model(model, bf16, EXPORT_BF16, &error) == 0, "%s", error.text);
    CHECK(export_model(model, nvfp4, EXPORT_NVFP4, &error) == 0, "%s", error.text);
    FILE *reader = popen(command, "r");
    while (reader && fgets(line, sizeof line, reader)) memcpy(last, line, sizeof last);
    int code = reader ? pclose(reader) : -1, modules = 0, checks = 0, failed = -1;
    sscanf(last, "%d packed modules, %d checks, %d failed", &modules, &checks, &failed);
    CHECK(code == 0 && failed == 0 && checks > 1000, "%s: exit code %d, %s", command, code, last);
    CHECK(modules == packed, "%d packed modules, not %d", modules, packed);
    test_folder_remove(bf16);
    test_folder_remove(nvfp4);
    free(command);
}

static ModelSpec nvfp4_spec(Arch arch) { return spec_of(arch, PRECISION_NVFP4); } /* 2 of 3 blocks in NVFP4 */

static void check_variant(const char *name, const ModelSpec *spec, uint32_t step, const char *options, int packed)
{
    Model model;
    test_case(name);
    open_at(&model, spec, step);
    check_nvfp4(&model, options, packed);
    model_close(&model);
}

static void test_nvfp4(void)
{
    if (system("python3 -c '' 2>/dev/null") != 0) {
        test_case("nvfp4: folders read by dev/reference/read_export.py");
        test_skip("no python3");
        return;
    }
    ModelSpec s = nvfp4_spec(ARCH_LLAMA);
    check_variant("nvfp4: llama, 16 x 16 blocks, last block in BF16", &s, 3, "", 14);
    s = nvfp4_spec(ARCH_QWEN3);
    s.recipe.master = MASTER_FP32;
    check_variant("nvfp4: qwen3, tied, FP32 masters", &s, 3, "", 14);
    s.recipe.weight_blocks = WEIGHTS_1X16;
    s.recipe.bf16_first_layers = 1;
    check_variant("nvfp4: 1 x 16 blocks, first and last block in BF16", &s, 3, "--blocks 1x16", 7);
    s = nvfp4_spec(ARCH_LLAMA);
    s.recipe.tensor_scale = TENSOR_SCALE_POW2;
    s.recipe.quantize_projections = 1 << PROJ_QKV | 1 << PROJ_DOWN;
    check_variant("nvfp4: powers of two, exact; qkv and down only", &s, 3, "--tensor_scale pow2", 8);
    s = nvfp4_spec(ARCH_LLAMA);
    s.recipe.four_over_six = FOUR_SIX_WEIGHTS;
    s.recipe.four_over_six_metric = FOUR_SIX_MSE;
    check_variant("nvfp4: 4/6", &s, 3, "--four_over_six mse", 14);
    s = nvfp4_spec(ARCH_LLAMA);
    s.recipe.stochastic_rounding = STOCHASTIC_ALL;
    s.recipe.bf16_last_layers = 0;
    check_variant("nvfp4: stochastic weights have the bits of the step", &s, 41, "--rounding stochastic --step 41", 21);

    Model model;
    test_case("nvfp4: a matrix of zeros, blocks too small for a scale");
    s = nvfp4_spec(ARCH_LLAMA);
    open_at(&model, &s, 0);
    for (int i = 0; i < model.table.count; i++) {
        Tensor t = model.zero.shard[i].master;
        if (model.table.param[i].kind == PARAM_O) memset(t.data, 0, tensor_bytes(t));
        for (int k = 0; model.table.param[i].kind == PARAM_UP && k < 16 * 48; k++) ((uint16_t *)t.data)[k] = 0x2f80;
    }
    check_nvfp4(&model, "", 14);
    model_close(&model);
}

/* ---- what is refused ---- */

static void refuses_to(Model *model, const char *dir, ExportFormat format, const char *message)
{
    Error error = {""};
    char *fresh = xformat("%s.tmp", dir);
    bool was = exists(dir), fresh_was = exists(fresh);
    CHECK(export_model(model, dir, format, &error) == -1, "accepted: %s", message);
    CHECK(strstr(error.text, message), "wanted \"%s\", got \"%s\"", message, error.text);
    CHECK(exists(dir) == was && exists(fresh) == fresh_was, "%s: left something behind", message);
    free(fresh);
}

static void refuses(const ModelSpec *spec, uint32_t step, const char *message)
{
    Model model;
    char *dir = path_of("refused");
    open_at(&model, spec, step);
    refuses_to(&model, dir, EXPORT_NVFP4, message);
    model_close(&model);
    free(dir);
}

static void test_refused(void)
{
    test_case("nvfp4 is refused where no weight is packed or nobody could read it");
    ModelSpec s = nvfp4_spec(ARCH_GPT2);
    refuses(&s, 0, "gpt2 in nvfp4");
    s = spec_of(ARCH_LLAMA, PRECISION_BF16);
    refuses(&s, 7, "precision bf16: at step 7 no layer's forward product reads its weight in NVFP4");
    s = spec_of(ARCH_LLAMA, PRECISION_FP32);
    refuses(&s, 0, "precision fp32");
    s = nvfp4_spec(ARCH_LLAMA);
    s.recipe.fprop = PRODUCT_IN_BF16;
    refuses(&s, 0, "precision nvfp4: at step 0 no layer's forward");
    s = nvfp4_spec(ARCH_LLAMA);
    s.recipe.switch_to_bf16_at = 0.5;
    refuses(&s, 50, "at step 50 no layer's forward");
    s = nvfp4_spec(ARCH_LLAMA);
    s.config.F = 40;
    refuses(&s, 0, "block.0.down: 40 columns are not a multiple of 16");

    test_case("weights that are not numbers");
    Model model;
    s = nvfp4_spec(ARCH_LLAMA);
    open_at(&model, &s, 0);
    char *dir = path_of("refused"), *fresh = path_of("refused.tmp"), *within = path_of("refused/file");
    uint16_t *weights = model.zero.shard[0].master.data;
    weights[3] = 0x7fc0, weights[5] = 0xff80;
    refuses_to(&model, dir, EXPORT_NVFP4, "block.0.qkv: there are weights that are NaN or infinite");
    weights[3] = weights[5] = 0;

    test_case("folders: not empty, a file, a leftover, no parent, a full disk");
    mkdir(dir, 0777);
    test_write_file(within, "x", 1);
    refuses_to(&model, dir, EXPORT_BF16, "is not empty");
    refuses_to(&model, within, EXPORT_BF16, "Not a directory");
    remove(within);
    mkdir(fresh, 0777);
    refuses_to(&model, dir, EXPORT_BF16, "delete it if an export was stopped there");
    remove(fresh);
    refuses_to(&model, "no/such/folder", EXPORT_BF16, "cannot create the folder");
    Error error = {""};
    test_disk_full(20000);
    int result = export_model(&model, dir, EXPORT_NVFP4, &error);
    test_disk_normal();
    CHECK(result == -1 && strstr(error.text, "free some space"), "a full disk: %d, %s", result, error.text);
    CHECK(!exists(fresh), "a full disk left something behind");

    test_case("an empty folder, with a slash, is taken");
    char *slash = xformat("%s//", dir);
    CHECK(export_model(&model, slash, EXPORT_NVFP4, &error) == 0, "%s", error.text);
    char *config = path_of("refused/hf_quant_config.json");
    CHECK(exists(config) && !exists(fresh), "not there");
    free(config);
    free(slash);
    model_close(&model);
    test_folder_remove(dir);
    free(fresh);
    free(within);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 2, &error)) die("%s", error.text);
    folder = test_folder();
    test_bf16();
    test_configs();
    test_nvfp4();
    test_refused();
    test_folder_remove(folder);
    return test_done();
}
