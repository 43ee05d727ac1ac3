/* token_file.c: the three formats to the byte, 64-bit offsets, and files that lie about themselves. */
#include "token_file.h"
#include "test.h"
#include "test_files.h"

static char *folder;
static char path[4096];

/* A file with this header and `body_bytes` of body, each byte its place modulo 251. */
static void write_llmc(int32_t magic, int32_t version, int32_t tokens, size_t body_bytes)
{
    size_t bytes = 1024 + body_bytes;
    unsigned char *data = xcalloc(1, bytes);
    int32_t header[3] = {magic, version, tokens};
    memcpy(data, header, sizeof header);
    for (size_t i = 0; i < body_bytes; i++) data[1024 + i] = (unsigned char)(i % 251);
    test_write_file(path, data, bytes);
    free(data);
}

static void test_formats(void)
{
    Error error = {""};
    TokenFile file;
    int32_t out[3];
    test_case("reading: llm.c uint16, llm.c uint32, raw uint16");
    write_llmc(20240520, 1, 5, 10);
    CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == 5 && file.token_bytes == 2, "%s", error.text);
    token_file_read(&file, 1, 3, out);
    CHECK(out[0] == 0x0302 && out[1] == 0x0504 && out[2] == 0x0706, "%x %x %x", out[0], out[1], out[2]);
    token_file_read(&file, 5, 0, out);
    CHECK(strcmp(file.path, path) == 0, "%s", file.path);
    token_file_close(&file);

    write_llmc(20240801, 7, 4, 16);
    CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == 4 && file.token_bytes == 4, "%s", error.text);
    token_file_read(&file, 3, 1, out);
    CHECK(out[0] == 0x0f0e0d0c, "%x", out[0]);
    token_file_close(&file);

    const uint16_t raw[] = {7, 65535, 9};
    test_write_file(path, raw, sizeof raw);
    CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == 3 && file.token_bytes == 2, "%s", error.text);
    token_file_read(&file, 0, 3, out);
    CHECK(out[0] == 7 && out[1] == 65535 && out[2] == 9, "%d %d %d", out[0], out[1], out[2]);
    token_file_close(&file);
}

static void refuse(const char *what, const char *part)
{
    Error error = {""};
    TokenFile file;
    bool refused = token_file_open(&file, path, &error) == -1;
    CHECK(refused && strstr(error.text, path) && strstr(error.text, part), "%s: %s", what, error.text);
    if (!refused) token_file_close(&file);
}

static void test_lies(void)
{
    test_case("refusals: counts that disagree with the size, versions, odd sizes, nothing at all");
    write_llmc(20240520, 1, 6, 10);
    refuse("one token too many", "says 6 tokens");
    write_llmc(20240520, 1, 4, 10);
    refuse("one token too few", "says 4 tokens");
    write_llmc(20240520, 1, 5, 11);
    refuse("half a token", "says 5 tokens");
    write_llmc(20240520, 1, -1, 10);
    refuse("negative", "says -1 tokens");
    write_llmc(20240520, 1, 0, 0);
    refuse("none", "says 0 tokens");
    write_llmc(20240520, 1, INT32_MAX, 10);
    refuse("huge", "says 2147483647 tokens");
    write_llmc(20240801, 7, 1 << 30, 0);
    refuse("a product that is 0 in 32 bits", "says 1073741824 tokens");
    write_llmc(20240801, 7, 5, 10);
    refuse("uint32 with the size of uint16", "says 5 tokens of 4 bytes");
    write_llmc(20240520, 7, 5, 10);
    refuse("version", "version 7");
    test_write_file(path, "abc", 3);
    refuse("odd size", "odd size");
    test_write_file(path, "", 0);
    refuse("empty", "empty");
    remove(path);
    refuse("missing", "No such file");

    test_case("a truncated file with a header is refused");
    write_llmc(20240520, 1, 5, 10);
    size_t bytes;
    char *data = test_read_file(path, &bytes);
    for (size_t cut = 4; cut<bytes; cut += cut> 20 && cut < 1010 ? 37 : 1) {
        test_write_file(path, data, cut);
        refuse("truncated", cut < 1024 ? "truncated" : "says 5 tokens");
    }
    free(data);
}

static void test_mutations(void)
{
    size_t bytes;
    test_case("mutated files are read within their bounds or refused");
    write_llmc(20240801, 7, 100, 400);
    char *data = test_read_file(path, &bytes);
    for (uint32_t i = 0; i < (test_long() ? 20000 : 800); i++) {
        Error error = {""};
        TokenFile file;
        size_t length = bytes;
        char *copy = memcpy(xmalloc(bytes), data, bytes);
        test_mutate(copy, &length, 12, i);
        test_write_file(path, copy, length);
        free(copy);
        if (token_file_open(&file, path, &error)) {
            CHECK(error.text[0], "mutation %u: refused without a reason", i);
            continue;
        }
        int32_t *tokens = xcalloc((size_t)file.tokens, sizeof *tokens);
        token_file_read(&file, 0, file.tokens, tokens); /* within the mapping, as sanitizers see it */
        free(tokens);
        token_file_close(&file);
    }
    free(data);
}

static void test_text(void)
{
    Error error = {""};
    TokenFile file;
    static const char TEXT[] = "In the beginning God created the heaven and the earth.\n";
    uint16_t tokens[600];
    test_case("a text is not taken for raw tokens; raw tokens are, and say so");
    test_write_file(path, TEXT, sizeof TEXT - 1 - (sizeof TEXT - 1) % 2);
    CHECK(token_file_open(&file, path, &error) == -1 && strstr(error.text, "tokenize"), "%s", error.text);
    for (int i = 0; i < 600; i++) tokens[i] = (uint16_t)(i + 40);
    test_write_file(path, tokens, sizeof tokens);
    CHECK(token_file_open(&file, path, &error) == 0 && file.raw && file.tokens == 600, "%s", error.text);
    token_file_close(&file);
}

static void test_writer(void)
{
    Error error = {""};
    TokenFile file;
    size_t bytes;
    enum { TOKENS = 9001 };
    int32_t *tokens = xcalloc(TOKENS, sizeof *tokens), *back = xcalloc(TOKENS, sizeof *back);
    for (int token_bytes = 2; token_bytes <= 4; token_bytes += 2) {
        test_case(token_bytes == 2 ? "writing uint16" : "writing uint32");
        for (int i = 0; i < TOKENS; i++) tokens[i] = token_bytes == 2 ? i * 7 : i * 200003;
        TokenWriter *w = token_writer_open(path, token_bytes, &error);
        CHECK(token_writer_append(w, tokens, 1, &error) == 0, "%s", error.text);
        CHECK(token_writer_append(w, tokens + 1, 0, &error) == 0, "%s", error.text);
        CHECK(token_writer_append(w, tokens + 1, TOKENS - 1, &error) == 0, "%s", error.text);
        CHECK(token_writer_close(w, &error) == 0, "%s", error.text);
        CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == TOKENS && file.token_bytes == token_bytes,
              "%s", error.text);
        token_file_read(&file, 0, TOKENS, back);
        CHECK(memcmp(tokens, back, TOKENS * sizeof *tokens) == 0, "content");
        token_file_close(&file);
        int32_t *raw = (int32_t *)test_read_file(path, &bytes);
        CHECK(bytes == 1024 + (size_t)(TOKENS * token_bytes), "%zu bytes", bytes);
        CHECK(raw[0] == (token_bytes == 2 ? 20240520 : 20240801) && raw[1] == (token_bytes == 2 ? 1 : 7) &&
                  raw[2] == TOKENS && raw[3] == 0 && raw[255] == 0,
              "header");
        free(raw);
    }
    free(tokens);
    free(back);
}

static bool exists(const char *suffix)
{
    char *name = xformat("%s%s", path, suffix);
    bool found = access(name, F_OK) == 0;
    free(name);
    return found;
}

static void test_writer_failures(void)
{
    Error error = {""};
    const int32_t good[] = {1, 2, 3}, large[] = {4, 65536}, negative[] = {-1};
    size_t bytes;
    test_case("writing: what does not fit, an old file stays, nothing is left behind");
    test_write_file(path, "old", 3);
    TokenWriter *w = token_writer_open(path, 2, &error);
    CHECK(token_writer_append(w, good, 3, &error) == 0, "%s", error.text);
    CHECK(token_writer_append(w, large, 2, &error) == -1 && strstr(error.text, "token 65536"), "%s", error.text);
    CHECK(token_writer_append(w, negative, 1, &error) == -1 && strstr(error.text, "token -1"), "%s", error.text);
    CHECK(token_writer_append(w, NULL, INT32_MAX, &error) == -1 && strstr(error.text, "at most 2147483647"), "%s",
          error.text);
    token_writer_abandon(w);
    w = token_writer_open(path, 2, &error);
    CHECK(token_writer_close(w, &error) == -1 && strstr(error.text, "no tokens"), "%s", error.text);
    CHECK(!token_writer_open("/nowhere/x", 2, &error) && strstr(error.text, "/nowhere/x"), "%s", error.text);
    char *old = test_read_file(path, &bytes);
    CHECK(bytes == 3 && memcmp(old, "old", 3) == 0 && !exists(".tmp"), "old file, no other");
    free(old);

    char *directory = xformat("%s/directory", folder);
    CHECK(mkdir(directory, 0700) == 0, "mkdir");
    w = token_writer_open(directory, 2, &error);
    CHECK(token_writer_append(w, good, 3, &error) == 0, "%s", error.text);
    CHECK(token_writer_close(w, &error) == -1 && strstr(error.text, "cannot rename"), "%s", error.text);
    CHECK(remove(directory) == 0, "the folder is still empty");
    char *temporary = xformat("%s.tmp", directory);
    CHECK(access(temporary, F_OK) != 0, "%s is left behind", temporary);
    free(temporary);
    free(directory);

    test_case("writing to a full disk");
    int results[3];
    int32_t *many = xcalloc(1 << 20, sizeof *many);
    test_disk_full(2000);
    w = token_writer_open(path, 2, &error);
    results[0] = token_writer_append(w, many, 1 << 20, &error);
    token_writer_abandon(w);
    w = token_writer_open(path, 4, &error);
    results[1] = token_writer_append(w, many, 300, &error); /* stays in the buffer */
    results[2] = token_writer_close(w, &error);
    test_disk_normal();
    free(many);
    CHECK(results[0] == -1 && results[1] == 0 && results[2] == -1, "%d %d %d", results[0], results[1], results[2]);
    CHECK(strstr(error.text, "File too large"), "%s", error.text);
    old = test_read_file(path, &bytes);
    CHECK(bytes == 3 && memcmp(old, "old", 3) == 0 && !exists(".tmp"), "old file, no other");
    free(old);
}

static void test_lists(void)
{
    Error error = {""};
    TokenFile *files;
    int64_t count;
    test_case("several files: sorted; one broken file refuses all");
    for (int i = 0; i < 3; i++) {
        char *name = xformat("%s/train_%d.bin", folder, 2 - i);
        const uint16_t tokens[] = {(uint16_t)(2 - i), 5};
        test_write_file(name, tokens, sizeof tokens);
        free(name);
    }
    char *pattern = xformat("%s/train_*.bin", folder), *broken = xformat("%s/train_x.bin", folder);
    CHECK(token_files_open(&files, &count, pattern, &error) == 0 && count == 3, "%s", error.text);
    for (int32_t i = 0, token; i < 3; i++) {
        token_file_read(&files[i], 0, 1, &token);
        CHECK(token == i, "file %d begins with %d", i, token);
    }
    token_files_close(files, count);
    test_write_file(broken, "odd", 3);
    CHECK(token_files_open(&files, &count, pattern, &error) == -1 && strstr(error.text, broken), "%s", error.text);
    CHECK(!files && count == 0, "nothing to close");
    CHECK(token_files_open(&files, &count, "/nowhere/*", &error) == -1, "no match");
    free(pattern);
    free(broken);
}

static void test_large_files(void)
{
    Error error = {""};
    TokenFile file;
    int32_t token[2] = {-1, -1};
    test_case("files beyond 4 GiB and beyond 2^31 tokens");
    const int32_t header[256] = {20240801, 7, 1500000000};
    if (!test_sparse_file(path, header, sizeof header, 1024 + INT64_C(6000000000))) {
        test_skip("no sparse files here");
        return;
    }
    FILE *stream = fopen(path, "r+b");
    const int32_t last = 123456;
    fseeko(stream, -4, SEEK_END);
    fwrite(&last, 4, 1, stream);
    fclose(stream);
    CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == 1500000000, "%s", error.text);
    token_file_read(&file, file.tokens - 2, 2, token);
    CHECK(token[0] == 0 && token[1] == 123456, "%d %d", token[0], token[1]);
    token_file_close(&file);

    CHECK(test_sparse_file(path, "", 0, INT64_C(5000000000)), "sparse");
    CHECK(token_file_open(&file, path, &error) == 0 && file.tokens == INT64_C(2500000000), "%s", error.text);
    token_file_read(&file, file.tokens - 1, 1, token);
    CHECK(token[0] == 0, "%d", token[0]);
    token_file_close(&file);
}

int main(void)
{
    folder = test_folder();
    snprintf(path, sizeof path, "%s/tokens.bin", folder);
    test_formats();
    test_lies();
    test_mutations();
    test_text();
    test_writer();
    test_writer_failures();
    test_lists();
    test_large_files();
    test_folder_remove(folder);
    return test_done();
}
