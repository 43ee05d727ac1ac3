/* hellaswag.c and the evaluation by it: files of both widths to the word, files that lie about themselves, mutations
 * read within their bounds or refused. And a small model's answers: in batches of any size they are those of each
 * completion alone in a batch of one; a file with the model's own answers as labels is answered without an error; what
 * the context does not hold is skipped and counted.
 */
#include "hellaswag.h"

#include "cpu/backend.h"
#include "evaluate.h"
#include "philox.h"
#include "test.h"
#include "test_files.h"

#include <math.h>

static char *folder;
static char path[4096];

/* ---- files ---- */

typedef struct {
    uint32_t words[1 << 16];
    int64_t count;
    int32_t examples;
} Builder;

static Builder builder; /* of the file that is made next */

static void put(uint32_t word) { builder.words[builder.count++] = word; }

/* An example of `completions` completions, with ids from a counter; completion k has lengths[k] of them. */
static void put_example(uint32_t marker, uint32_t word_bytes, uint32_t label, uint32_t context, const uint32_t *lengths,
                        uint32_t completions, uint32_t vocab)
{
    int64_t start = builder.count;
    uint32_t number = (uint32_t)builder.examples++;
    put(marker);
    put(0);
    put(number);
    put(label);
    put(completions);
    put(context);
    for (uint32_t i = 0; i < context; i++) put(philox4x32(10, number, i, 0, 0, 0, 1).word[0] % vocab);
    for (uint32_t k = 0; k < completions; k++) {
        put(lengths[k]);
        for (uint32_t i = 0; i < lengths[k]; i++) put(philox4x32(10, number, i, k, 1, 0, 1).word[0] % vocab);
    }
    builder.words[start + 1] = (uint32_t)(builder.count - start) * word_bytes;
}

static void write_file(int32_t version, int32_t examples)
{
    size_t width = version == 1 ? 2 : 4, bytes = 1024 + (size_t)builder.count * width;
    char *data = xcalloc(1, bytes);
    int32_t header[3] = {20240522, version, examples};
    memcpy(data, header, sizeof header);
    for (int64_t i = 0; i < builder.count; i++) {
        uint16_t narrow = (uint16_t)builder.words[i];
        memcpy(data + 1024 + (size_t)i * width, width == 2 ? (void *)&narrow : (void *)&builder.words[i], width);
    }
    test_write_file(path, data, bytes);
    free(data);
}

/* Three questions: of 3, 1 and 7 context tokens. */
static void build(int32_t version, uint32_t vocab)
{
    static const uint32_t LENGTHS[3][4] = {{2, 3, 1, 4}, {1, 1, 1, 1}, {5, 2, 2, 6}}, CONTEXT[3] = {3, 1, 7},
                          LABEL[3] = {2, 0, 3};
    builder.count = builder.examples = 0;
    for (int i = 0; i < 3; i++)
        put_example(version == 1 ? UINT16_MAX : UINT32_MAX, version == 1 ? 2 : 4, LABEL[i], CONTEXT[i], LENGTHS[i], 4,
                    vocab);
}

static void test_formats(void)
{
    for (int32_t version = 1; version <= 2; version++) {
        Error error = {""};
        HellaSwag file;
        HellaSwagExample e;
        int32_t tokens[16];
        test_case(version == 1 ? "reading: llm.c's uint16" : "reading: uint32, with ids that 16 bits do not hold");
        build(version, version == 1 ? 60000 : 200000);
        builder.words[6] = version == 1 ? 65534 : INT32_MAX;
        write_file(version, 3);
        if (!CHECK(hellaswag_open(&file, path, &error) == 0, "%s", error.text)) continue;
        CHECK(file.examples == 3 && file.word_bytes == 2 * version, "%lld examples", (long long)file.examples);
        CHECK(file.largest_id == (version == 1 ? 65534 : INT32_MAX), "largest id %lld", (long long)file.largest_id);
        hellaswag_example(&file, 0, &e);
        CHECK(e.index == 0 && e.label == 2 && e.completions == 4 && e.context_tokens == 3, "label %d", e.label);
        CHECK(hellaswag_longest(&e) == 7, "%lld tokens", (long long)hellaswag_longest(&e));
        CHECK(hellaswag_tokens(&file, &e, 1, tokens) == 6, "context 3 and completion 3");
        /* marker bytes index label completions | 3 ids | 2 ids | 3 ids */
        for (int i = 0; i < 6; i++)
            CHECK((uint32_t)tokens[i] == builder.words[i < 3 ? 6 + i : 13 + i - 3], "token %d is %d", i, tokens[i]);
        hellaswag_example(&file, 2, &e);
        CHECK(e.index == 2 && e.label == 3 && e.completion_tokens[3] == 6 && hellaswag_longest(&e) == 13, "example 2");
        hellaswag_close(&file);
    }
}

static void refuse(const char *what, const char *part)
{
    Error error = {""};
    HellaSwag file;
    bool refused = hellaswag_open(&file, path, &error) == -1;
    CHECK(refused && strstr(error.text, path) && strstr(error.text, part), "%s: %s", what, error.text);
    if (!refused) hellaswag_close(&file);
}

/* The file of build(1) with one word replaced. */
static void refuse_word(int64_t place, uint32_t word, const char *what, const char *part)
{
    build(1, 300);
    builder.words[place] = word;
    write_file(1, 3);
    refuse(what, part);
}

static void test_lies(void)
{
    static const uint32_t LENGTHS[17] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    test_case("refusals: header, counts, sizes, labels, ids");
    refuse_word(0, 7, "marker", "example 0 of 3 does not begin with the marker");
    refuse_word(1, 45, "odd size", "size");
    refuse_word(1, 2, "tiny size", "size");
    refuse_word(1, 65534, "size beyond the file", "size");
    refuse_word(1, 48, "size one word too large", "belong to nothing");
    refuse_word(1, 44, "size one word too small", "go beyond its end");
    refuse_word(3, 4, "label 4 of 4", "label");
    refuse_word(4, 1, "one completion", "number of completions");
    refuse_word(4, 17, "17 completions", "number of completions");
    refuse_word(4, 5, "a completion too many", "beyond its end");
    refuse_word(4, 3, "a completion too few", "belong to nothing");
    refuse_word(5, 0, "no context", "0");
    refuse_word(5, 65535, "a context without end", "beyond its end");
    refuse_word(9, 0, "an empty completion", "0");
    refuse_word(6, 65535, "the marker as an id", "65535");
    build(2, 300);
    builder.words[6] = 0x80000000u;
    write_file(2, 3);
    refuse("an id beyond int32", "2147483648");
    for (int32_t n = -1; n <= 5; n++) {
        build(1, 300);
        write_file(1, n);
        if (n != 3) refuse("count of examples", n == 1 || n == 2 ? "words follow" : "");
    }
    build(1, 300);
    write_file(1, INT32_MAX);
    refuse("very many examples", "2147483647");
    write_file(3, 3);
    refuse("version", "version 3");
    put_example(UINT16_MAX, 2, 0, 1, LENGTHS, 16, 300);
    write_file(1, 4);
    HellaSwag file;
    Error error = {""};
    CHECK(hellaswag_open(&file, path, &error) == 0, "16 completions: %s", error.text);
    hellaswag_close(&file);
    int32_t other[256] = {20240520, 1, 4};
    test_write_file(path, other, sizeof other);
    refuse("a token file", "multiple-choice");
    test_write_file(path, "", 0);
    refuse("empty", "empty");
    remove(path);
    refuse("missing", "No such file");

    test_case("refusals: a file cut off anywhere");
    build(1, 300);
    write_file(1, 3);
    size_t bytes;
    char *data = test_read_file(path, &bytes);
    for (size_t cut = 1; cut<bytes; cut += cut> 20 && cut < 1000 ? 37 : 1) {
        test_write_file(path, data, cut);
        refuse("cut off", cut < 1024 ? "truncated" : "");
    }
    free(data);
}

static void test_mutations(void)
{
    test_case("mutated files are read within their bounds or refused");
    for (int32_t version = 1; version <= 2; version++) {
        size_t bytes;
        build(version, 300);
        write_file(version, 3);
        char *data = test_read_file(path, &bytes);
        int read = 0;
        for (uint32_t i = 0; i < (test_long() ? 20000 : 1000); i++) {
            Error error = {""};
            HellaSwag file;
            size_t length = bytes;
            char *copy = memcpy(xmalloc(bytes), data, bytes);
            if (i % 2) /* in the words: the header is mutated every second time */
                test_mutate(copy + 1024, (length -= 1024, &length), 60, i), length += 1024;
            else
                test_mutate(copy, &length, 12, i);
            test_write_file(path, copy, length);
            free(copy);
            if (hellaswag_open(&file, path, &error)) {
                CHECK(error.text[0], "mutation %u: refused without a reason", i);
                continue;
            }
            read++;
            for (int64_t k = 0; k < file.examples; k++) {
                HellaSwagExample e;
                hellaswag_example(&file, k, &e);
                int32_t *tokens = xmalloc((size_t)hellaswag_longest(&e) * sizeof *tokens);
                for (int c = 0; c < e.completions; c++) hellaswag_tokens(&file, &e, c, tokens);
                free(tokens);
            }
            hellaswag_close(&file);
        }
        CHECK(read > 10, "only %d of them could be read: nothing was proved", read);
        free(data);
    }
}

/* ---- answers ---- */

static const Ops *ops;

enum { VOCAB = 300 };

static const struct {
    Arch arch;
    Precision precision;
    bool mask;
    const char *name;
} CASES[] = {{ARCH_GPT2, PRECISION_BF16, false, "gpt2 bf16"},
             {ARCH_LLAMA, PRECISION_BF16, true, "llama bf16 masked"},
             {ARCH_QWEN3, PRECISION_FP32, false, "qwen3 fp32"}};

static void open_model(Model *model, int i, int64_t B, int64_t T)
{
    Error error;
    ModelSpec spec = {.config = {.arch = CASES[i].arch, .L = 2, .C = 32, .NH = 4, .V = VOCAB, .T = T, .tied = true},
                      .recipe = recipe_defaults(CASES[i].precision, MASTER_DEFAULT),
                      .B = B,
                      .micro_steps = 1,
                      .document_mask = CASES[i].mask,
                      .eot_token = 7};
    spec.config.init_std = 0.3f; /* far from uniform, so that the loss depends on the context */
    spec.config.embedding_init_std = CASES[i].arch == ARCH_GPT2 ? 0.3f : 1;
    if (CASES[i].arch != ARCH_GPT2) spec.config.rope_theta = 10000;
    if (config_finish(&spec.config, &error) || model_open(model, &spec, ops, &error)) die("%s", error.text);
    zero_init_params(&model->zero, 5);
    gpt_enter_step(&model->gpt, 0);
}

/* Sixty questions of different lengths, the longest a sequence of 32; each with the label that `labels` says. */
static void write_questions(const int *labels)
{
    builder.count = builder.examples = 0;
    for (uint32_t i = 0; i < 60; i++) {
        uint32_t lengths[4];
        for (uint32_t k = 0; k < 4; k++) lengths[k] = 1 + philox4x32(10, i, k, 2, 0, 0, 1).word[0] % 12;
        put_example(UINT16_MAX, 2, labels ? (uint32_t)labels[i] : i % 4, 1 + i * 7 % 20, lengths, 4, VOCAB);
    }
    write_file(1, builder.examples);
}

typedef struct {
    int by_mean, by_sum;
} Answers;

/* The long way: every completion alone in a batch of one, whose losses a plain loop adds. */
static void answers_of(Model *model, const HellaSwag *file, Answers *answers)
{
    int64_t T = model->spec.config.T;
    int32_t *tokens = xcalloc((size_t)T + 1, sizeof *tokens);
    float *losses = xcalloc((size_t)T, sizeof *losses);
    for (int64_t i = 0; i < file->examples; i++) {
        HellaSwagExample e;
        double least_mean = INFINITY, least_sum = INFINITY;
        hellaswag_example(file, i, &e);
        for (int k = 0; k < e.completions; k++) {
            int64_t count = hellaswag_tokens(file, &e, k, tokens);
            for (int64_t t = count; t <= T; t++) tokens[t] = 9 + k; /* whatever follows */
            Batch batch = model_upload(model, 0, tokens, tokens + 1);
            gpt_evaluate(&model->gpt, &batch);
            ops->copy_out(losses, model->gpt.acts.losses.data, (size_t)T * sizeof *losses);
            double sum = 0;
            for (int64_t t = e.context_tokens; t < count; t++) sum += (double)losses[t - 1];
            if (sum < least_sum) least_sum = sum, answers[i].by_sum = k;
            if (sum / (double)e.completion_tokens[k] < least_mean)
                least_mean = sum / (double)e.completion_tokens[k], answers[i].by_mean = k;
        }
    }
    free(tokens);
    free(losses);
}

static ChoiceEvaluation evaluated(int i, int64_t B, int64_t T)
{
    Model model;
    HellaSwag file;
    Error error = {""};
    ChoiceEvaluation result = {0};
    open_model(&model, i, B, T);
    if (hellaswag_open(&file, path, &error)) die("%s", error.text);
    CHECK(evaluate_choices(&model, &file, &result, &error) == 0, "%s", error.text);
    hellaswag_close(&file);
    model_close(&model);
    return result;
}

static void test_answers(void)
{
    enum { T = 31 };
    for (int i = 0; i < (int)(sizeof CASES / sizeof *CASES); i++) {
        char *name = xformat("answers: in batches as alone: %s", CASES[i].name);
        test_case(name);
        free(name);
        Model model;
        HellaSwag file;
        Error error;
        Answers answers[60];
        int right_mean = 0, right_sum = 0, differ = 0, labels[60];
        write_questions(NULL);
        open_model(&model, i, 1, T);
        if (hellaswag_open(&file, path, &error)) die("%s", error.text);
        answers_of(&model, &file, answers);
        for (int q = 0; q < 60; q++) {
            right_mean += answers[q].by_mean == q % 4;
            right_sum += answers[q].by_sum == q % 4;
            differ += answers[q].by_mean != answers[q].by_sum;
        }
        hellaswag_close(&file);
        model_close(&model);
        CHECK(differ > 5, "mean and sum agree on all but %d: they prove little apart", differ);
        for (int64_t B = 1; B <= 9; B += B == 1 ? 2 : 3) {
            ChoiceEvaluation r = evaluated(i, B, T);
            CHECK(r.examples == 60 && r.skipped == 0 && r.by_mean == right_mean && r.by_sum == right_sum,
                  "batch %lld: %lld by mean, %lld by sum of %lld; alone %d and %d", (long long)B, (long long)r.by_mean,
                  (long long)r.by_sum, (long long)r.examples, right_mean, right_sum);
        }
        for (int q = 0; q < 60; q++) labels[q] = answers[q].by_mean;
        write_questions(labels);
        ChoiceEvaluation all = evaluated(i, 4, T);
        CHECK(all.by_mean == 60 && all.by_sum == 60 - differ, "its own answers: %lld by mean", (long long)all.by_mean);

        int64_t fit = 0;
        if (hellaswag_open(&file, path, &error)) die("%s", error.text);
        for (int64_t q = 0; q < 60; q++) {
            HellaSwagExample e;
            hellaswag_example(&file, q, &e);
            fit += hellaswag_longest(&e) <= 17;
        }
        hellaswag_close(&file);
        ChoiceEvaluation some = evaluated(i, 4, 16);
        CHECK(fit > 5 && fit < 55 && some.examples == fit && some.skipped == 60 - fit,
              "context 16: %lld answered, %lld skipped, %lld fit", (long long)some.examples, (long long)some.skipped,
              (long long)fit);
    }
}

static void test_refused_questions(void)
{
    Model model;
    HellaSwag file;
    Error error = {""};
    ChoiceEvaluation result;
    test_case("answers: ids beyond the vocabulary, and questions that all are too long");
    open_model(&model, 0, 2, 4);
    build(1, VOCAB);
    builder.words[7] = VOCAB;
    write_file(1, 3);
    if (hellaswag_open(&file, path, &error)) die("%s", error.text);
    CHECK(evaluate_choices(&model, &file, &result, &error) == -1 && strstr(error.text, "token 300"), "%s", error.text);
    hellaswag_close(&file);
    builder.count = builder.examples = 0;
    put_example(UINT16_MAX, 2, 0, 4, (const uint32_t[]){2, 1}, 2, VOCAB);
    write_file(1, 1);
    if (hellaswag_open(&file, path, &error)) die("%s", error.text);
    CHECK(evaluate_choices(&model, &file, &result, &error) == -1 && strstr(error.text, "context of 4"), "%s",
          error.text);
    hellaswag_close(&file);
    model_close(&model);
}

int main(void)
{
    Error error;
    if (cpu_open(&ops, "auto", 1, &error)) die("%s", error.text);
    folder = test_folder();
    snprintf(path, sizeof path, "%s/questions.bin", folder);
    test_formats();
    test_lies();
    test_mutations();
    test_answers();
    test_refused_questions();
    test_folder_remove(folder);
    return test_done();
}
