/* See quantize.h. */
#include "quantize.h"

#include "file.h"
#include "hf.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {     /* one tensor and what became of it; arrays owned */
    float *x;        /* [rows, cols] as quantized: after transpose and RHT */
    uint8_t *codes;  /* [rows, cols] */
    uint8_t *packed; /* [rows, ceil(cols / 2)] */
    uint8_t *scales; /* [rows, blocks] */
    int64_t rows, cols, blocks;
    Nvfp4Form form;
    Nvfp4Scale scale;
} Quantized;

typedef struct {
    int64_t finite, zeroed, saturated, nans, infs, scale_blocks, zero_blocks;
    double error, power;     /* sums of (value - x)^2 and x^2 over finite x */
    int64_t histogram[0x7f]; /* blocks by scale byte: the positive E4M3 values */
} Statistics;

/* ---- reading ---- */

static int read_raw(Quantized *q, const Options *o, Error *error)
{
    size_t bytes;
    void *map = file_map(o->input, &bytes, error);
    if (!map) return -1;
    int64_t count = (int64_t)(bytes / sizeof(float));
    q->rows = o->rows;
    q->cols = o->cols;
    bool fits = bytes % sizeof(float) == 0 && count % q->cols == 0 && count / q->cols == q->rows;
    if (fits) q->x = memcpy(xmalloc(bytes), map, bytes);
    file_unmap(map, bytes);
    if (fits) return 0;
    return error_set(error, "%s: holds %zu bytes, not 4 x --rows %" PRId64 " x --cols %" PRId64 "; correct the shape",
                     o->input, bytes, q->rows, q->cols);
}

/* "F has no tensor N; it has a, b, c, ... (12 in all)" */
static int no_tensor(const StFile *file, const Options *o, Error *error)
{
    char *names = xstrdup("");
    for (int64_t i = 0; i < min_i64(file->count, 5); i++) {
        char *longer = xformat("%s%s%.80s", names, i ? ", " : "", file->by_name[i]->name);
        free(names);
        names = longer;
    }
    error_set(error, "%s: has no tensor \"%.200s\"; it has %s%s (%" PRId64 " in all)", o->input, o->tensor, names,
              file->count > 5 ? ", ..." : "", file->count);
    free(names);
    return -1;
}

static int take_tensor(Quantized *q, const StTensor *t, const Options *o, Error *error)
{
    if (t->dtype != ST_F32 && t->dtype != ST_BF16)
        return error_set(error, "%s: tensor %s is %s; only F32 and BF16 can be quantized", o->input, t->name,
                         st_dtype_name(t->dtype));
    if (t->rank != 1 && t->rank != 2)
        return error_set(error, "%s: tensor %s has %d dimensions; only 1 and 2 can be quantized", o->input, t->name,
                         t->rank);
    q->rows = t->rank == 2 ? t->shape[0] : 1;
    q->cols = t->shape[t->rank - 1];
    int64_t count = q->rows * q->cols;
    if (count == 0) return error_set(error, "%s: tensor %s is empty; choose another", o->input, t->name);

    q->x = xmalloc((size_t)count * sizeof *q->x);
    hf_elements(q->x, t, 0, count, t->dtype == ST_BF16);
    return 0;
}

static int read_input(Quantized *q, const Options *o, Error *error)
{
    StFile file;
    if (!*o->tensor) return read_raw(q, o, error);
    if (st_open(&file, o->input, error)) return -1;
    const StTensor *t = st_find(&file, o->tensor);
    int status = t ? take_tensor(q, t, o, error) : no_tensor(&file, o, error);
    st_close(&file);
    return status;
}

/* ---- quantizing ---- */

static void turn(Quantized *q)
{
    float *turned = xmalloc((size_t)(q->rows * q->cols) * sizeof *turned);
    for (int64_t r = 0; r < q->rows; r++)
        for (int64_t c = 0; c < q->cols; c++) turned[c * q->rows + r] = q->x[r * q->cols + c];
    int64_t rows = q->rows;
    free(q->x);
    q->x = turned;
    q->rows = q->cols;
    q->cols = rows;
}

static int quantize(Quantized *q, const Options *o, Error *error)
{
    if (o->transpose) turn(q);
    if (o->quantize_rht && q->cols % NVFP4_BLOCK)
        return error_set(error, "%s: --rht on needs columns in groups of 16, here %" PRId64 "%s; leave it off",
                         o->input, q->cols, o->transpose ? " after --transpose" : "");
    q->blocks = ceil_div(q->cols, NVFP4_BLOCK);
    q->codes = xmalloc((size_t)(q->rows * q->cols));
    q->packed = xmalloc((size_t)(q->rows * ceil_div(q->cols, 2)));
    q->scales = xmalloc((size_t)(q->rows * q->blocks));
    q->form = (Nvfp4Form){.rounding = o->rounding,
                          .block = o->blocks,
                          .tensor_scale = o->recipe.tensor_scale,
                          .four_over_six = o->quantize_four_over_six,
                          .headroom = 1};
    Nvfp4Place place = {.seed = (uint64_t)o->seed, .row0 = (uint32_t)o->row0};

    for (int64_t i = 0; o->quantize_rht && i < q->rows * q->cols; i += NVFP4_BLOCK) nvfp4_rht16(q->x + i);
    q->scale = nvfp4_quantize(q->codes, q->scales, q->x, q->rows, q->cols, &q->form, &place);
    /* Here NaN is counted and Inf is looked at, not spread over the tensor. */
    q->scale.stored = q->form.tensor_scale == TENSOR_SCALE_POW2 ? q->scale.decode : q->scale.amax;
    nvfp4_pack(q->packed, q->codes, q->rows, q->cols);
    return 0;
}

/* ---- statistics ---- */

/* What the values of the block that starts in row r0 were multiplied with. */
static float encode_scale(const Quantized *q, int64_t r0, int64_t rows, int64_t block)
{
    float encode = nvfp4_encode_block(q->scales[r0 * q->blocks + block], q->scale.decode), amax = 0;
    if (q->form.tensor_scale == TENSOR_SCALE_AMAX) return encode;
    for (int64_t r = r0; r < r0 + rows; r++) {
        int64_t c = block * NVFP4_BLOCK;
        amax = f32_max(nvfp4_amax(q->x + r * q->cols + c, min_i64(NVFP4_BLOCK, q->cols - c), NULL), amax);
    }
    nvfp4_block_scale(amax, &q->scale, &q->form, &encode);
    return encode;
}

static void count_value(Statistics *s, float x, float value, float encode)
{
    double d = (double)value - (double)x;
    s->nans += isnan(x) != 0;
    s->infs += isinf(x) != 0; /* -1 for -Inf */
    s->zeroed += isfinite(x) && x != 0 && value == 0;
    s->saturated += f32_abs(f32_mul(x, encode)) > 6;
    if (!isfinite(x)) return;
    s->finite++;
    s->error += d * d;
    s->power += (double)x * (double)x;
}

static Statistics measure(const Quantized *q)
{
    Statistics s = {0};
    int64_t height = q->form.block == SCALE_16X16 ? NVFP4_BLOCK : 1;
    for (int64_t r0 = 0; r0 < q->rows; r0 += height)
        for (int64_t b = 0; b < q->blocks; b++) {
            int64_t rows = min_i64(height, q->rows - r0), end = min_i64(q->cols, (b + 1) * NVFP4_BLOCK);
            uint8_t byte = q->scales[r0 * q->blocks + b];
            float encode = encode_scale(q, r0, rows, b), decode = nvfp4_decode_scale(byte, q->scale.stored, &q->form);
            for (int64_t r = r0; r < r0 + rows; r++)
                for (int64_t c = b * NVFP4_BLOCK; c < end; c++)
                    count_value(&s, q->x[r * q->cols + c], f32_mul(e2m1_to_f32(q->codes[r * q->cols + c]), decode),
                                encode);
            s.scale_blocks++;
            s.zero_blocks += byte == 0;
            s.histogram[byte]++;
        }
    return s;
}

static double relative_mse(const Statistics *s)
{
    if (!s->finite || isnan(s->error)) return (double)NAN;
    return s->error == 0 ? 0 : s->error / s->power;
}
static double snr_db(const Statistics *s) { return -10 * log10(relative_mse(s)); }

static void print_share(const char *what, int64_t count, int64_t of)
{
    printf("%-16s %7.3f%%  (%" PRId64 " of %" PRId64 ")\n", what, 100 * (double)count / (double)of, count, of);
}

/* Blocks by the exponent of their scale; those of scale 0 stand above. */
static void print_histogram(const Statistics *s)
{
    printf("\nblock scales\n");
    for (int exponent = 0; exponent < 16; exponent++) {
        int first = exponent ? 8 * exponent : 1, last = exponent < 15 ? 8 * exponent + 7 : 0x7e;
        int64_t count = 0;
        char range[32];
        for (int byte = first; byte <= last; byte++) count += s->histogram[byte];
        snprintf(range, sizeof range, "%g .. %g", (double)e4m3_to_f32((uint8_t)first),
                 (double)e4m3_to_f32((uint8_t)last));
        if (count) print_share(range, count, s->scale_blocks);
    }
}

static void print_statistics(const Quantized *q, const Statistics *s)
{
    int64_t n = q->rows * q->cols;
    printf("[%" PRId64 ", %" PRId64 "], amax %g, encode scale %g, decode scale %g\n", q->rows, q->cols,
           (double)q->scale.amax, (double)q->scale.encode, (double)q->scale.decode);
    printf("%-16s %.6g\n%-16s %.2f dB\n", "relative MSE", relative_mse(s), "SNR", snr_db(s));
    print_share("zeroed", s->zeroed, n);
    print_share("saturated", s->saturated, n);
    print_share("zero blocks", s->zero_blocks, s->scale_blocks);
    if (s->nans + s->infs) print_share("NaN or infinite", s->nans + s->infs, n);
    print_histogram(s);
}

/* ---- writing ---- */

static void add_scale(Json *json, const char *key, float value)
{
    char *name = xformat("%s_bits", key), *bits = xformat("0x%08" PRIx32, f32_bits(value));
    json_add_float(json, key, (double)value);
    json_add_string(json, name, bits);
    free(name);
    free(bits);
}

/* Owned by the caller. */
static char *json_text(const Quantized *q, const Statistics *s)
{
    Json *json = json_new_object();
    double n = (double)(q->rows * q->cols);
    json_add_int(json, "rows", q->rows);
    json_add_int(json, "cols", q->cols);
    add_scale(json, "amax", q->scale.amax);
    add_scale(json, "encode_scale", q->scale.encode);
    add_scale(json, "decode_scale", q->scale.decode);
    json_add_double(json, "relative_mse", relative_mse(s));
    json_add_double(json, "snr_db", snr_db(s));
    json_add_double(json, "zeroed", (double)s->zeroed / n);
    json_add_double(json, "saturated", (double)s->saturated / n);
    json_add_double(json, "zero_blocks", (double)s->zero_blocks / (double)s->scale_blocks);
    json_add_int(json, "nan", s->nans);
    json_add_int(json, "inf", s->infs);
    Json *histogram = json_add_array(json, "scale_histogram"); /* blocks by scale byte */
    for (int byte = 0; byte < 0x7f; byte++) json_append_int(histogram, s->histogram[byte]);
    char *text = json_print(json, true), *line = xformat("%s\n", text);
    free(text);
    json_free(json);
    return line;
}

typedef struct {
    const char *suffix;
    const void *data;
    size_t bytes;
} Output;
enum { OUTPUTS = 4 };

/* All under other names first, so that what stands under the prefix is complete; taken back when a rename fails. */
static int write_outputs(const char *prefix, const Output out[OUTPUTS], Error *error)
{
    char *path[OUTPUTS], *fresh[OUTPUTS];
    int status = 0, renamed = 0;
    for (int i = 0; i < OUTPUTS; i++) {
        path[i] = xformat("%s.%s", prefix, out[i].suffix);
        fresh[i] = xformat("%s.tmp", path[i]);
    }
    for (int i = 0; i < OUTPUTS && !status; i++) status = file_write_new(fresh[i], out[i].data, out[i].bytes, error);
    for (; renamed < OUTPUTS && !status; renamed += !status)
        if (rename(fresh[renamed], path[renamed]))
            status = error_set(error, "cannot write %s: %s; check --output", path[renamed], strerror(errno));
    for (int i = 0; i < OUTPUTS; i++) {
        if (status) remove(i < renamed ? path[i] : fresh[i]);
        free(path[i]);
        free(fresh[i]);
    }
    return status;
}

int quantize_file(const Options *o, Error *error)
{
    Quantized q = {0};
    int status = read_input(&q, o, error);
    if (!status) status = quantize(&q, o, error);
    if (!status) {
        Statistics s = measure(&q);
        char *json = json_text(&q, &s);
        Output out[OUTPUTS] = {{"codes", q.codes, (size_t)(q.rows * q.cols)},
                               {"packed", q.packed, (size_t)(q.rows * ceil_div(q.cols, 2))},
                               {"scales", q.scales, (size_t)(q.rows * q.blocks)},
                               {"json", json, strlen(json)}};
        status = write_outputs(o->output, out, error);
        if (!status) print_statistics(&q, &s);
        free(json);
    }
    free(q.x);
    free(q.codes);
    free(q.packed);
    free(q.scales);
    return status;
}
