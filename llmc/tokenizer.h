/* The byte tokenizer: token = byte, 256 = end of text. Vocabulary 257. Works on any file, needs none of its own.
 *
 * tokenize_files reads text in pieces of 1 MB and writes a token file (token_file.h): an end-of-text token, then the
 * file's bytes, for every input file in the order given (llm.c's convention: end-of-text comes before each document).
 *
 * Floor 1.
 */
#ifndef LLMC_TOKENIZER_H
#define LLMC_TOKENIZER_H

#include "common.h"

C_BEGIN

enum { BYTE_TOKENIZER_EOT = 256, BYTE_TOKENIZER_VOCAB = 257 };

/* Text to tokens: one a byte, no end-of-text. out has room for `bytes` tokens. */
void tokenizer_encode(const char *text, size_t bytes, int32_t *out);
/* One token to bytes: returns how many (1, or 0 for end-of-text and anything beyond the vocabulary). */
size_t tokenizer_decode(int32_t token, char out[1]);

/* A token as a reader sees it, to stdout: the byte, or for other vocabularies " id". */
void tokenizer_print(int32_t token, int64_t vocab);

/* `inputs`: a glob pattern, or several separated by commas; sorted by name within a pattern. Prints nothing. On success
 * fills *tokens and *files. 0, or -1 with the reason; an existing output is replaced only at the end (rename). */
int tokenize_files(const char *inputs, const char *output, int64_t *tokens, int64_t *files, Error *error);

C_END
#endif
