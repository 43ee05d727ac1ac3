/* What the readers and writers of files share: a file as memory, output with clear errors, folders, lists of files.
 *
 * Every function that can fail returns NULL or -1 with the path and the system's reason in `error`.
 *
 * Floor 1.
 */
#ifndef LLMC_FILE_H
#define LLMC_FILE_H

#include "common.h"

#include <stdio.h>

C_BEGIN

/* A whole text, ending with a zero, owned by the caller; or NULL. */
char *file_read_text(const char *path, Error *error);

/* The whole file, read-only, page by page on demand; *bytes > 0. NULL when it is missing, empty or not a regular file.
 * Owned by the caller, released by file_unmap. */
void *file_map(const char *path, size_t *bytes, Error *error);
void file_unmap(void *map, size_t bytes); /* NULL is fine */

/* All bytes or -1. An error may come late, from file_finish: the stream is buffered. `path` is for the message. */
int file_write(FILE *stream, const char *path, const void *data, size_t bytes, Error *error);
/* Flushes to the disk (fsync) and closes; the stream is closed in any case. */
int file_finish(FILE *stream, const char *path, Error *error);

/* A whole new file, flushed; and a text file complete or as it was: beside (PATH.tmp), flushed, renamed. 0 or -1, and
 * then the new file is gone. */
int file_write_new(const char *path, const void *data, size_t bytes, Error *error);
int file_write_text(const char *path, const char *text, Error *error);

/* Folders of files. Make: one that is there already is fine. Sync: flushes the names in it. Delete: with its files (no
 * folders within); one that is absent is fine. 0 or -1. */
int file_make_folder(const char *path, Error *error);
int file_sync_folder(const char *path, Error *error);
int file_delete_folder(const char *path, Error *error);

/* `patterns`: a file's name, a glob pattern, or several separated by commas. *paths: those of the first pattern, sorted
 * by bytes (the same in every locale), then of the next ...; a pattern without a match is an error. Freed by
 * file_list_free. */
int file_list(const char *patterns, char ***paths, int64_t *count, Error *error);
void file_list_free(char **paths, int64_t count);

C_END
#endif
