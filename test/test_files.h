/* Files for tests: a folder of their own that is removed at the end, writing and reading whole files, a full disk, and
 * the mutations that broken-file tests feed to readers. */
#ifndef LLMC_TEST_FILES_H
#define LLMC_TEST_FILES_H

#include "common.h"
#include "philox.h"

#include <ftw.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

/* A new folder; owned by the caller, removed with all it holds by test_folder_remove. */
static inline char *test_folder(void)
{
    const char *base = getenv("TMPDIR");
    char *folder = xformat("%s/llmc_test_XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) die("cannot make %s", folder);
    return folder;
}

static inline int test_remove_one(const char *path, const struct stat *status, int type, struct FTW *place)
{
    (void)status, (void)type, (void)place;
    return remove(path);
}

static inline void test_folder_remove(char *folder)
{
    nftw(folder, test_remove_one, 8, FTW_DEPTH | FTW_PHYS);
    free(folder);
}

static inline void test_write_file(const char *path, const void *data, size_t bytes)
{
    FILE *stream = fopen(path, "wb");
    if (!stream || fwrite(data, 1, bytes, stream) != bytes || fclose(stream)) die("cannot write %s", path);
}

/* The whole file and a NUL behind it; owned by the caller. */
static inline char *test_read_file(const char *path, size_t *bytes)
{
    FILE *stream = fopen(path, "rb");
    if (!stream) die("cannot open %s", path);
    size_t room = 1 << 16;
    char *data = xmalloc(room + 1);
    *bytes = 0;
    for (size_t got; (got = fread(data + *bytes, 1, room - *bytes, stream)) > 0;) {
        *bytes += got;
        if (*bytes == room) data = xrealloc(data, (room *= 2) + 1);
    }
    data[*bytes] = 0;
    fclose(stream);
    return data;
}

/* A file of this size, all zeros and holes, that takes no room on the disk; false where the system refuses. */
static inline bool test_sparse_file(const char *path, const void *head, size_t head_bytes, int64_t bytes)
{
    test_write_file(path, head, head_bytes);
    return truncate(path, bytes) == 0;
}

/* From here no file may grow beyond `bytes`, as on a full disk; test_disk_normal ends it. Print nothing in between. */
static inline void test_disk_full(int64_t bytes)
{
    struct rlimit limit;
    signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = (rlim_t)bytes;
    setrlimit(RLIMIT_FSIZE, &limit);
}

static inline void test_disk_normal(void)
{
    struct rlimit limit;
    getrlimit(RLIMIT_FSIZE, &limit);
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_FSIZE, &limit);
}

/* Mutation number i of data[*bytes]: some bytes replaced, within the first `head` bytes every second time, and every
 * fourth time the end cut off. The same i gives the same mutation. */
static inline void test_mutate(char *data, size_t *bytes, size_t head, uint32_t i)
{
    static const unsigned char striking[] = {0, 1, 0x7f, 0x80, 0xff, '"', '{', '}', '[', ']', ',', ':', '-', '9', '\\'};
    Philox r = philox4x32(10, i, 0, 0, 0, 0, 0);
    size_t range = i % 2 && head < *bytes ? head : *bytes;
    for (uint32_t k = 0; k < 1 + r.word[0] % 4; k++) {
        Philox flip = philox4x32(10, i, k + 1, 0, 0, 0, 0);
        unsigned char byte = flip.word[1] % 2 ? striking[flip.word[2] % sizeof striking] : flip.word[2] & 0xff;
        data[flip.word[0] % range] = (char)byte;
    }
    if (i % 4 == 3) *bytes = r.word[1] % *bytes;
}

#endif
