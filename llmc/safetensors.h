/* safetensors: named tensors in one file, as Hugging Face reads and writes them.
 *
 *     | u64 N | N bytes of JSON, padded with spaces | tensor data, in header order, no holes |
 *
 *     {"__metadata__": {"format": "pt"},
 *      "wte.weight": {"dtype": "BF16", "shape": [257, 192], "data_offsets": [0, 98688]}, ...}
 *
 * Offsets count from the end of the header; little-endian, row-major. The reader maps the file and checks everything
 * before it hands out a pointer: N <= 100,000,000 and within the file; known dtypes; bytes = product(shape) x dtype
 * size, without overflow; buffer without holes or overlaps, ending with the file; no duplicate names. The writer
 * computes all offsets first, so tensors stream out in the order they were added and nothing is held in memory.
 *
 * Format: https://github.com/huggingface/safetensors (README and src/tensor.rs). Floor 1.
 */
#ifndef LLMC_SAFETENSORS_H
#define LLMC_SAFETENSORS_H

#include "common.h"

C_BEGIN

typedef enum { ST_F32, ST_F16, ST_BF16, ST_F8_E4M3, ST_F8_E5M2, ST_U8, ST_I32, ST_I64, ST_DTYPE_COUNT } StDType;
enum { ST_MAX_RANK = 8 };

size_t st_dtype_bytes(StDType dtype);
const char *st_dtype_name(StDType dtype); /* "BF16" */

typedef struct {
    char *name; /* owned by the file */
    StDType dtype;
    int rank;
    int64_t shape[ST_MAX_RANK];
    const void *data; /* in the mapping; not aligned beyond 1 byte */
    size_t bytes;
} StTensor;

typedef struct {
    int64_t count;
    StTensor *tensor;   /* [count], in file order */
    char **metadata;    /* key, value, key, value, ..., NULL */
    StTensor **by_name; /* private: [count], sorted by name */
    void *map;          /* private */
    size_t map_bytes;
} StFile;

int st_open(StFile *file, const char *path, Error *error); /* 0, or -1 with the reason; nothing to close after -1 */
void st_close(StFile *file);
const StTensor *st_find(const StFile *file, const char *name); /* NULL when absent; O(log n) or better */
const char *st_metadata(const StFile *file, const char *key);  /* NULL when absent */

/* Writing: st_writer_new, st_writer_add for every tensor, st_writer_begin, then st_writer_data in pieces of any size,
 * in the order of the adds, exactly as many bytes as were declared; st_writer_end flushes to disk (fsync) and closes.
 * An impossible shape or a name that was added before is a mistake of the program: it dies.
 * Every call that returns int returns 0, or -1 with the reason (no space left, wrong byte count); after -1 only
 * st_writer_free is allowed. */
typedef struct StWriter StWriter;
StWriter *st_writer_new(void);
void st_writer_add(StWriter *w, const char *name, StDType dtype, int rank, const int64_t *shape);
void st_writer_add_metadata(StWriter *w, const char *key, const char *value); /* {"format":"pt"} is always written */
int st_writer_begin(StWriter *w, const char *path, Error *error);
int st_writer_data(StWriter *w, const void *data, size_t bytes, Error *error);
int st_writer_end(StWriter *w, Error *error);
void st_writer_free(StWriter *w); /* closes the file too; NULL is fine */

C_END
#endif
