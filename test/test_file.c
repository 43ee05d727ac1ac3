/* file.c: mapping, lists of files, and writing to a disk that fills up. */
#include "file.h"
#include "test.h"
#include "test_files.h"

static void test_map(const char *folder)
{
    Error error = {""};
    size_t bytes = 0;
    char *path = xformat("%s/map", folder), *fifo = xformat("%s/fifo", folder);
    test_case("map: content, and what cannot be mapped");
    test_write_file(path, "hello", 5);
    char *map = file_map(path, &bytes, &error);
    CHECK(map && bytes == 5 && memcmp(map, "hello", 5) == 0, "content");
    file_unmap(map, bytes);
    file_unmap(NULL, 0);
    test_write_file(path, "", 0);
    CHECK(!file_map(path, &bytes, &error) && strstr(error.text, "map: the file is empty"), "%s", error.text);
    CHECK(!file_map(folder, &bytes, &error) && strstr(error.text, "not a regular file"), "%s", error.text);
    CHECK(!file_map("/nowhere/x", &bytes, &error) && strstr(error.text, "/nowhere/x: No such file"), "%s", error.text);
    CHECK(mkfifo(fifo, 0600) == 0 && !file_map(fifo, &bytes, &error), "a FIFO does not hang");
    remove(path);
    remove(fifo);
    free(path);
    free(fifo);
}

static void check_list(const char *folder, const char *patterns, const char *expected)
{
    Error error = {""};
    char **paths;
    int64_t count;
    char *joined = xstrdup("");
    int result = file_list(patterns, &paths, &count, &error);
    for (int64_t i = 0; i < count; i++) {
        char *longer = xformat("%s%s ", joined, paths[i] + strlen(folder) + 1);
        free(joined);
        joined = longer;
    }
    CHECK(result == 0 && strcmp(joined, expected) == 0, "%s: \"%s\" %s", patterns, joined, error.text);
    file_list_free(paths, count);
    free(joined);
}

static void test_list(const char *folder)
{
    static const char *names[] = {"b_2", "b_10", "B_1", "a", "c,d"};
    Error error = {""};
    char **paths;
    int64_t count;
    test_case("lists: sorted by bytes within a pattern, patterns in order, no match is an error");
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        char *path = xformat("%s/%s", folder, names[i]);
        test_write_file(path, "x", 1);
        free(path);
    }
    char *glob = xformat("%s/*_*", folder), *two = xformat("%s/b_*,%s/a", folder, folder);
    char *broken = xformat("%s/a,%s/none*", folder, folder), *empty = xformat("%s/a,", folder);
    check_list(folder, glob, "B_1 b_10 b_2 ");
    check_list(folder, two, "b_10 b_2 a ");
    CHECK(file_list(broken, &paths, &count, &error) == -1 && strstr(error.text, "/none*\"") && !paths && count == 0,
          "%s", error.text);
    CHECK(file_list(empty, &paths, &count, &error) == -1 && strstr(error.text, "no file matches \"\""), "%s",
          error.text);
    CHECK(file_list("", &paths, &count, &error) == -1, "no pattern");
    free(glob);
    free(two);
    free(broken);
    free(empty);
}

/* Writes `bytes` zeros to the path: 0, or -1 with the reason. */
static int write_zeros(const char *path, size_t bytes, Error *error)
{
    char *zeros = xcalloc(1, bytes);
    FILE *stream = fopen(path, "wb");
    if (!stream) die("cannot open %s", path);
    int written = file_write(stream, path, zeros, bytes, error),
        finished = file_finish(stream, path, written ? NULL : error);
    free(zeros);
    return written || finished ? -1 : 0;
}

static void test_write(const char *folder)
{
    Error error = {""};
    size_t bytes;
    char *path = xformat("%s/out", folder);
    test_case("writing: whole, and a full disk found early or late");
    CHECK(write_zeros(path, 100000, &error) == 0, "%s", error.text);
    char *data = test_read_file(path, &bytes);
    CHECK(bytes == 100000, "%zu bytes", bytes);
    free(data);
    CHECK(write_zeros(path, 0, &error) == 0, "nothing");
    test_disk_full(50);
    int large = write_zeros(path, 100000, &error);
    char *large_text = xstrdup(error.text);
    int small = write_zeros(path, 100, &error); /* stays in the buffer until the end */
    test_disk_normal();
    CHECK(large == -1 && strstr(large_text, "/out: File too large; free some space"), "%s", large_text);
    CHECK(small == -1 && strstr(error.text, "/out: File too large; free some space"), "%s", error.text);
    free(large_text);
    free(path);
}

int main(void)
{
    char *folder = test_folder();
    test_map(folder);
    test_list(folder);
    test_write(folder);
    test_folder_remove(folder);
    return test_done();
}
