/* See common.h. */
#include "common.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

static DieHook die_hook;
static const char *die_prefix;

DieHook die_set_hook(DieHook hook)
{
    DieHook before = die_hook;
    die_hook = hook;
    return before;
}

void die_set_prefix(const char *prefix) { die_prefix = prefix; }

static void report(const char *kind, const char *format, va_list arguments)
{
    char line[4096]; /* one write, so that the lines of many ranks stay whole */
    snprintf(line, sizeof line / 2, "%s%s", kind, die_prefix ? die_prefix : "");
    size_t start = strlen(line);
    vsnprintf(line + start, sizeof line - start - 1, format, arguments);
    strcat(line, "\n");
    fflush(stdout);
    fputs(line, stderr);
}

LLMC_NORETURN static void end_process(int code)
{
    if (die_hook) die_hook(code);
    exit(code);
}

void die(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report("error: ", format, arguments);
    va_end(arguments);
    end_process(EXIT_RUNTIME);
}

void die_usage(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report("error: ", format, arguments);
    va_end(arguments);
    end_process(EXIT_USAGE);
}

int error_set(Error *error, const char *format, ...)
{
    va_list arguments;
    if (!error) return -1;
    va_start(arguments, format);
    vsnprintf(error->text, sizeof error->text, format, arguments);
    va_end(arguments);
    return -1;
}

void *xmalloc(size_t bytes)
{
    void *memory = malloc(bytes ? bytes : 1);
    if (!memory) die("out of memory: could not allocate %zu bytes", bytes);
    return memory;
}

void *xcalloc(size_t count, size_t bytes)
{
    void *memory = calloc(count ? count : 1, bytes ? bytes : 1);
    if (!memory) die("out of memory: could not allocate %zu x %zu bytes", count, bytes);
    return memory;
}

void *xrealloc(void *memory, size_t bytes)
{
    void *grown = realloc(memory, bytes ? bytes : 1);
    if (!grown) die("out of memory: could not allocate %zu bytes", bytes);
    return grown;
}

char *xstrdup(const char *text)
{
    size_t bytes = strlen(text) + 1;
    return memcpy(xmalloc(bytes), text, bytes);
}

char *xformat(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vsnprintf(NULL, 0, format, arguments);
    va_end(arguments);
    if (length < 0) die("cannot format \"%s\"", format);

    char *text = xmalloc((size_t)length + 1);
    va_start(arguments, format);
    vsnprintf(text, (size_t)length + 1, format, arguments);
    va_end(arguments);
    return text;
}

/* ---- XXH64 ---- */

static const uint64_t PRIME1 = 0x9E3779B185EBCA87u, PRIME2 = 0xC2B2AE3D27D4EB4Fu, PRIME3 = 0x165667B19E3779F9u,
                      PRIME4 = 0x85EBCA77C2B2AE63u, PRIME5 = 0x27D4EB2F165667C5u;

static uint64_t rotate_left(uint64_t x, int bits) { return x << bits | x >> (64 - bits); }

static uint64_t read64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint64_t hash_round(uint64_t lane, uint64_t input) { return rotate_left(lane + input * PRIME2, 31) * PRIME1; }

uint64_t hash64(const void *data, size_t bytes, uint64_t seed)
{
    const unsigned char *p = data, *end = p + bytes;
    uint64_t hash;

    if (bytes >= 32) {
        uint64_t lane[4] = {seed + PRIME1 + PRIME2, seed + PRIME2, seed, seed - PRIME1};
        for (; end - p >= 32; p += 32)
            for (int i = 0; i < 4; i++) lane[i] = hash_round(lane[i], read64(p + 8 * i));
        hash = rotate_left(lane[0], 1) + rotate_left(lane[1], 7) + rotate_left(lane[2], 12) + rotate_left(lane[3], 18);
        for (int i = 0; i < 4; i++) hash = (hash ^ hash_round(0, lane[i])) * PRIME1 + PRIME4;
    } else {
        hash = seed + PRIME5;
    }
    hash += bytes;
    for (; end - p >= 8; p += 8) hash = rotate_left(hash ^ hash_round(0, read64(p)), 27) * PRIME1 + PRIME4;
    if (end - p >= 4) {
        uint32_t word;
        memcpy(&word, p, sizeof word);
        hash = rotate_left(hash ^ word * PRIME1, 23) * PRIME2 + PRIME3;
        p += 4;
    }
    for (; p < end; p++) hash = rotate_left(hash ^ *p * PRIME5, 11) * PRIME1;
    hash = (hash ^ hash >> 33) * PRIME2;
    hash = (hash ^ hash >> 29) * PRIME3;
    return hash ^ hash >> 32;
}

uint64_t hash64_pieces(const void *data, size_t bytes)
{
    uint64_t hash = 0;
    for (size_t done = 0; done < bytes; done += HASH_PIECE) {
        size_t piece = bytes - done < HASH_PIECE ? bytes - done : HASH_PIECE;
        hash = hash64((const char *)data + done, piece, hash);
    }
    return hash;
}

/* ---- clocks and notes ---- */

double now_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

int64_t peak_rss_bytes(void)
{
    struct rusage usage;
    if (getrusage(RUSAGE_SELF, &usage)) return 0;
#ifdef __APPLE__
    return usage.ru_maxrss;
#else
    return (int64_t)usage.ru_maxrss * 1024;
#endif
}

void progress(const char *what, int64_t done, int64_t total)
{
    static double shown; /* when the bar was last drawn */
    if (!isatty(STDERR_FILENO) || total <= 0) return;
    if (done < total && now_seconds() - shown < 0.2) return;
    if (done >= total) {
        if (shown > 0) fputs("\r\033[K", stderr);
        shown = 0;
        return;
    }
    shown = now_seconds();
    int filled = (int)(40 * done / total);
    fprintf(stderr, "\r%s [%.*s%*s] %d%%", what, filled, "########################################", 40 - filled, "",
            (int)(100 * done / total));
}

static bool silent;

void note_off(void) { silent = true; }

void note(const char *format, ...)
{
    if (silent) return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
}

void warn(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    report("", format, arguments);
    va_end(arguments);
}
