/* tokenizer.c: every byte there and back, files to token files, and what can go wrong on the way. */
#include "tokenizer.h"
#include "test.h"
#include "test_files.h"
#include "token_file.h"

static void test_bytes(void)
{
    char text[256], out[1];
    int32_t tokens[256];
    test_case("every byte there and back; other tokens are no bytes");
    for (int i = 0; i < 256; i++) text[i] = (char)i;
    tokenizer_encode(text, 256, tokens);
    for (int i = 0; i < 256; i++)
        CHECK(tokens[i] == i && tokenizer_decode(i, out) == 1 && out[0] == text[i], "byte %d: token %d", i, tokens[i]);
    const int32_t none[] = {BYTE_TOKENIZER_EOT, BYTE_TOKENIZER_VOCAB, -1, INT32_MAX, INT32_MIN};
    for (int i = 0; i < 5; i++) CHECK(tokenizer_decode(none[i], out) == 0, "token %d", none[i]);
    CHECK(BYTE_TOKENIZER_VOCAB == 257, "vocabulary");
}

static void test_files(const char *folder)
{
    enum { LARGE = (1 << 20) + 3 }; /* beyond one piece */
    Error error = {""};
    int64_t tokens = 0, files = 0;
    char *large = xmalloc(LARGE);
    char *a = xformat("%s/a.txt", folder), *b = xformat("%s/b.txt", folder), *c = xformat("%s/c.txt", folder);
    char *output = xformat("%s/out.bin", folder), *inputs = xformat("%s,%s/[ac].txt", b, folder);
    for (int i = 0; i < LARGE; i++) large[i] = (char)(i * 31 % 253);
    test_write_file(a, large, LARGE);
    test_write_file(b, "hi\xff", 3);
    test_write_file(c, "", 0);

    test_case("files: end-of-text in front of each, in the order given");
    CHECK(tokenize_files(inputs, output, &tokens, &files, &error) == 0, "%s", error.text);
    CHECK(files == 3 && tokens == LARGE + 3 + 3, "%lld files, %lld tokens", (long long)files, (long long)tokens);
    TokenFile file;
    CHECK(token_file_open(&file, output, &error) == 0 && file.tokens == tokens && file.token_bytes == 2, "%s",
          error.text);
    int32_t *all = xcalloc((size_t)file.tokens, sizeof *all);
    token_file_read(&file, 0, file.tokens, all);
    CHECK(all[0] == 256 && all[1] == 'h' && all[2] == 'i' && all[3] == 255 && all[4] == 256, "b.txt");
    int different = 0;
    for (int i = 0; i < LARGE; i++) different += all[5 + i] != (unsigned char)large[i];
    CHECK(different == 0, "a.txt: %d tokens differ", different);
    CHECK(all[LARGE + 5] == 256, "c.txt is empty: its end-of-text alone");
    free(all);
    token_file_close(&file);

    test_case("files: missing input, a folder, no place for the output, a full disk; the old output stays");
    test_write_file(output, "old", 3);
    char *none = xformat("%s,%s/none", a, folder), *directory = xformat("%s,%s", b, folder);
    CHECK(tokenize_files(none, output, &tokens, &files, &error) == -1 && strstr(error.text, "/none"), "%s", error.text);
    CHECK(tokenize_files(directory, output, &tokens, &files, &error) == -1 && strstr(error.text, "directory"), "%s",
          error.text);
    CHECK(tokenize_files(b, "/nowhere/x", &tokens, &files, &error) == -1 && strstr(error.text, "/nowhere/x"), "%s",
          error.text);
    test_disk_full(100000);
    int full = tokenize_files(a, output, &tokens, &files, &error);
    test_disk_normal();
    CHECK(full == -1 && strstr(error.text, "File too large"), "%s", error.text);
    size_t bytes;
    char *old = test_read_file(output, &bytes), *temporary = xformat("%s.tmp", output);
    CHECK(bytes == 3 && access(temporary, F_OK) != 0, "%zu bytes", bytes);

    char *texts[] = {large, a, b, c, output, inputs, none, directory, old, temporary};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) free(texts[i]);
}

int main(void)
{
    char *folder = test_folder();
    test_bytes();
    test_files(folder);
    test_folder_remove(folder);
    return test_done();
}
