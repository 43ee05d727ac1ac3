/* Files as memory, output with clear errors, lists of files: see file.h. POSIX calls live here, so that the readers of
 * formats above are plain C over bytes. */
#include "file.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

void *file_map(const char *path, size_t *bytes, Error *error)
{
    struct stat status;
    void *map = MAP_FAILED;
    int descriptor = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* O_NONBLOCK: a FIFO must not hang us */
    if (descriptor < 0 || fstat(descriptor, &status)) {
        error_set(error, "cannot open %s: %s", path, strerror(errno));
    } else if (!S_ISREG(status.st_mode)) {
        error_set(error, "cannot read %s: not a regular file", path);
    } else if (status.st_size == 0) {
        error_set(error, "cannot read %s: the file is empty", path);
    } else {
        *bytes = (size_t)status.st_size;
        map = mmap(NULL, *bytes, PROT_READ, MAP_PRIVATE, descriptor, 0);
        if (map == MAP_FAILED) error_set(error, "cannot map %s (%zu bytes): %s", path, *bytes, strerror(errno));
    }
    if (descriptor >= 0) close(descriptor);
    return map == MAP_FAILED ? NULL : map;
}

void file_unmap(void *map, size_t bytes)
{
    if (map) munmap(map, bytes);
}

char *file_read_text(const char *path, Error *error)
{
    size_t bytes;
    char *map = file_map(path, &bytes, error);
    if (!map) return NULL;
    char *text = xmalloc(bytes + 1);
    memcpy(text, map, bytes);
    text[bytes] = 0;
    file_unmap(map, bytes);
    return text;
}

static int write_failed(const char *path, Error *error)
{
    bool full = errno == ENOSPC || errno == EFBIG || errno == EDQUOT;
    return error_set(error, "cannot write %s: %s%s", path, strerror(errno),
                     full ? "; free some space or choose another folder" : "");
}

int file_write(FILE *stream, const char *path, const void *data, size_t bytes, Error *error)
{
    if (bytes > 0 && fwrite(data, 1, bytes, stream) != bytes) return write_failed(path, error);
    return 0;
}

int file_finish(FILE *stream, const char *path, Error *error)
{
    int result = 0;
    if (fflush(stream) || fsync(fileno(stream))) result = write_failed(path, error);
    if (fclose(stream) && result == 0) result = write_failed(path, error);
    return result;
}

int file_write_new(const char *path, const void *data, size_t bytes, Error *error)
{
    FILE *stream = fopen(path, "wb");
    int result = stream ? file_write(stream, path, data, bytes, error) : write_failed(path, error);
    if (stream && file_finish(stream, path, result ? NULL : error)) result = -1;
    if (result) remove(path);
    return result;
}

int file_write_text(const char *path, const char *text, Error *error)
{
    char *fresh = xformat("%s.tmp", path);
    int result = file_write_new(fresh, text, strlen(text), error);
    if (result == 0 && rename(fresh, path)) {
        result = write_failed(path, error);
        remove(fresh);
    }
    free(fresh);
    return result;
}

int file_sync_folder(const char *path, Error *error)
{
    int fd = open(path, O_RDONLY | O_DIRECTORY);
    if (fd < 0) return error_set(error, "%s: cannot open the folder: %s", path, strerror(errno));
    int failed = fsync(fd);
    close(fd);
    return failed ? error_set(error, "%s: cannot flush to the disk: %s", path, strerror(errno)) : 0;
}

int file_make_folder(const char *path, Error *error)
{
    if (mkdir(path, 0777) == 0 || errno == EEXIST) return 0;
    return error_set(error, "%s: cannot create the folder: %s", path, strerror(errno));
}

int file_delete_folder(const char *path, Error *error)
{
    DIR *dir = opendir(path);
    if (!dir) return errno == ENOENT ? 0 : error_set(error, "%s: cannot open: %s", path, strerror(errno));
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        if (unlinkat(dirfd(dir), entry->d_name, 0)) {
            error_set(error, "%s/%s: cannot delete: %s", path, entry->d_name, strerror(errno));
            closedir(dir);
            return -1;
        }
    }
    closedir(dir);
    return rmdir(path) ? error_set(error, "%s: cannot delete: %s", path, strerror(errno)) : 0;
}

static int compare_paths(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* Appends the paths that match one pattern to *paths, sorted. */
static int list_pattern(const char *pattern, char ***paths, int64_t *count, Error *error)
{
    if (access(pattern, F_OK) == 0) { /* a name, whatever signs are in it */
        *paths = xrealloc(*paths, (size_t)(*count + 1) * sizeof **paths);
        (*paths)[(*count)++] = xstrdup(pattern);
        return 0;
    }
    glob_t found;
    int code = glob(pattern, GLOB_NOSORT, NULL, &found);
    if (code == GLOB_NOMATCH) return error_set(error, "no file matches \"%s\"; check the path", pattern);
    if (code) return error_set(error, "cannot list \"%s\": %s", pattern, strerror(errno));

    *paths = xrealloc(*paths, ((size_t)*count + found.gl_pathc) * sizeof **paths);
    for (size_t i = 0; i < found.gl_pathc; i++) (*paths)[(size_t)*count + i] = xstrdup(found.gl_pathv[i]);
    qsort(*paths + *count, found.gl_pathc, sizeof **paths, compare_paths);
    *count += (int64_t)found.gl_pathc;
    globfree(&found);
    return 0;
}

int file_list(const char *patterns, char ***paths, int64_t *count, Error *error)
{
    int result = 0;
    *paths = NULL;
    *count = 0;
    for (const char *at = patterns; at && result == 0;) {
        const char *comma = strchr(at, ',');
        int length = comma ? (int)(comma - at) : (int)strlen(at);
        char *pattern = xformat("%.*s", length, at);
        result = list_pattern(pattern, paths, count, error);
        free(pattern);
        at = comma ? comma + 1 : NULL;
    }
    if (result) {
        file_list_free(*paths, *count);
        *paths = NULL;
        *count = 0;
    }
    return result;
}

void file_list_free(char **paths, int64_t count)
{
    for (int64_t i = 0; i < count; i++) free(paths[i]);
    free(paths);
}
