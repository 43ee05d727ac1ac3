/* config.c: what is derived, what is refused and in which words, and the public counts of the presets. */
#include "options.h"
#include "test.h"

#include <math.h>
#include <stddef.h>

static GPTConfig small(Arch arch)
{
    return (GPTConfig){.arch = arch,
                       .L = 2,
                       .C = 96,
                       .NH = 6,
                       .V = 300,
                       .T = 32,
                       .tied = true,
                       .rope_theta = 10000,
                       .rope_low_freq_factor = 1,
                       .rope_high_freq_factor = 4,
                       .rope_original_context = 8192,
                       .init_std = 0.02f,
                       .embedding_init_std = 0.02f};
}

static void test_derived(void)
{
    static const struct {
        Arch arch;
        const char *name;
        int64_t F;
        float norm_eps;
        NormKind norm;
        Activation activation;
        bool rope, bias, qk_norm;
    } expected[] = {
        {ARCH_GPT2, "gpt2", 384, 1e-5f, NORM_LAYERNORM, ACTIVATION_GELU, false, true, false},
        {ARCH_LLAMA, "llama", 256, 1e-5f, NORM_RMSNORM, ACTIVATION_SWIGLU, true, false, false},
        {ARCH_QWEN3, "qwen3", 256, 1e-6f, NORM_RMSNORM, ACTIVATION_SWIGLU, true, false, true},
    };
    for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
        Error error = {""};
        GPTConfig c = small(expected[i].arch);
        test_case("derived values of an architecture");
        CHECK(config_finish(&c, &error) == 0, "%s", error.text);
        CHECK(strcmp(arch_name(c.arch), expected[i].name) == 0, "%s", arch_name(c.arch));
        CHECK(c.F == expected[i].F && c.NKV == 6 && c.HD == 16 && c.Vp == 384, "F %ld NKV %ld HD %ld Vp %ld", (long)c.F,
              (long)c.NKV, (long)c.HD, (long)c.Vp);
        CHECK(c.norm_eps == expected[i].norm_eps, "norm_eps %g", (double)c.norm_eps);
        CHECK(c.norm == expected[i].norm && c.activation == expected[i].activation, "norm or activation");
        CHECK(c.rope == expected[i].rope && c.bias == expected[i].bias && c.qk_norm == expected[i].qk_norm, "switches");
        CHECK(config_qkv_cols(&c) == 18 * 16 && config_up_cols(&c) == (i ? 2 : 1) * c.F, "fused widths");

        GPTConfig again = c;
        CHECK(config_finish(&again, &error) == 0 && again.F == c.F && again.HD == c.HD && again.Vp == c.Vp &&
                  again.norm_eps == c.norm_eps,
              "finishing twice changes something");
    }
    test_case("ffn of SwiGLU: 8/3 hidden up to a multiple of 64");
    const int64_t hidden[4] = {96, 120, 150, 4098}, ffn[4] = {256, 320, 448, 10944};
    for (int i = 0; i < 4; i++) {
        Error error = {""};
        GPTConfig c = small(ARCH_LLAMA);
        c.C = hidden[i];
        c.HD = 16;
        CHECK(config_finish(&c, &error) == 0 && c.F == ffn[i], "hidden %ld: ffn %ld", (long)c.C, (long)c.F);
    }
    test_case("given values stay");
    GPTConfig c = small(ARCH_QWEN3);
    Error error = {""};
    c.NKV = 2;
    c.HD = 128;
    c.F = 100;
    c.norm_eps = 0.5f;
    c.V = 256;
    CHECK(config_finish(&c, &error) == 0, "%s", error.text);
    CHECK(c.NKV == 2 && c.HD == 128 && c.F == 100 && c.norm_eps == 0.5f && c.Vp == 256, "a given value was replaced");
}

/* One field of the small model changed: must be refused with a message that begins like this. */
#define INT_FIELD(name) offsetof(GPTConfig, name), false
#define NUM_FIELD(name) offsetof(GPTConfig, name), true
static const struct {
    Arch arch;
    size_t offset;
    bool is_double;
    double value;
    const char *message;
} REFUSED[] = {
    {ARCH_LLAMA, INT_FIELD(L), 0, "layers 0 is out of range: allowed 1 to 16384"},
    {ARCH_LLAMA, INT_FIELD(L), -1, "layers -1"},
    {ARCH_LLAMA, INT_FIELD(C), 0x1p20 + 6, "hidden 1048582 is out of range"},
    {ARCH_LLAMA, INT_FIELD(C), 0x1p60, "hidden 1152921504606846976"},
    {ARCH_LLAMA, INT_FIELD(C), 100, "heads 6 does not divide hidden 100"},
    {ARCH_LLAMA, INT_FIELD(NH), 0, "heads 0"},
    {ARCH_LLAMA, INT_FIELD(NH), 5, "heads 5 does not divide hidden 96"},
    {ARCH_LLAMA, INT_FIELD(NKV), 4, "kv_heads 4 does not divide heads 6"},
    {ARCH_LLAMA, INT_FIELD(NKV), 12, "kv_heads 12 does not divide heads 6"},
    {ARCH_LLAMA, INT_FIELD(NKV), -6, "kv_heads -6"},
    {ARCH_LLAMA, INT_FIELD(HD), 17, "head_dim 17 is odd"},
    {ARCH_LLAMA, INT_FIELD(HD), -2, "head_dim -2"},
    {ARCH_LLAMA, INT_FIELD(HD), 0x1p15, "head_dim 32768"},
    {ARCH_LLAMA, INT_FIELD(F), -1, "ffn -1"},
    {ARCH_LLAMA, INT_FIELD(F), 0x1p23, "ffn 8388608"},
    {ARCH_LLAMA, INT_FIELD(V), 0, "vocab 0"},
    {ARCH_LLAMA, INT_FIELD(V), 0x1p24 + 1, "vocab 16777217"},
    {ARCH_LLAMA, INT_FIELD(T), 0, "seq_len 0"},
    {ARCH_LLAMA, INT_FIELD(T), 0x1p20 + 1, "seq_len 1048577"},
    {ARCH_LLAMA, NUM_FIELD(rope_theta), 0.5, "rope_theta 0.5"},
    {ARCH_LLAMA, NUM_FIELD(rope_theta), INFINITY, "rope_theta inf"},
    {ARCH_LLAMA, NUM_FIELD(rope_factor), 0.5, "rope_scaling_factor 0.5"},
    {ARCH_LLAMA, NUM_FIELD(rope_factor), NAN, "rope_scaling_factor nan"},
    {ARCH_GPT2, NUM_FIELD(rope_factor), 8, "rope_scaling_factor 8: gpt2"},
    {ARCH_GPT2, INT_FIELD(NKV), 3, "kv_heads 3 with heads 6: gpt2"},
    {ARCH_GPT2, INT_FIELD(HD), 32, "head_dim 32 x heads 6 is not hidden 96: gpt2"},
};

static void test_refused(void)
{
    for (size_t i = 0; i < sizeof REFUSED / sizeof REFUSED[0]; i++) {
        Error error = {""};
        GPTConfig c = small(REFUSED[i].arch);
        void *field = (char *)&c + REFUSED[i].offset;
        if (REFUSED[i].is_double)
            *(double *)field = REFUSED[i].value;
        else
            *(int64_t *)field = (int64_t)REFUSED[i].value;
        test_case(REFUSED[i].message);
        CHECK(config_finish(&c, &error) == -1, "accepted");
        CHECK(strncmp(error.text, REFUSED[i].message, strlen(REFUSED[i].message)) == 0, "%s", error.text);
    }
}

static void check_refused(GPTConfig c, const char *message)
{
    Error error = {""};
    CHECK(config_finish(&c, &error) == -1 && strstr(error.text, message), "wanted \"%s\", got \"%s\"", message,
          error.text);
}

static void test_refused_together(void)
{
    test_case("refused: fields that do not fit each other");
    GPTConfig c = small(ARCH_GPT2);
    c.tied = false;
    check_refused(c, "tie_embeddings false");
    c = small(ARCH_LLAMA);
    c.rope_factor = 8;
    c.rope_high_freq_factor = 1;
    check_refused(c, "rope_scaling_low_freq_factor 1 must be above 0 and below rope_scaling_high_freq_factor 1");
    c.rope_high_freq_factor = 4;
    c.rope_original_context = 0;
    check_refused(c, "rope_scaling_original_context 0");
    c = small(ARCH_QWEN3);
    c.HD = OPS_MAX_HEAD_DIM + 2;
    check_refused(c, "head_dim 258");
    c = small(ARCH_LLAMA);
    c.norm_eps = -1;
    check_refused(c, "norm_eps -1");
    c.norm_eps = NAN;
    check_refused(c, "norm_eps nan");
    c = small(ARCH_LLAMA);
    c.init_std = -1;
    check_refused(c, "init_std -1");
    c = small(ARCH_LLAMA);
    c.embedding_init_std = INFINITY;
    check_refused(c, "embedding_init_std inf");

    test_case("the largest sizes neither overflow nor pass");
    c = small(ARCH_LLAMA);
    c.L = CONFIG_MAX_LAYERS;
    c.C = CONFIG_MAX_HIDDEN;
    c.NH = 256;
    c.HD = OPS_MAX_HEAD_DIM;
    c.F = CONFIG_MAX_FFN;
    c.V = CONFIG_MAX_VOCAB;
    c.tied = false;
    check_refused(c, "parameters: at most 17592186044416");
    CHECK(config_parameters(&c) > (int64_t)1 << 57, "the count overflowed: %ld", (long)config_parameters(&c));
}

/* The presets are read as a user gives them: `plan --config FILE`. */
static void test_presets(void)
{
    static const struct {
        const char *path;
        int64_t parameters; /* as published; 0: ours, any */
    } preset[] = {
        {"scripts/configs/gpt2_124m.json", 124439808},
        {"scripts/configs/gpt2_1558m.json", 1557611200},
        {"scripts/configs/llama3_8b.json", 8030261248},
        {"scripts/configs/qwen3_0.6b.json", 596049920},
        {"scripts/configs/demo.json", 0},
    };
    for (size_t i = 0; i < sizeof preset / sizeof preset[0]; i++) {
        Error error = {""};
        Options options;
        GPTConfig c;
        bool help;
        char *argv[] = {"train_gpt", "plan", "--config", (char *)preset[i].path};
        test_case(preset[i].path);
        bool read = options_parse(&options, 4, argv, &help, &error) == 0 && options_model(&options, &c, &error) == 0;
        if (CHECK(read, "%s", error.text))
            CHECK(!preset[i].parameters || config_parameters(&c) == preset[i].parameters, "%ld parameters",
                  (long)config_parameters(&c));
        options_free(&options);
    }
}

static void test_flops(void)
{
    Error error = {""};
    GPTConfig c = small(ARCH_GPT2);
    test_case("FLOPs of a token: GPT-2 124M by hand");
    c.L = 12;
    c.C = 768;
    c.NH = 12;
    c.V = 50257;
    c.T = 1024;
    CHECK(config_finish(&c, &error) == 0, "%s", error.text);
    double products = 12.0 * 12 * 768 * 768 + 50257.0 * 768, attention = 12.0 * 768 * 1024;
    CHECK(config_flops_per_token(&c) == 6 * products + 6 * attention, "%.0f", config_flops_per_token(&c));

    test_case("FLOPs of a token: grouped queries save k and v, an untied head costs the same");
    GPTConfig full = small(ARCH_QWEN3), grouped = small(ARCH_QWEN3);
    full.HD = grouped.HD = 64;
    grouped.NKV = 2;
    grouped.tied = false;
    CHECK(config_finish(&full, &error) == 0 && config_finish(&grouped, &error) == 0, "%s", error.text);
    double saved = config_flops_per_token(&full) - config_flops_per_token(&grouped);
    CHECK(saved == 6.0 * 2 * (2 * 4 * 64) * 96, "saved %.0f", saved);
}

int main(void)
{
    test_derived();
    test_refused();
    test_refused_together();
    test_presets();
    test_flops();
    return test_done();
}
