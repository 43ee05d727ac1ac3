/* safetensors: see safetensors.h for the format. Files come from strangers, so the reader proves the whole header
 * consistent with the file's size before it hands out a pointer; the writer lets its user send exactly what the header
 * promised. */
#include "safetensors.h"

#include "file.h"
#include "json.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_HEADER_BYTES = 100 * 1000 * 1000, LENGTH_BYTES = 8 };
static const char METADATA[] = "__metadata__";

static const struct {
    const char *name;
    size_t bytes;
} DTYPES[ST_DTYPE_COUNT] = {
    [ST_F32] = {"F32", 4},         [ST_F16] = {"F16", 2}, [ST_BF16] = {"BF16", 2}, [ST_F8_E4M3] = {"F8_E4M3", 1},
    [ST_F8_E5M2] = {"F8_E5M2", 1}, [ST_U8] = {"U8", 1},   [ST_I32] = {"I32", 4},   [ST_I64] = {"I64", 8},
};

size_t st_dtype_bytes(StDType dtype) { return DTYPES[dtype].bytes; }
const char *st_dtype_name(StDType dtype) { return DTYPES[dtype].name; }

/* product(shape) x dtype size; false when a size is negative or the product, even without zero sizes, exceeds int64. */
static bool shape_bytes(StDType dtype, int rank, const int64_t *shape, int64_t *bytes)
{
    int64_t product = (int64_t)st_dtype_bytes(dtype);
    bool empty = false, overflow = false;
    for (int i = 0; i < rank; i++) {
        if (shape[i] < 0) return false;
        if (shape[i] == 0)
            empty = true;
        else
            overflow |= __builtin_mul_overflow(product, shape[i], &product);
    }
    *bytes = empty ? 0 : product;
    return !overflow;
}

/* ---- reading ---- */

typedef struct {
    const char *path;
    const unsigned char *data; /* [bytes], what follows the header */
    int64_t bytes;
    Error *error;
} Buffer;

static int entry_error(const Buffer *b, const Json *entry, const char *what)
{
    return error_set(b->error, "%s: tensor \"%s\": %s", b->path, json_key(entry), what);
}

static bool read_dtype(const Json *json, StDType *dtype)
{
    const char *name = json_string(json);
    for (int i = 0; name && i < ST_DTYPE_COUNT; i++) {
        if (strcmp(name, DTYPES[i].name) != 0) continue;
        *dtype = (StDType)i;
        return true;
    }
    return false;
}

/* An array of at most `room` whole numbers >= 0; their count, or -1. */
static int read_sizes(const Json *json, int room, int64_t *out)
{
    int count = 0;
    if (!json || json_type(json) != JSON_ARRAY) return -1;
    for (const Json *item = json_first(json); item; item = json_next(item), count++)
        if (count == room || !json_int(item, &out[count]) || out[count] < 0) return -1;
    return count;
}

static int read_entry(const Buffer *b, const Json *entry, StTensor *tensor)
{
    int64_t offsets[2], bytes;
    if (json_type(entry) != JSON_OBJECT) return entry_error(b, entry, "its entry is not an object");
    if (!read_dtype(json_get(entry, "dtype"), &tensor->dtype))
        return entry_error(b, entry, "its dtype is missing or none of F32 F16 BF16 F8_E4M3 F8_E5M2 U8 I32 I64");
    tensor->rank = read_sizes(json_get(entry, "shape"), ST_MAX_RANK, tensor->shape);
    if (tensor->rank < 0) return entry_error(b, entry, "its shape is not an array of at most 8 sizes");
    if (!shape_bytes(tensor->dtype, tensor->rank, tensor->shape, &bytes))
        return entry_error(b, entry, "the product of its shape does not fit 63 bits");
    if (read_sizes(json_get(entry, "data_offsets"), 2, offsets) != 2)
        return entry_error(b, entry, "its data_offsets are not [begin, end]");
    if (offsets[0] > offsets[1] || offsets[1] > b->bytes)
        return entry_error(b, entry, "its data_offsets point outside the file (is the file truncated?)");
    if (offsets[1] - offsets[0] != bytes) return entry_error(b, entry, "its data_offsets do not fit its shape");
    tensor->name = xstrdup(json_key(entry));
    tensor->data = b->data + offsets[0];
    tensor->bytes = (size_t)bytes;
    return 0;
}

static int read_metadata(const Buffer *b, const Json *json, StFile *file)
{
    size_t at = 0;
    if (json_type(json) != JSON_OBJECT) return error_set(b->error, "%s: %s is not an object", b->path, METADATA);
    file->metadata = xrealloc(file->metadata, (2 * (size_t)json_count(json) + 1) * sizeof *file->metadata);
    for (const Json *item = json_first(json); item; item = json_next(item)) {
        if (!json_string(item))
            return error_set(b->error, "%s: %s: \"%s\" is not a string", b->path, METADATA, json_key(item));
        file->metadata[at++] = xstrdup(json_key(item));
        file->metadata[at++] = xstrdup(json_string(item));
        file->metadata[at] = NULL;
    }
    return 0;
}

/* By place in the file. */
static int compare_places(const void *a, const void *b)
{
    const StTensor *x = a, *y = b;
    const char *x_end = (const char *)x->data + x->bytes, *y_end = (const char *)y->data + y->bytes;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x_end > y_end) - (x_end < y_end);
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(StTensor *const *)a)->name, (*(StTensor *const *)b)->name);
}

/* Sorts the tensors; they must fill the buffer without holes or overlaps. */
static int check_layout(const Buffer *b, StFile *file)
{
    const unsigned char *end = b->data;
    qsort(file->tensor, (size_t)file->count, sizeof *file->tensor, compare_places);
    for (int64_t i = 0; i < file->count; i++) {
        const StTensor *tensor = &file->tensor[i];
        if (tensor->data != end)
            return error_set(b->error, "%s: a hole or an overlap in front of tensor \"%s\"", b->path, tensor->name);
        end += tensor->bytes;
    }
    if (end != b->data + b->bytes)
        return error_set(b->error, "%s: %" PRId64 " bytes after the last tensor", b->path,
                         (int64_t)(b->data + b->bytes - end));
    file->by_name = xcalloc((size_t)file->count, sizeof *file->by_name);
    for (int64_t i = 0; i < file->count; i++) file->by_name[i] = &file->tensor[i];
    qsort(file->by_name, (size_t)file->count, sizeof *file->by_name, compare_names);
    return 0;
}

static int read_header(const Buffer *b, const Json *header, StFile *file)
{
    if (json_type(header) != JSON_OBJECT) return error_set(b->error, "%s: the header is not an object", b->path);
    file->tensor = xcalloc((size_t)json_count(header), sizeof *file->tensor);
    file->metadata = xcalloc(1, sizeof *file->metadata);
    for (const Json *entry = json_first(header); entry; entry = json_next(entry)) {
        bool is_metadata = strcmp(json_key(entry), METADATA) == 0;
        if (is_metadata ? read_metadata(b, entry, file) : read_entry(b, entry, &file->tensor[file->count])) return -1;
        file->count += !is_metadata;
    }
    return check_layout(b, file);
}

int st_open(StFile *file, const char *path, Error *error)
{
    uint64_t header_bytes = 0;
    *file = (StFile){0};
    file->map = file_map(path, &file->map_bytes, error);
    if (!file->map) return -1;
    const unsigned char *map = file->map;
    if (file->map_bytes >= LENGTH_BYTES) memcpy(&header_bytes, map, LENGTH_BYTES);

    int result = -1;
    if (header_bytes == 0 || header_bytes > file->map_bytes - LENGTH_BYTES || header_bytes > MAX_HEADER_BYTES ||
        map[LENGTH_BYTES] != '{') {
        error_set(error, "%s: not a safetensors file, or truncated", path);
    } else {
        Buffer b = {path, map + LENGTH_BYTES + header_bytes, (int64_t)(file->map_bytes - LENGTH_BYTES - header_bytes),
                    error};
        Json *header = json_parse((const char *)map + LENGTH_BYTES, header_bytes, path, error);
        if (header) result = read_header(&b, header, file);
        json_free(header);
    }
    if (result) st_close(file);
    return result;
}

void st_close(StFile *file)
{
    for (int64_t i = 0; i < file->count; i++) free(file->tensor[i].name);
    for (char **text = file->metadata; text && *text; text++) free(*text);
    free(file->tensor);
    free(file->by_name);
    free(file->metadata);
    file_unmap(file->map, file->map_bytes);
    *file = (StFile){0};
}

const StTensor *st_find(const StFile *file, const char *name)
{
    int64_t low = 0, high = file->count;
    while (low < high) {
        int64_t middle = low + (high - low) / 2;
        int order = strcmp(name, file->by_name[middle]->name);
        if (order == 0) return file->by_name[middle];
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

const char *st_metadata(const StFile *file, const char *key)
{
    for (char **text = file->metadata; text && *text; text += 2)
        if (strcmp(text[0], key) == 0) return text[1];
    return NULL;
}

/* ---- writing ---- */

struct StWriter {
    Json *header, *metadata;   /* the second is a member of the first */
    int64_t declared, written; /* bytes of tensor data */
    char *path;
    FILE *stream; /* NULL before begin and after end */
};

StWriter *st_writer_new(void)
{
    StWriter *w = xcalloc(1, sizeof *w);
    w->header = json_new_object();
    w->metadata = json_add_object(w->header, METADATA);
    json_add_string(w->metadata, "format", "pt");
    return w;
}

void st_writer_add(StWriter *w, const char *name, StDType dtype, int rank, const int64_t *shape)
{
    int64_t bytes, end;
    if (rank < 0 || rank > ST_MAX_RANK || !shape_bytes(dtype, rank, shape, &bytes) ||
        __builtin_add_overflow(w->declared, bytes, &end))
        die("safetensors: tensor \"%s\" has an impossible shape", name);
    Json *entry = json_add_object(w->header, name);
    json_add_string(entry, "dtype", st_dtype_name(dtype));
    Json *sizes = json_add_array(entry, "shape");
    for (int i = 0; i < rank; i++) json_append_int(sizes, shape[i]);
    Json *offsets = json_add_array(entry, "data_offsets");
    json_append_int(offsets, w->declared);
    json_append_int(offsets, end);
    w->declared = end;
}

void st_writer_add_metadata(StWriter *w, const char *key, const char *value)
{
    json_add_string(w->metadata, key, value);
}

/* The header's text, padded so that the tensor data starts at a multiple of 8. Owned by the caller. */
static char *header_text(const StWriter *w)
{
    Error error = {""};
    char *text = json_print(w->header, false);
    Json *check = json_parse(text, strlen(text), "safetensors header", &error); /* finds a name added twice */
    if (!check) die("%s", error.text);
    json_free(check);
    int padding = (int)(round_up((int64_t)strlen(text), 8) - (int64_t)strlen(text));
    char *padded = xformat("%s%*s", text, padding, "");
    free(text);
    return padded;
}

int st_writer_begin(StWriter *w, const char *path, Error *error)
{
    w->path = xstrdup(path);
    w->stream = fopen(path, "wb");
    if (!w->stream) return error_set(error, "cannot write %s: %s", path, strerror(errno));
    char *text = header_text(w);
    uint64_t bytes = strlen(text);
    int result = file_write(w->stream, path, &bytes, LENGTH_BYTES, error);
    if (result == 0) result = file_write(w->stream, path, text, bytes, error);
    free(text);
    return result;
}

int st_writer_data(StWriter *w, const void *data, size_t bytes, Error *error)
{
    if (bytes > (uint64_t)(w->declared - w->written))
        return error_set(error, "%s: more tensor data than the %" PRId64 " bytes declared", w->path, w->declared);
    w->written += (int64_t)bytes;
    return file_write(w->stream, w->path, data, bytes, error);
}

int st_writer_end(StWriter *w, Error *error)
{
    if (w->written != w->declared)
        return error_set(error, "%s: %" PRId64 " bytes of tensor data written, %" PRId64 " declared", w->path,
                         w->written, w->declared);
    FILE *stream = w->stream;
    w->stream = NULL;
    return file_finish(stream, w->path, error);
}

void st_writer_free(StWriter *w)
{
    if (!w) return;
    if (w->stream) fclose(w->stream);
    json_free(w->header);
    free(w->path);
    free(w);
}
