/* Files of multiple-choice questions: see hellaswag.h for the format. One function reads an example, with every count
 * checked against the words that are there; opening runs it over the whole file, later calls repeat it. */
#include "hellaswag.h"

#include "file.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { MAGIC = 20240522, HEADER_BYTES = 1024, LEAST_WORDS = 10 }; /* of an example: two completions, all of one id */

static uint32_t word(const HellaSwag *file, int64_t i)
{
    return file->word_bytes == 2 ? ((const uint16_t *)file->words)[i] : ((const uint32_t *)file->words)[i];
}

static uint32_t marker(const HellaSwag *file) { return file->word_bytes == 2 ? UINT16_MAX : UINT32_MAX; }

/* A count and so many ids, before `end`: *count, place of the first id; *at moves behind them. */
static int read_ids(const HellaSwag *file, int64_t *at, int64_t end, int64_t *first, int64_t *count)
{
    if (*at >= end) return -1;
    *count = word(file, (*at)++);
    *first = *at;
    if (*count < 1 || *count > end - *at) return -1;
    *at += *count;
    return 0;
}

/* The example whose marker is word `at`, of `end` words in the file. Its length in words, or -1 with what is wrong. */
static int64_t read_example(const HellaSwag *file, int64_t at, int64_t end, HellaSwagExample *e, const char **wrong)
{
    *wrong = "is cut off";
    if (end - at < LEAST_WORDS) return -1;
    *wrong = "does not begin with the marker";
    if (word(file, at) != marker(file)) return -1;
    *wrong = "has a size that is not that of its words";
    uint32_t bytes = word(file, at + 1);
    int64_t words = bytes / (uint32_t)file->word_bytes, next = at + 5;
    if (bytes % (uint32_t)file->word_bytes || words < LEAST_WORDS || words > end - at) return -1;
    end = at + words;

    uint32_t label = word(file, at + 3), completions = word(file, at + 4);
    *wrong = "has a number of completions that this program does not read (2 to 16)";
    if (completions < 2 || completions > HELLASWAG_COMPLETIONS) return -1;
    *wrong = "has a label that is none of its completions";
    if (label >= completions) return -1;
    *e = (HellaSwagExample){.index = word(file, at + 2), .label = (int)label, .completions = (int)completions};

    *wrong = "has counts of tokens that are 0 or go beyond its end";
    if (read_ids(file, &next, end, &e->context, &e->context_tokens)) return -1;
    for (int k = 0; k < e->completions; k++)
        if (read_ids(file, &next, end, &e->completion[k], &e->completion_tokens[k])) return -1;
    *wrong = "has words that belong to nothing";
    return next == end ? words : -1;
}

static int64_t largest_of(const HellaSwag *file, int64_t first, int64_t count, int64_t largest)
{
    for (int64_t i = 0; i < count; i++) largest = max_i64(largest, word(file, first + i));
    return largest;
}

static int read_header(HellaSwag *file, Error *error)
{
    int32_t header[3]; /* magic, version, examples */
    if (file->map_bytes < HEADER_BYTES)
        return error_set(error, "%s: truncated: %zu bytes, shorter than its header of %d", file->path, file->map_bytes,
                         HEADER_BYTES);
    memcpy(header, file->map, sizeof header);
    if (header[0] != MAGIC)
        return error_set(error, "%s: not a file of multiple-choice questions: it begins with %" PRId32 ", not %d",
                         file->path, header[0], MAGIC);
    if (header[1] != 1 && header[1] != 2)
        return error_set(error, "%s: version %" PRId32 ", this program reads 1 (uint16) and 2 (uint32)", file->path,
                         header[1]);
    file->word_bytes = header[1] == 1 ? 2 : 4;
    file->words = (const char *)file->map + HEADER_BYTES;
    size_t body = file->map_bytes - HEADER_BYTES, word_bytes = (size_t)file->word_bytes;
    if (header[2] < 1 || body % word_bytes || (uint64_t)header[2] > body / word_bytes / LEAST_WORDS)
        return error_set(error,
                         "%s: the header says %" PRId32 " examples, but %zu bytes follow it; make the file again "
                         "(dev/reference/make_hellaswag.py)",
                         file->path, header[2], body);
    file->examples = header[2];
    return 0;
}

/* Finds and checks all examples. */
static int read_examples(HellaSwag *file, Error *error)
{
    int64_t at = 0, end = (int64_t)(file->map_bytes - HEADER_BYTES) / file->word_bytes;
    const char *wrong;
    HellaSwagExample e;
    file->first_word = xcalloc((size_t)file->examples, sizeof *file->first_word);
    for (int64_t i = 0; i < file->examples; i++) {
        int64_t words = read_example(file, at, end, &e, &wrong);
        if (words < 0)
            return error_set(error, "%s: example %" PRId64 " of %" PRId64 " %s; make the file again", file->path, i,
                             file->examples, wrong);
        file->largest_id = largest_of(file, e.context, e.context_tokens, file->largest_id);
        for (int k = 0; k < e.completions; k++)
            file->largest_id = largest_of(file, e.completion[k], e.completion_tokens[k], file->largest_id);
        file->first_word[i] = at;
        at += words;
    }
    if (at != end)
        return error_set(error, "%s: %" PRId64 " words follow the last of %" PRId64 " examples; make the file again",
                         file->path, end - at, file->examples);
    if (file->largest_id > INT32_MAX || file->largest_id == marker(file))
        return error_set(error, "%s: holds the id %" PRId64 ", which is no token", file->path, file->largest_id);
    return 0;
}

int hellaswag_open(HellaSwag *file, const char *path, Error *error)
{
    *file = (HellaSwag){0};
    file->map = file_map(path, &file->map_bytes, error);
    if (!file->map) return -1;
    file->path = xstrdup(path);
    if (!read_header(file, error) && !read_examples(file, error)) return 0;
    hellaswag_close(file);
    return -1;
}

void hellaswag_close(HellaSwag *file)
{
    file_unmap(file->map, file->map_bytes);
    free(file->first_word);
    free(file->path);
    *file = (HellaSwag){0};
}

void hellaswag_example(const HellaSwag *file, int64_t i, HellaSwagExample *example)
{
    const char *wrong = "is beyond the end";
    int64_t end = (int64_t)(file->map_bytes - HEADER_BYTES) / file->word_bytes;
    if (i < 0 || i >= file->examples || read_example(file, file->first_word[i], end, example, &wrong) < 0)
        die("%s: example %" PRId64 " of %" PRId64 " %s", file->path, i, file->examples, wrong);
}

int64_t hellaswag_longest(const HellaSwagExample *example)
{
    int64_t longest = 0;
    for (int k = 0; k < example->completions; k++) longest = max_i64(longest, example->completion_tokens[k]);
    return example->context_tokens + longest;
}

int64_t hellaswag_tokens(const HellaSwag *file, const HellaSwagExample *example, int k, int32_t *out)
{
    int64_t count = 0;
    for (int64_t i = 0; i < example->context_tokens; i++) out[count++] = (int32_t)word(file, example->context + i);
    for (int64_t i = 0; i < example->completion_tokens[k]; i++)
        out[count++] = (int32_t)word(file, example->completion[k] + i);
    return count;
}
