/* Files of tokens: see token_file.h for the formats. The reader trusts nothing in a header that the file's size does
 * not confirm; the writer puts the count into the header last and renames, so a reader never sees half a file. */
#include "token_file.h"

#include "file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { HEADER_INTS = 256, HEADER_BYTES = 4 * HEADER_INTS, PIECE_TOKENS = 4096 };

typedef struct {
    int32_t magic, version;
    int token_bytes;
} TokenFormat;

static const TokenFormat FORMATS[] = {{20240520, 1, 2}, {20240801, 7, 4}};
enum { FORMAT_COUNT = sizeof FORMATS / sizeof FORMATS[0] };

/* ---- reading ---- */

/* A file whose first integer is a format's magic number. */
static int read_header(TokenFile *file, const TokenFormat *format, Error *error)
{
    int32_t header[3]; /* magic, version, tokens */
    if (file->map_bytes < HEADER_BYTES)
        return error_set(error, "%s: truncated: %zu bytes, shorter than its header of %d", file->path, file->map_bytes,
                         HEADER_BYTES);
    memcpy(header, file->map, sizeof header);
    if (header[1] != format->version)
        return error_set(error, "%s: token file version %" PRId32 ", this program reads %" PRId32, file->path,
                         header[1], format->version);
    uint64_t body_bytes = file->map_bytes - HEADER_BYTES;
    if (header[2] <= 0 || body_bytes != (uint64_t)header[2] * (uint64_t)format->token_bytes)
        return error_set(error,
                         "%s: the header says %" PRId32 " tokens of %d bytes, but %" PRIu64
                         " bytes follow it; make the file again",
                         file->path, header[2], format->token_bytes, body_bytes);
    file->tokens = header[2];
    file->token_bytes = format->token_bytes;
    file->data = (const char *)file->map + HEADER_BYTES;
    return 0;
}

/* Printable ASCII and white space only, as far as 4 kB go. */
static bool is_text(const unsigned char *data, size_t bytes)
{
    for (size_t i = 0; i < bytes && i < 4096; i++)
        if (data[i] > 126 || (data[i] < 32 && !strchr("\t\n\v\f\r", data[i])) || data[i] == 0) return false;
    return true;
}

static int read_format(TokenFile *file, Error *error)
{
    int32_t magic = 0;
    if (file->map_bytes >= sizeof magic) memcpy(&magic, file->map, sizeof magic);
    for (int i = 0; i < FORMAT_COUNT; i++)
        if (magic == FORMATS[i].magic) return read_header(file, &FORMATS[i], error);
    if (file->map_bytes % 2)
        return error_set(error, "%s: not a token file: no known header, and an odd size (%zu bytes)", file->path,
                         file->map_bytes);
    if (is_text(file->map, file->map_bytes))
        return error_set(error, "%s: this is text, not tokens; make a token file of it with the verb tokenize",
                         file->path);
    file->raw = true;
    file->tokens = (int64_t)(file->map_bytes / 2);
    file->token_bytes = 2;
    file->data = file->map;
    return 0;
}

int token_file_open(TokenFile *file, const char *path, Error *error)
{
    *file = (TokenFile){0};
    file->map = file_map(path, &file->map_bytes, error);
    if (!file->map) return -1;
    file->path = xstrdup(path);
    if (read_format(file, error) == 0) return 0;
    token_file_close(file);
    return -1;
}

void token_file_close(TokenFile *file)
{
    file_unmap(file->map, file->map_bytes);
    free(file->path);
    *file = (TokenFile){0};
}

void token_file_read(const TokenFile *file, int64_t first, int64_t count, int32_t *out)
{
    if (first < 0 || count < 0 || count > file->tokens || first > file->tokens - count)
        die("%s: tokens %" PRId64 " to %" PRId64 " asked for, it holds %" PRId64, file->path, first, first + count,
            file->tokens);
    if (file->token_bytes == 2) {
        const uint16_t *in = (const uint16_t *)file->data + first;
        for (int64_t i = 0; i < count; i++) out[i] = in[i];
    } else {
        memcpy(out, (const int32_t *)file->data + first, (size_t)count * sizeof *out);
    }
}

int token_files_open(TokenFile **files, int64_t *count, const char *pattern, Error *error)
{
    char **paths;
    int64_t path_count, opened = 0;
    if (file_list(pattern, &paths, &path_count, error)) return -1;
    *files = xcalloc((size_t)path_count, sizeof **files);
    while (opened < path_count && token_file_open(&(*files)[opened], paths[opened], error) == 0) opened++;
    file_list_free(paths, path_count);
    *count = opened;
    if (opened == path_count) return 0;
    token_files_close(*files, opened);
    *files = NULL;
    *count = 0;
    return -1;
}

void token_files_close(TokenFile *files, int64_t count)
{
    for (int64_t i = 0; i < count; i++) token_file_close(&files[i]);
    free(files);
}

/* ---- writing ---- */

struct TokenWriter {
    char *path, *temporary; /* written under the second name, renamed to the first */
    FILE *stream;
    const TokenFormat *format;
    int64_t tokens; /* so far */
};

static int write_header(TokenWriter *w, Error *error)
{
    int32_t header[HEADER_INTS] = {w->format->magic, w->format->version, (int32_t)w->tokens};
    if (fseeko(w->stream, 0, SEEK_SET)) return error_set(error, "cannot write %s: %s", w->temporary, strerror(errno));
    return file_write(w->stream, w->temporary, header, sizeof header, error);
}

static void free_writer(TokenWriter *w)
{
    free(w->path);
    free(w->temporary);
    free(w);
}

TokenWriter *token_writer_open(const char *path, int token_bytes, Error *error)
{
    TokenWriter *w = xcalloc(1, sizeof *w);
    w->format = &FORMATS[token_bytes == 4];
    w->path = xstrdup(path);
    w->temporary = xformat("%s.tmp", path);
    w->stream = fopen(w->temporary, "wb");
    if (!w->stream) {
        error_set(error, "cannot write %s: %s", w->temporary, strerror(errno));
        free_writer(w);
        return NULL;
    }
    if (write_header(w, error) == 0) return w;
    token_writer_abandon(w);
    return NULL;
}

int token_writer_append(TokenWriter *w, const int32_t *tokens, int64_t count, Error *error)
{
    uint16_t piece[PIECE_TOKENS];
    const int32_t largest = w->format->token_bytes == 2 ? UINT16_MAX : INT32_MAX;
    if (count > INT32_MAX - w->tokens)
        return error_set(error, "%s: a token file holds at most %d tokens; split the input over several files", w->path,
                         INT32_MAX);
    for (int64_t i = 0; i < count; i++)
        if (tokens[i] < 0 || tokens[i] > largest)
            return error_set(error, "%s: token %" PRId32 " does not fit into %d bytes", w->path, tokens[i],
                             w->format->token_bytes);
    w->tokens += count;
    if (w->format->token_bytes == 4)
        return file_write(w->stream, w->temporary, tokens, (size_t)count * sizeof *tokens, error);
    for (int64_t first = 0; first < count; first += PIECE_TOKENS) {
        int64_t length = min_i64(PIECE_TOKENS, count - first);
        for (int64_t i = 0; i < length; i++) piece[i] = (uint16_t)tokens[first + i];
        if (file_write(w->stream, w->temporary, piece, (size_t)length * sizeof *piece, error)) return -1;
    }
    return 0;
}

int token_writer_close(TokenWriter *w, Error *error)
{
    int result = w->tokens > 0 ? write_header(w, error) : error_set(error, "%s: no tokens to write", w->path);
    if (result) {
        token_writer_abandon(w);
        return -1;
    }
    result = file_finish(w->stream, w->temporary, error);
    if (result == 0 && rename(w->temporary, w->path))
        result = error_set(error, "cannot rename %s to %s: %s", w->temporary, w->path, strerror(errno));
    if (result) remove(w->temporary);
    free_writer(w);
    return result;
}

void token_writer_abandon(TokenWriter *w)
{
    fclose(w->stream);
    remove(w->temporary);
    free_writer(w);
}
