/* Files of tokens: one reader for the formats in use, and the writer.
 *
 *     llm.c, GPT-2     int32[256] header {20240520, 1, tokens, 0...}   then uint16 tokens
 *     llm.c, Llama-3   int32[256] header {20240801, 7, tokens, 0...}   then uint32 tokens
 *     nanoGPT          no header, uint16 tokens to the end of the file
 *
 * A file is mapped, never read whole; counts and offsets are 64-bit. The header's token count is int32 in the format;
 * it must agree with the size of the file (a shard over 2^31 tokens cannot be written in these formats). A file without
 * either magic number is taken as raw uint16 if its size is even and its beginning is not plain text.
 *
 * Formats: karpathy/llm.c dev/data/data_common.py and llmc/dataloader.h; karpathy/nanoGPT data/openwebtext/prepare.py.
 * Floor 1.
 */
#ifndef LLMC_TOKEN_FILE_H
#define LLMC_TOKEN_FILE_H

#include "common.h"

C_BEGIN

typedef struct {
    char *path;
    int64_t tokens;
    int token_bytes;  /* 2 or 4 */
    bool raw;         /* no header: taken as uint16 */
    const void *data; /* first token, in the mapping */
    void *map;        /* private */
    size_t map_bytes;
} TokenFile;

int token_file_open(TokenFile *file, const char *path, Error *error); /* 0, or -1 with the reason */
void token_file_close(TokenFile *file);
void token_file_read(const TokenFile *file, int64_t first, int64_t count, int32_t *out); /* within bounds, or dies */

/* A pattern of files ("data/fineweb/train_*.bin", or several separated by commas), sorted by name, opened.
 * 0 and *files (owned by the caller, freed by token_files_close), or -1 with the reason (no match, broken file). */
int token_files_open(TokenFile **files, int64_t *count, const char *pattern, Error *error);
void token_files_close(TokenFile *files, int64_t count);

/* Writes v1 (uint16) or v7 (uint32), by token_bytes, beside the path and renames. Streams: open, append, close. */
typedef struct TokenWriter TokenWriter;
TokenWriter *token_writer_open(const char *path, int token_bytes, Error *error); /* NULL with the reason */
int token_writer_append(TokenWriter *w, const int32_t *tokens, int64_t count, Error *error);
int token_writer_close(TokenWriter *w, Error *error); /* header, fsync, rename; frees w in any case */
void token_writer_abandon(TokenWriter *w);            /* removes what was written; frees w */

C_END
#endif
