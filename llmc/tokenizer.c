/* The byte tokenizer: see tokenizer.h. It makes any file a corpus, so a first run needs no download. */
#include "tokenizer.h"

#include "file.h"
#include "token_file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

enum { PIECE_BYTES = 1 << 20 };

void tokenizer_encode(const char *text, size_t bytes, int32_t *out)
{
    for (size_t i = 0; i < bytes; i++) out[i] = (unsigned char)text[i];
}

size_t tokenizer_decode(int32_t token, char out[1])
{
    if (token < 0 || token >= BYTE_TOKENIZER_EOT) return 0;
    out[0] = (char)token;
    return 1;
}

/* End-of-text, then the file's bytes. text[PIECE_BYTES], tokens[PIECE_BYTES]: room for one piece. */
static int append_file(TokenWriter *w, const char *path, char *text, int32_t *tokens, int64_t *total, int64_t expected,
                       Error *error)
{
    const int32_t end_of_text = BYTE_TOKENIZER_EOT;
    FILE *stream = fopen(path, "rb");
    if (!stream) return error_set(error, "cannot open %s: %s", path, strerror(errno));
    int result = token_writer_append(w, &end_of_text, 1, error);
    *total += 1;
    for (size_t bytes; result == 0 && (bytes = fread(text, 1, PIECE_BYTES, stream)) > 0; *total += (int64_t)bytes) {
        progress("tokens", *total, expected);
        tokenizer_encode(text, bytes, tokens);
        result = token_writer_append(w, tokens, (int64_t)bytes, error);
    }
    if (result == 0 && ferror(stream)) result = error_set(error, "cannot read %s: %s", path, strerror(errno));
    fclose(stream);
    return result;
}

void tokenizer_print(int32_t token, int64_t vocab)
{
    char byte[1];
    if (vocab != BYTE_TOKENIZER_VOCAB)
        printf(" %" PRId32, token);
    else if (tokenizer_decode(token, byte))
        putchar(byte[0]);
    fflush(stdout);
}

int tokenize_files(const char *inputs, const char *output, int64_t *tokens, int64_t *files, Error *error)
{
    char **paths;
    int64_t count, total = 0, expected = 0;
    int result = 0;
    struct stat in, out;
    bool exists = stat(output, &out) == 0;
    if (file_list(inputs, &paths, &count, error)) return -1;
    for (int64_t i = 0; i < count; i++) {
        if (stat(paths[i], &in)) continue; /* append_file says why */
        expected += in.st_size + 1;
        if (exists && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
            result = error_set(error, "%s is input and output at once; choose another output", output);
    }

    TokenWriter *w = result ? NULL : token_writer_open(output, sizeof(uint16_t), error);
    if (!w) result = -1;
    char *text = xmalloc(PIECE_BYTES);
    int32_t *piece = xcalloc(PIECE_BYTES, sizeof *piece);
    for (int64_t i = 0; i < count && result == 0; i++)
        result = append_file(w, paths[i], text, piece, &total, expected, error);
    progress("tokens", expected, expected);
    if (w && result == 0)
        result = token_writer_close(w, error);
    else if (w)
        token_writer_abandon(w);

    free(piece);
    free(text);
    file_list_free(paths, count);
    if (result) return -1;
    *tokens = total;
    *files = count;
    return 0;
}
