/* What every other file stands on: how the program stops, memory, errors of file readers, a 64-bit hash, clocks, logs.
 *
 * Two ways to fail. A reader of files or of user input fills an Error and returns -1: the caller decides, tests feed it
 * broken files. Everything that cannot go on calls die(): one line on stderr that says what, where and what to do, then
 * exit code 1 (files, disk, device, numbers) or 2 (command line, config file).
 *
 * Floor 0: includes libc only.
 */
#ifndef LLMC_COMMON_H
#define LLMC_COMMON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define C_BEGIN       extern "C" {
#define C_END         }
#define LLMC_NORETURN [[noreturn]]
#else
#define C_BEGIN
#define C_END
#define LLMC_NORETURN _Noreturn
#endif

#ifdef __GNUC__
#define LLMC_PRINTF(text, first) __attribute__((format(printf, text, first)))
#else
#define LLMC_PRINTF(text, first)
#endif

C_BEGIN

enum { EXIT_RUNTIME = 1, EXIT_USAGE = 2, EXIT_GAP = 3 }; /* 3: `compare` found a gap beyond --max_gap */

/* Prints "error: ..." as one line and exits. The message says what failed, where, and what to do. */
LLMC_NORETURN void die(const char *format, ...) LLMC_PRINTF(1, 2);       /* exit code 1 */
LLMC_NORETURN void die_usage(const char *format, ...) LLMC_PRINTF(1, 2); /* exit code 2 */
/* Called with the exit code after the message and before exit; many ranks set it to MPI_Abort. Returns the one before. */
typedef void (*DieHook)(int code);
DieHook die_set_hook(DieHook hook);
/* What stands between "error: " and the message from now on, as "rank 3 on node7: "; kept, NULL: nothing. */
void die_set_prefix(const char *prefix);

/* The reason for a failure, filled by functions that return -1. */
typedef struct {
    char text[1024];
} Error;
int error_set(Error *error, const char *format, ...) LLMC_PRINTF(2, 3); /* returns -1; error may be NULL */

/* Never return NULL: they die when memory is out, naming the size. Free with free(). xcalloc checks count * bytes. */
void *xmalloc(size_t bytes);
void *xcalloc(size_t count, size_t bytes);
void *xrealloc(void *memory, size_t bytes);
char *xstrdup(const char *text);
char *xformat(const char *format, ...) LLMC_PRINTF(1, 2); /* owned by the caller */

/* XXH64 (Yann Collet, xxHash specification 0.1.1): checksums of tensors, data receipts, state_hash. */
uint64_t hash64(const void *data, size_t bytes, uint64_t seed);
/* Of long data that streams: pieces of HASH_PIECE bytes (the last may be shorter), each seeded with the hash before. */
enum { HASH_PIECE = 1 << 20 };
uint64_t hash64_pieces(const void *data, size_t bytes);

double now_seconds(void);     /* monotonic clock */
int64_t peak_rss_bytes(void); /* largest resident set of this process so far, 0 where the system does not tell */

/* A bar on stderr for long set-up work, only on a terminal; gone when done == total. */
void progress(const char *what, int64_t done, int64_t total);

/* Notes for a person, to stderr; results go to stdout. note_off: of many ranks one speaks. */
void note_off(void);
void note(const char *format, ...) LLMC_PRINTF(1, 2);
/* One that every rank says, after its prefix. */
void warn(const char *format, ...) LLMC_PRINTF(1, 2);

static inline int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

C_END
#endif
