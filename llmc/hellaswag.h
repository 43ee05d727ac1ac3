/* HellaSwag: questions with several continuations, one of them right; llm.c's file of token ids, and the same in 32 bits.
 *
 *     int32[256]   {20240522, version, examples, bytes of the longest example, 0...}
 *     words        uint16 in version 1 (llm.c's), uint32 in version 2 (for ids from 65535 on: Llama-3, Qwen3)
 *
 * The words are the examples, one after the other:
 *
 *     | marker | bytes | index | label | completions | C | C ids | N0 | N0 ids | N1 | N1 ids | ... | next marker
 *
 *     marker        the largest word, 65535 or 2^32 - 1; never an id
 *     bytes         of the whole example, from its marker on
 *     index         its number in the data set; any (a file may hold a selection)
 *     label         which completion is right, from 0
 *     completions   4 in HellaSwag; 2 to HELLASWAG_COMPLETIONS are read (other multiple-choice sets use the same file)
 *     C, N          token counts, at least 1: of the context, which all share, and of each completion
 *
 * The whole file is checked when it is opened, so reading it afterwards cannot fail. Of the header the longest example is
 * not used and not checked. Whether the ids are below a model's vocabulary is the caller's question: largest_id.
 *
 * Format: karpathy/llm.c dev/data/data_common.py, write_evalfile; version 2 is this project's. Floor 1.
 */
#ifndef LLMC_HELLASWAG_H
#define LLMC_HELLASWAG_H

#include "common.h"

C_BEGIN

enum { HELLASWAG_COMPLETIONS = 16 };

typedef struct {
    char *path;
    int64_t examples;
    int64_t largest_id;
    int word_bytes;      /* 2 or 4 */
    const void *words;   /* in the mapping */
    int64_t *first_word; /* [examples]: places of the markers */
    void *map;           /* private */
    size_t map_bytes;
} HellaSwag;

int hellaswag_open(HellaSwag *file, const char *path, Error *error); /* 0, or -1 with the reason */
void hellaswag_close(HellaSwag *file);

typedef struct {
    int64_t index;
    int label, completions;
    int64_t context_tokens, completion_tokens[HELLASWAG_COMPLETIONS];
    int64_t context, completion[HELLASWAG_COMPLETIONS]; /* places of the first ids, in words */
} HellaSwagExample;

void hellaswag_example(const HellaSwag *file, int64_t i, HellaSwagExample *example); /* 0 <= i < examples */
/* The tokens of the longest of its sequences, context and completion. */
int64_t hellaswag_longest(const HellaSwagExample *example);
/* Context and completion k as one sequence; out has room for both. Returns their number. */
int64_t hellaswag_tokens(const HellaSwag *file, const HellaSwagExample *example, int k, int32_t *out);

C_END
#endif
