/* What a function prints to stdout, as a string: for tests of screens and tables. */
#ifndef LLMC_TEST_CAPTURE_H
#define LLMC_TEST_CAPTURE_H

#include "test_files.h"

typedef struct {
    int saved; /* the real stdout */
    FILE *file;
} Capture;

static inline Capture capture_start(void)
{
    fflush(stdout);
    Capture capture = {.saved = dup(STDOUT_FILENO), .file = tmpfile()};
    if (capture.saved < 0 || !capture.file || dup2(fileno(capture.file), STDOUT_FILENO) < 0)
        die("cannot capture stdout");
    return capture;
}

static inline char *capture_end(Capture *capture) /* owned by the caller */
{
    fflush(stdout);
    dup2(capture->saved, STDOUT_FILENO);
    close(capture->saved);
    fseek(capture->file, 0, SEEK_END);
    size_t bytes = (size_t)ftell(capture->file);
    char *text = xcalloc(bytes + 1, 1);
    rewind(capture->file);
    if (fread(text, 1, bytes, capture->file) != bytes) die("cannot read what was captured");
    fclose(capture->file);
    return text;
}

#endif
